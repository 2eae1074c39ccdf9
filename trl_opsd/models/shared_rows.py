"""Lets a group of processes compute the same rows, each a part of the positions of every row (Ulysses).

B rows · L positions of one process · D head size
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from torch import Tensor, distributed, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trl_opsd._compat.deepspeed import exchanging_attention
from trl_opsd._compat.peft import CausalLM
from trl_opsd.models.backbone import backbone_of

_CAUSAL = ("sdpa", "flash_attention_2", "flash_attention_3")
"""Attention implementations that are causal without a mask: no process has the mask of a whole row."""
_BEYOND = ("sliding_window", "s_aux", "sinks")
"""Arguments of attention that are refused: a window needs a mask, and sinks belong to heads of all processes."""


class RowGroup:
    """The processes that share rows with this one (`size` consecutive ones), and the student's attention among them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.group, _ = distributed.new_subgroups(size)
        self.rank = distributed.get_rank(self.group)  # within the group
        self._modules: WeakSet[nn.Module] = WeakSet()
        self._calls = 0

    @contextmanager
    def shares(self, student: CausalLM) -> Iterator[None]:
        """Makes a student's layers exchange positions for heads in training mode, from the first [`reads`] on."""
        name = student.config._attn_implementation
        attend = ALL_ATTENTION_FUNCTIONS[name]

        def over_the_group(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *mask: Any, **more: Any
        ) -> Any:
            # In evaluation mode, and so when it generates or teaches, each process computes its own rows.
            if not (module.training and module in self._modules):
                return attend(module, query, key, value, *mask, **more)
            if asked := [one for one in _BEYOND if more.get(one) is not None]:
                raise ValueError(_unsupported(student, f"its attention uses `{asked[0]}`"))
            self._calls += 1
            groups = getattr(module, "num_key_value_groups", None)
            more.pop("attention_mask", None)
            try:
                exchanging = exchanging_attention(attend, query, key, self.group)
                return exchanging(module, query, key, value, None, **more)
            finally:
                if groups is not None:  # DeepSpeed changes the number where it repeats heads
                    module.num_key_value_groups = groups

        # Also for the backward pass: gradient checkpointing runs layers again in it.
        ALL_ATTENTION_FUNCTIONS[name] = over_the_group
        try:
            yield
        finally:
            ALL_ATTENTION_FUNCTIONS[name] = attend
            self._modules.clear()

    @contextmanager
    def reads(self, student: CausalLM) -> Iterator[None]:
        """Checks that every layer has exchanged positions in the student's forward pass in the body."""
        if not self._modules:
            self._modules.update(student.modules())
        self._calls = 0
        yield
        # A layer with its own attention would silently see its part of the positions only.
        layers = student.config.get_text_config().num_hidden_layers
        if self._calls < layers:
            raise ValueError(
                _unsupported(student, f"{self._calls} of its {layers} layers call transformers' attention")
            )


def check_shareable(student: CausalLM, size: int, attention: str | None) -> None:
    """Refuses a student whose attention cannot be divided by positions among `size` processes."""
    config = student.config.get_text_config()
    kind = student.config._attn_implementation
    expected = (attention,) if attention in _CAUSAL else _CAUSAL
    if kind not in expected:
        raise ValueError(
            f"`sp_size={size}`: the student's attention is '{kind}', expected {' or '.join(map(repr, expected))}: load "
            f"it with `model_init_kwargs={{'attn_implementation': '{expected[0]}'}}`, or change "
            "`parallelism_config_sp_attn_implementation` in the accelerate file."
        )
    kinds = getattr(config, "layer_types", None)
    if kinds is None and getattr(config, "sliding_window", None) is not None:
        kinds = ["sliding_attention"]
    if others := {one for one in kinds or () if one != "full_attention"}:
        raise ValueError(_unsupported(student, f"it has layers of the kind {', '.join(map(repr, sorted(others)))}"))
    if "position_ids" not in inspect.signature(backbone_of(student).forward).parameters:
        raise ValueError(_unsupported(student, "it takes no `position_ids`"))


def _unsupported(student: CausalLM, why: str) -> str:
    return (
        f"`sp_size`: a {type(student).__name__} cannot process parts of rows, because {why}: remove `sp_size` from the "
        "accelerate file, or use a student with full attention in all layers."
    )
