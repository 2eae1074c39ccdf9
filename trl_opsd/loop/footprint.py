"""Computes from shapes what each phase of a training holds, in bytes; activations depend on the model and are left out.

R rows on one device · C tokens of a completion · H hidden width · V vocabulary
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from trl_opsd._compat.sharding import whole_numel
from trl_opsd.losses.streamed import TILE_BYTES

_LOGITS = 2 * 4
"""Bytes of a logit of both models in float32."""
_MOMENTS = 2
"""Of Adam, each as large as what it is of."""


def footprint(trainer: Any, phase: str) -> dict[str, int]:
    """What a phase holds at least, by what it is.

    Args:
        trainer ([`OPSDTrainer`]):
            Gives models and options.
        phase (`str`):
            A key of [`~memory.ADVICE`].
    """
    always = {"the student's weights": _bytes(trainer.model.parameters()), **_teachers(trainer)}
    trained = [one for one in trainer.model.parameters() if one.requires_grad]
    learnt = {"gradients": _bytes(trained), "the optimizer's states, of Adam": _MOMENTS * _bytes(trained)}
    if phase == "complete":
        return {**always, **_cache(trainer)}
    if phase == "teach":
        return {**always, **_states(trainer)}
    if phase == "compare":
        return {**always, **learnt, **_states(trainer), **_tiles(trainer)}
    return {**always, **(learnt if phase == "step" else {})}


def _teachers(trainer: Any) -> dict[str, int]:
    models = {name: getattr(teacher, "model", None) for name, teacher in getattr(trainer, "teachers", {}).items()}
    return {
        f"weights of {name!r}, a teacher": _bytes(model.parameters())
        for name, model in models.items()
        if model is not None and model is not trainer.model
    }


def _cache(trainer: Any) -> dict[str, int]:
    """Keys and values of a transformer, where its config says what they are."""
    config = trainer.model.config.get_text_config()
    sizes = (getattr(config, name, None) for name in ("num_attention_heads", "num_hidden_layers", "hidden_size"))
    heads, layers, width = (size if isinstance(size, int) else 0 for size in sizes)
    if not heads:
        return {}
    pairs = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or width // heads
    rows, tokens = _rows(trainer)
    size = rows * tokens * layers * 2 * pairs * head_dim * trainer.model.dtype.itemsize
    return {f"the cache of {rows} x {tokens} completion tokens, prompts apart": size}


def _states(trainer: Any) -> dict[str, int]:
    rows, tokens = _rows(trainer)
    heads = [teacher.head.weight for teacher in trainer.teachers.values()]
    size = max(rows * tokens * head.shape[1] * head.element_size() for head in heads)
    return {f"the teacher's states of {rows} x {tokens} tokens": size}


def _tiles(trainer: Any) -> dict[str, int]:
    chunk = trainer.args.loss_chunk_tokens
    size = TILE_BYTES if chunk is None else chunk * trainer.limits.vocabulary * _LOGITS
    return {"tiles of logits, at most": size}


def _rows(trainer: Any) -> tuple[int, int]:
    args = trainer.args
    written = args.per_device_train_batch_size * args.gradient_accumulation_steps
    return (written if trainer.model.training else args.per_device_eval_batch_size), args.max_completion_length


def _bytes(tensors: Iterable[Tensor]) -> int:
    """As whole tensors, also where a process holds a part."""
    return sum(whole_numel(one) * one.element_size() for one in tensors)
