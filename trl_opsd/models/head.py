"""The output head of a model: its shape, how it is gathered, and the logits it gives.

B rows · L tokens · V vocabulary size · H hidden size
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trl_opsd._compat.peft import CausalLM
from trl_opsd._compat.sharding import in_zero3, unsharded, whole_shape
from trl_opsd.types import OutputHead


def shape_of(head: OutputHead) -> tuple[int, int]:
    """V and H, also where ZeRO-3 has sharded the weight."""
    rows, width = whole_shape(head.weight)
    return rows, width


def gathered_head(*heads: OutputHead) -> AbstractContextManager[Any]:
    """Gathers heads that ZeRO-3 has sharded while the context is open; a no-op otherwise."""
    parts = [part for head in heads for part in (head.weight, head.bias) if part is not None and in_zero3(part)]
    split = list({id(part): part for part in parts}.values())  # a teacher may share the student's head
    from trl_opsd._compat.trl import maybe_gather_lm_head_ctx

    context: AbstractContextManager[Any] = maybe_gather_lm_head_ctx(*split)
    return context


def model_shape(model: CausalLM) -> tuple[int, int]:
    """V and H of a model's head."""
    return shape_of(OutputHead.of(model))


@contextmanager
def whole_head(model: CausalLM) -> Iterator[OutputHead]:
    """The head of a model, gathered while the context is open if ZeRO-3 or FSDP2 has sharded it. Collective."""
    with unsharded(model.get_output_embeddings()):
        head = OutputHead.of(model)
        with gathered_head(head):
            yield head


def logits_of(hidden_BLH: Tensor, head: OutputHead) -> Tensor:
    """[..., V], float32: the logits of hidden states [..., H]."""
    logits_BLV = nn.functional.linear(hidden_BLH.to(head.weight.dtype), head.weight, head.bias).float() * head.scale
    return logits_BLV if head.softcap is None else head.softcap * torch.tanh(logits_BLV / head.softcap)
