"""A student that learns from a teacher with another tokenizer."""
