"""The parts of vLLM that this package uses; `versions.py` warns of an unsupported version."""
