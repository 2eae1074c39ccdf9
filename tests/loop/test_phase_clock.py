"""The seconds of each phase are its own."""

from __future__ import annotations

import time

import pytest

from trl_opsd.loop.step_stats import PhaseClock


def test_the_time_of_a_phase_excludes_nested_phases():
    clock = PhaseClock(now=iter([1.0, 2.0, 5.0, 6.0, 8.0, 11.0]).__next__)
    with clock("outer"):
        for _ in range(2):
            with clock("inner"):
                pass
    assert clock.seconds == {"outer": 5.0, "inner": 5.0}


def test_a_failed_phase_is_timed_and_closed():
    clock = PhaseClock()
    with pytest.raises(RuntimeError), clock("outer"), clock("inner"):
        raise RuntimeError
    with clock("next"):
        time.sleep(0.01)
    assert set(clock.seconds) == {"outer", "inner", "next"}
    assert clock.seconds["outer"] < 0.01
