"""A training on an accelerator that is pretended, whose copies are late; threads on the device of who starts them."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from support import tiny
from torch.utils._python_dispatch import TorchDispatchMode

from trl_opsd import progress
from trl_opsd.environments.worker import Worker
from trl_opsd.methods.reward_functions import Functions
from trl_opsd.parallel.prefetch import Prefetcher
from trl_opsd.types import targets


class LateStream:
    """A stream whose copies are made when something waits for them, as late as a device may make them."""

    made: list[LateStream]

    def __init__(self, device: Any = None) -> None:
        self.queue: list[Any] = []
        self.late = 0
        self.made.append(self)

    def run(self, first: int) -> None:
        while self.late < first:
            self.queue[self.late]()
            self.late += 1

    def synchronize(self) -> None:
        self.run(len(self.queue))

    def wait_stream(self, other: LateStream) -> None:
        other.synchronize()

    def record_event(self) -> Any:
        return partial(self.run, len(self.queue))

    def wait_event(self, event: Any) -> None:
        event()

    def __enter__(self) -> None:
        stream = self

        class Queued(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if func is not torch.ops.aten.copy_.default:
                    return func(*args, **(kwargs or {}))
                stream.queue.append(partial(func, *args))
                return args[0]

        self.mode = Queued()
        self.mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.mode.__exit__(*error)


@pytest.fixture
def accelerator(monkeypatch) -> list[LateStream]:
    """Has this process pretend that its CPU is an accelerator with streams, that counts no memory; returns these."""
    empty, accelerator = torch.empty, torch.accelerator
    monkeypatch.setattr(LateStream, "made", streams := [], raising=False)
    current = LateStream()
    monkeypatch.setattr(torch, "Stream", LateStream)
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **given: empty(*sizes, **given))
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(accelerator, "is_available", lambda: True)
    monkeypatch.setattr(accelerator, "current_stream", lambda device=None: current)
    monkeypatch.setattr(accelerator, "synchronize", lambda device=None: [one.synchronize() for one in streams])
    monkeypatch.setattr(targets, "_WITHOUT_STREAMS", ())
    targets._copies.cache_clear()
    yield streams
    targets._copies.cache_clear()


@pytest.mark.parametrize("offload", ["none", "cpu", "stream"])
def test_another_accelerator_waits_for_its_copies_and_resumes(make_trainer, request, tmp_path, offload):
    def trained(steps: int, resume: bool = False) -> tuple[list[float], list[torch.Tensor]]:
        trainer = make_trainer(
            teacher_model=tiny.qwen2(48, 1, num_hidden_layers=3), teacher_offload=offload, teacher_cache_device="cpu",
            gradient_accumulation_steps=2, max_steps=steps, save_strategy="steps", save_steps=1, learning_rate=1e-2,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        losses = tiny.logged(trainer, "divergence/mean")
        return losses, [one.detach().clone() for one in trainer.model.parameters()]

    losses, weights = trained(2)
    streams = request.getfixturevalue("accelerator")
    trained(1)
    again, resumed = trained(2, resume=True)
    assert again == losses
    assert all(map(torch.equal, resumed, weights))
    copies = [one for one in streams if one.queue]
    assert len(copies) == (1 if offload == "none" else 3), "one for the targets, one for each teacher"
    assert all(one.late == len(one.queue) for one in copies)


def test_an_accelerator_that_counts_no_memory_is_no_error(accelerator):
    assert progress.peak_bytes() > 2**26


def test_threads_are_on_the_device_of_who_starts_them(monkeypatch):
    """A thread's own is the first of its machine, in every process."""
    seen: dict[str, int] = {}
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    monkeypatch.setattr(
        torch.accelerator, "set_device_index", lambda index: seen.update({threading.current_thread().name: index})
    )

    async def worth(completions, **_):
        return [1.0 for _ in completions]

    Worker().start(lambda wait: None).result()
    assert Prefetcher(iter([1])).take(wait=True) == [1]
    Functions({"worth": worth}).of({"completions": ["a"], "prompts": ["b"]}, ["row 0"])
    names = {"trl_opsd environment", "trl_opsd rows", *(one for one in seen if "rewards" in one)}
    assert seen == dict.fromkeys(names, 3)
    assert len(names) == 3
