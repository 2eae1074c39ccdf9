"""Estimates from shapes the memory of each phase of training, in bytes; activations vary and are left out.

R rows on one device · C tokens of a completion · H hidden width · V vocabulary
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from trl_opsd._compat.sharding import whole_numel
from trl_opsd.host import Host
from trl_opsd.losses.streamed import memory_of, tile_bytes
from trl_opsd.models.backbone import shape_of
from trl_opsd.models.weights import cached_per_token
from trl_opsd.types import OutputHead

_LOGITS = 2 * 4
"""Bytes per logit: both models, float32."""
_MOMENTS = 2
"""Of Adam, each as large as its parameter."""


def footprint(
    host: Host, phase: str, teachers: Mapping[str, nn.Module | None], heads: Sequence[OutputHead]
) -> dict[str, int]:
    """A lower bound on the memory of a phase, a key of [`~monitor.memory.ADVICE`]: bytes by description.

    A teacher that is not a model is `None` in `teachers`; `heads` are the output heads of all teachers.
    """
    always = {"the student's weights": _bytes(host.model.parameters()), **_teachers(host, teachers)}
    trained = [one for one in host.model.parameters() if one.requires_grad]
    learnt = {"gradients": _bytes(trained), "optimizer states of Adam": _MOMENTS * _bytes(trained)}
    if phase == "complete":
        return {**always, **_cache(host)}
    if phase == "teach":
        return {**always, **_states(host, heads)}
    if phase == "compare":
        return {**always, **learnt, **_states(host, heads), **_tiles(host)}
    return {**always, **(learnt if phase == "step" else {})}


def _teachers(host: Host, teachers: Mapping[str, nn.Module | None]) -> dict[str, int]:
    return {
        f"weights of teacher {name!r}": _bytes(model.parameters())
        for name, model in teachers.items()
        if model is not None and model is not host.model  # in self-distillation counted as the student's
    }


def _cache(host: Host) -> dict[str, int]:
    """The key-value cache of a transformer, where its config states the dimensions."""
    if not (of_token := cached_per_token(host.model.config)):
        return {}
    rows, tokens = _rows(host)
    size = rows * tokens * of_token * host.model.dtype.itemsize
    return {f"the key-value cache of {rows} x {tokens} completion tokens, without prompts": size}


def _states(host: Host, heads: Sequence[OutputHead]) -> dict[str, int]:
    rows, tokens = _rows(host)
    size = max(rows * tokens * shape_of(head)[1] * head.weight.element_size() for head in heads)
    return {f"the teacher's hidden states of {rows} x {tokens} tokens, at most": size}


def _tiles(host: Host) -> dict[str, int]:
    chunk = host.args.loss_chunk_tokens
    size = tile_bytes(memory_of(host.accelerator.device)) if chunk is None else chunk * host.limits.vocabulary * _LOGITS
    return {"tiles of logits, at most": size}


def _rows(host: Host) -> tuple[int, int]:
    args = host.args
    written = args.per_device_train_batch_size * args.gradient_accumulation_steps
    return (written if host.model.training else args.per_device_eval_batch_size), args.max_completion_length


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the full tensors, even where a process holds only a shard."""
    return sum(whole_numel(one) * one.element_size() for one in tensors)
