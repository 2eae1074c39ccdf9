"""Checkpoints: published whole or not at all, and resumed."""
