"""Sets attributes of other libraries' objects, only if they exist.

If a library renamed one, a plain assignment would silently create a new attribute that nothing reads.
"""

from __future__ import annotations

from typing import Any

__all__ = ["set_known"]


def set_known(owner: Any, **values: Any) -> None:
    """Sets attributes that already exist."""
    lacking = [name for name in values if not hasattr(owner, name)]
    if lacking:
        raise AttributeError(
            f"{type(owner).__name__} has no {', '.join(f'`{name}`' for name in lacking)}: this package was not tested "
            "with the installed version of its library. Install one of the versions in setup.cfg.",
            name=lacking[0],
            obj=owner,
        )
    for name, value in values.items():
        setattr(owner, name, value)
