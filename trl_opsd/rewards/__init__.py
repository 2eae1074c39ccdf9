"""Rewards of completions, by functions and models."""
