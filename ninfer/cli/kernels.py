"""`ninfer kernels build`: every kernel compiled for other machines, without a GPU."""

from __future__ import annotations

from pathlib import Path

from ninfer.cli.console import Console
from ninfer.cli.exit_codes import ExitCode
from ninfer.cli.layout import table
from ninfer.cli.output_files import cannot_write
from ninfer.cli.parser import Invocation
from ninfer.cli.progress import ProgressLine
from ninfer.contract.errors import OptionError
from ninfer.kernels.build import ARCHITECTURES, build_cubins
from ninfer.options import KernelsOptions


def run(invocation: Invocation, console: Console) -> ExitCode:
    options = invocation.read(KernelsOptions)
    if options.out is None:
        raise OptionError("--out", "the folder to fill is needed")
    names = ARCHITECTURES if options.arch is None else tuple(options.arch.split(","))
    out = Path(options.out)
    try:
        with ProgressLine(console, "compiled") as line:

            def report(name: str, done: int, total: int) -> None:
                if console.shows_progress:
                    line(name, done, total)
                else:
                    console.report(f"compiled {name} ({done} of {total})")

            built = build_cubins(names, out, jobs=options.jobs, progress=report)
    except OSError as error:
        raise cannot_write("--out", out, error) from error
    rows = []
    for cubin in built:
        registers = max(entry.registers for entry in cubin.usage)
        spills = sum(entry.is_spilling for entry in cubin.usage)
        rows.append(
            (
                f"{cubin.name} {cubin.architecture}",
                f"{len(cubin.usage)} entries, up to {registers} registers"
                + (f", {spills} spill" if spills else ""),
            )
        )
    console.write_lines(table([*rows, ("written to", str(out))]))
    return ExitCode.OK
