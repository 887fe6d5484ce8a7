"""Identifier stores (pages, StateImage slots, lanes); they hold no tensor data."""
