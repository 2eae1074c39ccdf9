"""A teacher that is a causal language model, frozen for good; where its weights are is its placement's business.

B rows · P prompt tokens · C completion tokens · L = P + C · H hidden width
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from trl_opsd._compat.trl import gathered_head
from trl_opsd.backbone import completion_hidden, prove_head
from trl_opsd.teacher.base import Teacher
from trl_opsd.teacher.placement import Placement
from trl_opsd.types import OutputHead, Rollout, TeacherTargets

PASS_BYTES = 2_000_000_000
"""What the activations of one pass may take, in bytes; about what makes a pass long enough to hide streamed layers."""
CACHE_BYTES = 1_000_000_000
"""Targets of a generation batch that stay on the accelerator when the choice is ours, in bytes."""


class FrozenTeacher(Teacher):
    """Freezes a model and reads rollouts with it, as many rows at a time as fit a memory budget.

    Args:
        placement ([`~placement.Placement`]):
            Keeps the model, for instance `Resident(model, device)`. The model is put into eval mode and its parameters
            stop requiring gradients, for good.
        cache_device (`str`, *optional*, defaults to `"auto"`):
            Where targets are kept until they are used up: see `OPSDConfig.teacher_cache_device`.
        pass_bytes (`int`, *optional*, defaults to 2 GB):
            What the activations of one pass may take.
        progress (`bool`, *optional*, defaults to `False`):
            Show a progress bar when reading takes longer than a few seconds.

    Raises:
        ValueError: The model's logits cannot be rebuilt from its hidden states.
    """

    def __init__(
        self, placement: Placement, cache_device: str = "auto", pass_bytes: int = PASS_BYTES, progress: bool = False
    ) -> None:
        self.placement = placement
        self.model: Any = placement.model.eval().requires_grad_(False)
        self._cache_device = cache_device
        self._pass_bytes = pass_bytes
        self._progress = progress
        with placement.reading(passes=2) as run:
            prove_head(self.model, "teacher", gathered_head, run)

    @property
    def head(self) -> OutputHead:
        return self.placement.head

    def targets(self, rollout: Rollout) -> TeacherTargets:
        rows, length = rollout.input_ids.shape
        passes = self.placement.agreed(-(-rows // rows_per_pass(self.model, length, self._pass_bytes)))
        chunks = list(rollout.chunks(-(-rows // passes)))
        bar = tqdm(chunks, desc="teach", unit="pass", delay=5, leave=False, disable=not self._progress)
        hidden_BCH: Tensor | None = None
        read = 0
        with torch.no_grad(), self.placement.reading(passes) as run:
            for chunk in bar:
                chunk_hidden = run(completion_hidden, chunk.to(self.placement.device))
                if hidden_BCH is None:
                    hidden_BCH = self._room_for(rollout, chunk_hidden)
                # Copied, because the chunk is a view that would keep the hidden states of the prompts alive.
                hidden_BCH[read : read + len(chunk_hidden)] = chunk_hidden
                read += len(chunk_hidden)
            for _ in range(passes - len(chunks)):
                # Others have more rows and need this process for each of their passes: one row, for nothing.
                run(completion_hidden, next(rollout.chunks(1)).to(self.placement.device))
        assert hidden_BCH is not None, "a generation batch has rows"
        return TeacherTargets(hidden=hidden_BCH)

    def _room_for(self, rollout: Rollout, like: Tensor) -> Tensor:
        rows, tokens = rollout.completion_ids.shape
        nbytes = rows * tokens * like.size(-1) * like.element_size()
        device = targets_device(self._cache_device, nbytes, rollout.completion_ids.device)
        return like.new_empty(rows, tokens, like.size(-1), device=device)


def targets_device(choice: str, nbytes: int, accelerator: torch.device) -> torch.device:
    """Where targets of `nbytes` wait: `choice` is what `OPSDConfig.teacher_cache_device` says."""
    on_accelerator = choice == "accelerator" or (choice == "auto" and nbytes <= CACHE_BYTES)
    return accelerator if on_accelerator else torch.device("cpu")


def rows_per_pass(model: Any, length: int, pass_bytes: int = PASS_BYTES) -> int:
    """Rows of `length` tokens whose activations fit `pass_bytes`, at least one.

    An estimate from the model's config alone, so that it does not depend on where the model is: per token ten vectors
    of the hidden width (residuals, norms in float32, attention) and three of the inner width live at once, and one byte
    of the attention mask for each token of the row; eager attention also keeps its scores, twice in float32.
    """
    config = model.config.get_text_config()
    width = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * width
    per_pair = 8 * config.num_attention_heads if config._attn_implementation == "eager" else 1
    per_token = model.dtype.itemsize * (10 * width + 3 * inner) + per_pair * length
    return int(max(1, pass_bytes // (length * per_token)))
