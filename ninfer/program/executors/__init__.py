"""Executors run planned units: cpu (NumPy references) and cuda (kernels)."""
