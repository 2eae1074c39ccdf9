"""What a rollout and a teacher ask of a trainer."""

from __future__ import annotations

from support import tiny
from support.lone_host import LoneHost

from trl_opsd.data.readers import PromptLimits
from trl_opsd.rollout.host import Host


def test_the_trainer_implements_host_and_the_lone_host_nothing_else(make_trainer):
    asked = {*Host.__annotations__, *(name for name in vars(Host) if not name.startswith("_"))}
    stand_in = LoneHost(tiny.qwen2(), PromptLimits(vocabulary=tiny.VOCABULARY, context=None, completion=8))
    assert {name for name in dir(stand_in) if not name.startswith("_")} == asked
    trainer = make_trainer()
    assert [name for name in asked if not hasattr(trainer, name)] == []
