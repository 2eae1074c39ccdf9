"""Teachers: whoever looks at what the student wrote and says what it would have expected instead."""

from trl_opsd.teacher.base import Teacher
from trl_opsd.teacher.frozen import FrozenTeacher
from trl_opsd.teacher.hosted import Hosted
from trl_opsd.teacher.placement import Placement
from trl_opsd.teacher.resident import Resident
from trl_opsd.teacher.sharded import Sharded
from trl_opsd.teacher.streamed import Streamed

__all__ = ["FrozenTeacher", "Hosted", "Placement", "Resident", "Sharded", "Streamed", "Teacher"]
