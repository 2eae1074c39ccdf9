"""Random states are left as they were."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from trl_opsd.parallel.rng import preserved_rng


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
