"""Sets attributes of objects that other libraries made, and only those they have.

Where a library has renamed one, an assignment would make a new attribute that nobody reads, and go unnoticed.
"""

from __future__ import annotations

from typing import Any

__all__ = ["set_known"]


def set_known(owner: Any, **values: Any) -> None:
    """Sets attributes that are there already.

    Args:
        owner (`Any`):
            Whose they are.
        **values (`Any`):
            By name.

    Raises:
        AttributeError: One is not there; none is set then.
    """
    lacking = [name for name in values if not hasattr(owner, name)]
    if lacking:
        raise AttributeError(
            f"{type(owner).__name__} has no {', '.join(f'`{name}`' for name in lacking)}: the installed version of its "
            "library is none that this package was tested with. Install one that is; setup.cfg names them.",
            name=lacking[0],
            obj=owner,
        )
    for name, value in values.items():
        setattr(owner, name, value)
