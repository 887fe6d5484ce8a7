"""The only physical authority: pages, StateImages, transactions and execution."""
