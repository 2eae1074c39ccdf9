"""Teachers: they score the student's completions, and never generate."""

from trl_opsd.teacher.base import Teacher
from trl_opsd.teacher.frozen import FrozenTeacher, Placement, Resident

__all__ = ["FrozenTeacher", "Placement", "Resident", "Teacher"]
