"""Command line: REPL and subcommands over Frontend and Engine."""
