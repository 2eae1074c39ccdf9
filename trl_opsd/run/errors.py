"""Errors that only this package raises; an argument that is wrong is a `ValueError` or a `TypeError`, as everywhere."""


class OPSDError(RuntimeError):
    """Whatever goes wrong while a run is under way and no library has a word for."""


class NonFiniteError(OPSDError, FloatingPointError):
    """A loss or a gradient is NaN or infinite, and nothing was stepped along it."""


class ServerError(OPSDError):
    """The server of an engine did not answer in time, or not with what it was asked for."""


class SyncError(OPSDError):
    """The engine does not write as the student does, although the student's weights were sent to it."""
