"""Teachers: they score the student's completions, and never generate."""

from trl_opsd.teacher.base import Teacher
from trl_opsd.teacher.frozen import FrozenTeacher
from trl_opsd.teacher.hosted import Hosted
from trl_opsd.teacher.layerwise import Streamed
from trl_opsd.teacher.placement import Placement
from trl_opsd.teacher.resident import Resident
from trl_opsd.teacher.sharded import Sharded

__all__ = ["FrozenTeacher", "Hosted", "Placement", "Resident", "Sharded", "Streamed", "Teacher"]
