"""Teachers: whoever looks at what the student wrote and says what it would have expected instead."""

from trl_opsd.teacher.base import Teacher
from trl_opsd.teacher.frozen import FrozenTeacher

__all__ = ["FrozenTeacher", "Teacher"]
