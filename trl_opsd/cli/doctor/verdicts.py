"""How a check says that it found something else than an error."""


class Doubt(Exception):
    """Something that works, and may not be meant."""


class NotApplicable(Exception):
    """There is nothing to examine."""
