"""Types, protocols and errors that cross a folder; standard library and NumPy only."""
