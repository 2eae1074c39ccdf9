"""A teacher that is a frozen causal language model, wherever its placement keeps the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from trl_opsd._compat.peft import CausalLM
from trl_opsd.models.backbone import context_of
from trl_opsd.models.mode import preserved_mode
from trl_opsd.models.probes import HEAD, PACKING, PADDING, Probed
from trl_opsd.models.size import described
from trl_opsd.teacher.base import Teacher
from trl_opsd.teacher.forward import PASS_BYTES, pass_groups, read
from trl_opsd.teacher.placement import Placement
from trl_opsd.types import OutputHead, Rollout, TeacherTargets


class FrozenTeacher(Teacher):
    """Freezes a model and scores rollouts with it, as many rows at a time as fit a memory budget.

    Args:
        placement ([`~teacher.Placement`]):
            Holds the model, for instance `Resident(model, device)`. The model is permanently put into eval mode, and
            its parameters no longer require gradients.
        cache_device (`str`, *optional*, defaults to `"auto"`):
            Where targets are kept until they are used: see `OPSDConfig.teacher_cache_device`.
        pass_bytes (`int`, *optional*, defaults to 3 GB):
            Memory limit for the activations of one pass.
        progress (`bool`, *optional*, defaults to `False`):
            Show a progress bar when scoring takes longer than a few seconds.
        padding_free (`bool`, *optional*, defaults to `False`):
            Pack the rows of a pass into one sequence: see `OPSDConfig.padding_free`.
        pad_to_multiple_of (`int`, *optional*):
            Rounds the width of padded rows up to a multiple of this.

    Attributes:
        reading ([`~models.padding.Reading`]): which rows share a forward pass.

    Raises:
        TypeError: `placement` is no placement but, for instance, a model or its path.
        ValueError: The model's logits cannot be computed from its hidden states, or a row's hidden states depend on the
            other rows, padded or, with `padding_free`, packed.
    """

    def __init__(
        self,
        placement: Placement,
        cache_device: str = "auto",
        pass_bytes: int = PASS_BYTES,
        progress: bool = False,
        padding_free: bool = False,
        pad_to_multiple_of: int | None = None,
    ) -> None:
        if not isinstance(placement, Placement):
            raise TypeError(
                f"`FrozenTeacher` got a {type(placement).__name__}: expected a placement, which holds a loaded model, "
                "as in `FrozenTeacher(Resident(model, device))`. A model or a path can also be passed to `OPSDTrainer` "
                "directly, as `teacher_model`."
            )
        self.placement = placement
        self.model: CausalLM = placement.model.eval().requires_grad_(False)
        self._cache_device = cache_device
        self._pass_bytes = pass_bytes
        self._progress = progress
        # The passes that the probes make, so that an offloaded placement prefetches no more.
        with placement.reading(passes=8 if padding_free else 4) as run:
            probes = [HEAD, PADDING, *([PACKING] if padding_free else [])]
            found = Probed(self.model, "teacher", run).prove(*probes)
        self.reading = replace(found.reading, packed=padding_free, multiple_of=pad_to_multiple_of or 1)

    def __str__(self) -> str:
        return f"{described(self.model)}, {self.placement.where}"

    @property
    def head(self) -> OutputHead:
        return self.placement.head

    @property
    def context(self) -> int | None:
        return context_of(self.model)

    @property
    def is_whole(self) -> bool:
        """Whether [`lent`] gives a model that this process can call directly."""
        return self.placement.is_whole

    @contextmanager
    def lent(self) -> Iterator[CausalLM]:
        """The model on the device, for uses other than to score a rollout."""
        with self.placement.reading(1):
            yield self.model

    def targets(self, rollout: Rollout) -> TeacherTargets:
        groups = pass_groups(self.model, rollout, self.reading, self._pass_bytes, self.placement.passes_cost)
        passes = self.placement.passes_to_run(len(groups))
        device = self.placement.device
        with preserved_mode(self.model), self.placement.reading(passes) as run:
            if self.model.training:  # the caller may have set it to training mode since
                self.model.eval()
            return read(run, rollout, groups, passes, device, self._cache_device, self._progress, self.reading)
