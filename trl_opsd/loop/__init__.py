"""Subclasses of the training loops of transformers and TRL, cut open where this package fills in."""
