"""Containers, numeric formats, bindings and checks of weight files; knows bytes, not models."""
