"""Errors that only this package raises.

An argument that is wrong is a `ValueError` or a `TypeError`, as everywhere.
"""

from __future__ import annotations


class OPSDError(RuntimeError):
    """Base class of the errors that this package raises during a run."""


class NonFiniteError(OPSDError, FloatingPointError):
    """A loss or a gradient is NaN or infinite; no step was taken along it."""


class ServerError(OPSDError):
    """An engine's server did not answer in time, or gave an invalid answer."""


class SyncError(OPSDError):
    """After a weight sync, the engine's log-probabilities differ from the student's."""
