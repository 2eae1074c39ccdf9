"""A teacher with another tokenizer: its distributions and the student's over the next byte of a text."""
