"""Drafts of what rows may say next, and how long they are worth making."""
