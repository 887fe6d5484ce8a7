"""One Op a module: contract, NumPy reference, device launch."""
