"""Constraints: what an answer must look like, enforced token by token while it is generated."""
