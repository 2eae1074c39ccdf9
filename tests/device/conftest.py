"""Tables of other folders' tests can be imported here."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / room) for room in ("distributed", "environments", "equivalence")]
