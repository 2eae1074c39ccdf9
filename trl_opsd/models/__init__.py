"""What is known of any causal language model: its backbone, its head, its padding, proved by trying."""
