"""The backbone, head and padding of a causal language model, verified by running it."""
