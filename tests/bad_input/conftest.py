"""What a mistake is expected to lead to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import tiny

from trl_opsd import OPSDTrainer


@pytest.fixture
def refuses(make_trainer: Callable[..., OPSDTrainer]) -> Callable[..., None]:
    """Asserts that a trainer is refused, at construction or before its first step, by an error that names something."""

    def refuses(named: str, given: dict[str, Any], error: type[Exception] = ValueError, resume: Any = None) -> None:
        built: list[tuple[OPSDTrainer, torch.Tensor]] = []

        def attempt() -> None:
            trainer = make_trainer(**given)
            built.append((trainer, tiny.weights(trainer)))
            trainer.train(resume_from_checkpoint=resume)

        with pytest.raises(error, match=named) as raised:
            attempt()
        assert raised.type is error
        for trainer, before in built:
            assert (trainer.state.global_step, trainer.loads) == (0, 0)
            assert torch.equal(tiny.weights(trainer), before)

    return refuses
