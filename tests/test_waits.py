"""Between the student's forward pass and its backward pass the host waits for the device once: to read the sums.

On a GPU each further wait leaves it without work until the host has caught up.
"""

from __future__ import annotations

import tiny
import torch
from datasets import Dataset
from torch.utils._python_dispatch import TorchDispatchMode

from trl_opsd import HFRollout

WAITS = (
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::equal",
    "aten::is_nonzero",
    "aten::_unique2",
    "aten::repeat_interleave",
)
"""Operations whose results, or their shapes, the host needs; and indexing by booleans, which counts them."""
INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


class Waits(TorchDispatchMode):
    """Names the operations that would wait for a device, while it is on."""

    def __init__(self):
        super().__init__()
        self.found, self.on = [], False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if self.on:
            by_booleans = name in INDEXING and any(
                one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1]
            )
            if name in WAITS or by_booleans:
                self.found.append(name)
        return func(*args, **(kwargs or {}))


def test_the_host_waits_once_between_forward_and_backward(make_trainer, monkeypatch):
    rows = Dataset.from_list([{"prompt": "2+2=", "teacher": name} for name in ("a", "b")] * 4)
    trainer = make_trainer(
        teacher_model={"a": tiny.qwen2(48, seed=2), "b": tiny.qwen2(32, seed=3)},
        train_dataset=rows,
        rollout=HFRollout(),
        max_completion_length=6,
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
    )
    waits, each = Waits(), []
    to_list, backward = torch.Tensor.tolist, trainer.accelerator.backward

    def listed(tensor):
        if waits.on:
            waits.found.append("tolist")
        was_on, waits.on = waits.on, False
        try:
            return to_list(tensor)
        finally:
            waits.on = was_on

    def backward_and_stop(*args, **kwargs):
        backward(*args, **kwargs)
        each.append(waits.found)
        waits.found, waits.on = [], False

    def start(*_):
        waits.on = trainer.model.training

    monkeypatch.setattr(torch.Tensor, "tolist", listed)
    monkeypatch.setattr(trainer.accelerator, "backward", backward_and_stop)
    trainer.model.model.register_forward_hook(start)
    with waits:
        trainer.train()
    assert each == [["tolist"]] * 4
