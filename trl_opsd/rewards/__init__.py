"""Rewards of completions by functions and models, and what each is worth beside the others of its prompt."""
