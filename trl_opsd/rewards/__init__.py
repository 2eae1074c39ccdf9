"""Rewards of completions, by functions and models, and their advantages within the group of a prompt."""
