"""Subclasses of the training loops of transformers and TRL, with hooks where this package steps in."""
