"""A phase that takes too long is named, with what every thread does; nothing else is printed, and nothing is ended."""

from __future__ import annotations

import threading
import time

import pytest

from trl_opsd.run.watchdog import Watchdog

LONG = 1.0
"""Seconds, several times what the watchdogs here allow and their stacks take to be printed."""


@pytest.mark.quick
def test_a_phase_that_hangs_unnoticed(make_trainer, capfd):
    trainer = make_trainer(phase_timeout=0.2, max_steps=2)
    teach = trainer.teach

    def slow_to_read(*args):
        if trainer.state.global_step == 1:
            time.sleep(LONG)
        return teach(*args)

    trainer.teach = slow_to_read
    trainer.train()
    assert trainer.state.global_step == 2, "it only reports"
    printed = capfd.readouterr().err
    assert printed.count("Rank 0 has been in phase 'teach' for 0.2 seconds (`phase_timeout`). It continues") == 1
    assert printed.count("Timeout (0:00:00.500000)!") == 1
    named, stacks = printed.index("Rank 0 has been"), printed.index("most recent call first")
    assert named < stacks < printed.index("in slow_to_read")
    time.sleep(LONG)
    assert capfd.readouterr().err == "", "no timer is left armed"


def test_phases_that_are_quick_enough_are_reported(make_trainer, capfd):
    trainer = make_trainer(phase_timeout=60.0, max_steps=1, save_strategy="steps", save_steps=1)
    trainer.train()
    assert "in phase" not in capfd.readouterr().err
    for timer in [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]:
        timer.join(10)  # one that was cancelled ends at once, on a busy machine a little later
        assert not timer.is_alive()


def test_an_outer_phase_is_no_longer_watched_when_an_inner_one_has_ended(capfd):
    watch = Watchdog(0.2, rank=3)
    with watch("compare"):
        with watch("teach"):
            pass
        time.sleep(LONG)
    printed = capfd.readouterr().err
    assert "Rank 3 has been in phase 'compare'" in printed
    assert "'teach'" not in printed


def test_a_phase_that_fails_is_still_watched_afterwards(capfd):
    watch = Watchdog(0.2, rank=0)
    with pytest.raises(ZeroDivisionError), watch("sync"):
        raise ZeroDivisionError
    time.sleep(LONG)
    assert capfd.readouterr().err == ""


def test_a_phase_is_watched_although_nobody_asked(make_trainer, capfd):
    before = threading.active_count()
    with Watchdog(None, rank=0)("teach"):
        assert threading.active_count() == before
    assert make_trainer().args.phase_timeout is None
