"""CUDA sources and the library that compiles, caches and hands them out."""
