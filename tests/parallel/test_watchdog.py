"""Phases that take too long are reported, and random states are left as they were."""

from __future__ import annotations

import random
import re
import threading
import time

import numpy as np
import pytest
import torch

from trl_opsd import OPSDTrainer
from trl_opsd.parallel.failure import Watchdog
from trl_opsd.parallel.rng import preserved_rng

LONG = 1.0
"""Seconds: several times the timeout of the watchdogs here and the time to print their stacks."""


class SlowToRead(OPSDTrainer):
    def teach(self, rollout, rows):
        if self.state.global_step == 1:
            time.sleep(LONG)
        return super().teach(rollout, rows)


@pytest.mark.quick
def test_slow_phase_is_reported_with_stacks(trained, capfd):
    trainer = trained(SlowToRead, phase_timeout=0.2, max_steps=2)
    assert trainer.state.global_step == 2, "it only reports"
    printed = capfd.readouterr().err
    assert printed.count("Rank 0 has been in phase 'teach' for 0.2 seconds (`phase_timeout`). It keeps running") == 1
    named, stacks = printed.index("Rank 0 has been"), printed.index("most recent call first")
    asleep = re.search(r'test_watchdog\.py", line \d+ in teach', printed)
    assert named < stacks < asleep.start()
    time.sleep(LONG)
    assert capfd.readouterr().err == "", "no timer is left armed"


def test_outer_phase_is_watched_again_after_an_inner_one_or_a_failed_one(capfd):
    watch = Watchdog(0.2, rank=3)
    with watch("compare"):
        with watch("teach"):
            pass
        with pytest.raises(ZeroDivisionError), watch("sync"):
            raise ZeroDivisionError
        time.sleep(LONG)
    printed = capfd.readouterr().err
    assert "Rank 3 has been in phase 'compare'" in printed
    assert "'teach'" not in printed
    assert "'sync'" not in printed
    time.sleep(LONG)
    assert capfd.readouterr().err == ""


def test_phases_are_not_watched_by_default(make_trainer):
    before, trainer = threading.active_count(), make_trainer()
    with trainer.phase("teach"):
        assert threading.active_count() == before


def test_random_states_are_restored_after_an_exception():
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()

    def draw_and_fail():
        with preserved_rng(torch.device("cpu")):
            torch.rand(3), random.random(), np.random.rand()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        draw_and_fail()
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert (before[2] == np.random.get_state()[1]).all()
