"""Exceptions for findings that are not errors."""


class Doubt(Exception):
    """Something that works, but may not be intended."""


class NotApplicable(Exception):
    """There is nothing to examine."""
