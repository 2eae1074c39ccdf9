"""The student as its own teacher: in its present state, without its adapter, at its start, or averaged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_opsd._compat.peft import CausalLM, rewrites_base, without_adapter
from trl_opsd._compat.sharding import is_split, is_split_model, whole, write
from trl_opsd.losses.streamed import streamed_likeliest
from trl_opsd.models.backbone import Run, context_of
from trl_opsd.models.checks import sizes
from trl_opsd.models.padding import BatchPolicy
from trl_opsd.models.weights import Samples, first_change, sampled
from trl_opsd.options.rules import refuse
from trl_opsd.teacher.base import Teacher
from trl_opsd.teacher.frozen import Placement, max_over_processes, score
from trl_opsd.teacher.prefix import SharedPrefix
from trl_opsd.types import LazyLogits, OutputHead, Rollout, TeacherTargets
from trl_opsd.types.targets import kept_by_row

_ANOTHER_COPY = "or pass a second copy of it, for instance its path, as `teacher_model`"


def unchanged(now: Callable[[], Samples], who: str, before: Samples | None = None) -> Callable[[], None]:
    """A check that weights are still those that were passed; `who` uses them, in words for the error."""
    then = now() if before is None else before

    def check() -> None:
        if (changed := first_change(then, now())) is not None:
            raise ValueError(
                f"{changed} has changed since the student was passed, but {who}: do not change the base weights (in a "
                f"callback, or with `merge_adapter`), {_ANOTHER_COPY}."
            )

    return check


def check_base(student: CausalLM, handed_in: Samples, of: str) -> Callable[[], None]:
    """Refuses an adapter that changes the weights under it, at once or by training; returns a check of these weights.

    `of` says what needs them, and a verb; `handed_in` are samples from before an adapter was added here. Collective.
    """
    # Some initialisations (PiSSA) move part of the base weights into the adapter.
    kinds = [one for one in student.peft_config.values() if rewrites_base(one)]
    inits = ", ".join(f"init_lora_weights={one.init_lora_weights!r}" for one in kinds)
    changed, needs = first_change(handed_in, sampled(student)), f"{of} the student without its adapter"
    trainable = {name for name, parameter in student.named_parameters() if parameter.requires_grad}
    # With the adapter disabled, peft before 0.19 also makes the originals of `modules_to_save` trainable.
    with without_adapter(student):
        without = [name for name, parameter in student.named_parameters() if parameter.requires_grad]
    shared = next((name for name in without if name in trainable), None)
    refuse(
        [
            (
                kinds or changed is not None,
                f"{needs}, but the adapter changed the base weights ({inits or changed})",
                "the base is another model now. Initialise the adapter without changing them "
                f"(`init_lora_weights=True`), {_ANOTHER_COPY}",
            ),
            (
                shared,
                f"{needs}, but {shared!r} is trainable and shared by both",
                f"set `bias='none'` in the `peft_config`, freeze it, {_ANOTHER_COPY}",
            ),
        ]
    )
    return unchanged(lambda: sampled(student), needs, handed_in)


FILE = "ema_teacher.safetensors"
"""File of the average in a checkpoint."""


@final
class Average(TrainerCallback):
    """`teacher = (1 - rate) * teacher + rate * student`, after every `every` optimizer steps."""

    def __init__(
        self, student: Callable[[], Mapping[str, Tensor]], teacher: Mapping[str, Tensor], rate: float, every: int
    ) -> None:
        self._student = student
        self._teacher = teacher
        # Unsharded, on the teacher's devices, and in float32: in half precision a step of 5 % of a small difference is
        # rounded away, and the teacher would not move. A float32 teacher's tensors are the averages themselves.
        self._average = {name: tensor.detach().float() for name, tensor in teacher.items()}
        self._rate = rate
        self._every = every

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.global_step % self._every == 0:
            self.update()

    @torch.no_grad()
    def update(self) -> None:
        """Moves the average toward the student; a split student is gathered one parameter at a time."""
        student = self._student()
        for name, average in self._average.items():
            average.lerp_(whole(student[name]).to(average), self._rate)
        self._copy_to_teacher()

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The student's parameters hold the averages while the context lasts."""
        student = self._student()
        # Shards cannot be swapped with full tensors: the student's values are gathered, overwritten and written back.
        if any(is_split(student[name]) for name in self._teacher):
            own = {name: whole(student[name]) for name in self._teacher}
            write(student, self._teacher)
            restore = lambda: write(self._student(), own)  # noqa: E731
        else:
            self._swap()
            restore = self._swap
        try:
            yield
        finally:
            restore()

    def save(self, folder: str | Path) -> None:
        """Writes the average into a checkpoint."""
        tensors = {name: average.contiguous() for name, average in self._average.items()}
        save_file(tensors, Path(folder) / FILE)

    @torch.no_grad()
    def load(self, folder: str | Path) -> None:
        """Loads the average from a checkpoint; refuses that of other parameters."""
        saved = load_file(Path(folder) / FILE)
        if saved.keys() != self._average.keys():
            raise ValueError(f"{folder} has the EMA of other parameters: resume with the model it was saved for.")
        for name, average in self._average.items():
            average.copy_(saved[name])
        self._copy_to_teacher()

    def _copy_to_teacher(self) -> None:
        for name, average in self._average.items():
            # Of a teacher in float32 they are its own tensors.
            if average.data_ptr() != self._teacher[name].data_ptr():
                self._teacher[name].copy_(average)

    def _swap(self) -> None:
        student = self._student()
        for name, tensor in self._teacher.items():
            parameter = student[name]
            # Swapping storage copies nothing, and optimizer state that refers to the parameters stays valid.
            parameter.data, tensor.data = tensor.data, parameter.data


@final
class _Student(Placement):
    """The student's parameters, which hold the teacher's weights while it scores."""

    def __init__(self, student: CausalLM, run: Run, as_teacher: Callable[[], AbstractContextManager[Any]]) -> None:
        self.model, self._run, self._as_teacher = student, run, as_teacher
        # `as_teacher` makes the student's parameters the teacher's: `disable_adapter`, or nothing for the live student.
        with as_teacher():
            self._head = OutputHead.of(student)
        # The module, not its tensors, which FSDP2 replaces when training begins. The last match, as a head may be tied.
        *_, self._layer = (one for one in student.modules() if getattr(one, "weight", None) is self._head.weight)

    @property
    def head(self) -> OutputHead:
        return replace(self._head, weight=self._layer.weight, bias=getattr(self._layer, "bias", None))

    @contextmanager
    def loaded(self, passes: int) -> Iterator[Run]:
        with self._as_teacher():
            yield self._run

    def passes_to_run(self, passes: int) -> int:
        # A sharded student's forward is collective, so all processes run the same number of passes.
        return max_over_processes(passes, self.device)


@final
class OwnTeacher(Teacher):
    """Scores with the student's own parameters, so that no second copy of the model exists.

    Anything it knows beyond the student has to be in its prompt.
    """

    reads_images: ClassVar[bool] = True

    def __init__(
        self,
        student: CausalLM,
        run: Run,
        as_teacher: Callable[[], AbstractContextManager[Any]],
        policy: Callable[[], BatchPolicy],
        cache_device: str = "auto",
        progress: bool = False,
        kept: Collection[Tensor] = (),
        prefix: SharedPrefix | None = None,
    ) -> None:
        self.model, self._placement, self._as_teacher = student, _Student(student, run, as_teacher), as_teacher
        self._cache_device, self._progress = cache_device, progress
        self._batching = policy  # a callable: for a sharded student it is known only later
        self._kept = kept  # weights that `as_teacher` swaps in, to describe their size
        self.prefix = prefix  # if it is static

    def __str__(self) -> str:
        return f"{sizes(self._kept)} in place of the student's" if self._kept else "no weights of its own"

    @property
    def head(self) -> OutputHead:
        return self._placement.head

    @property
    def context(self) -> int | None:
        return context_of(self.model)

    @property
    def batching(self) -> BatchPolicy:
        return self._batching()

    @contextmanager
    def lent(self) -> Iterator[CausalLM]:
        """The student, as the teacher it is."""
        with self._as_teacher():
            yield self.model

    def targets(self, rollout: Rollout) -> TeacherTargets:
        placement = self._placement
        # Not known before: a student is sharded when training begins.
        placement.device, placement.passes_are_costly = rollout.completion_ids.device, is_split_model(self.model)
        keeping, shows = self._cache_device, self._progress
        return score(placement, rollout, self.batching, self.prefix, cache_device=keeping, progress=shows)


@torch.no_grad()
def with_candidates(
    rollout: Rollout, student: Teacher, k: int, chunk_tokens: int | None, vocabulary: int | None
) -> Rollout:
    """The rollout with the student's K likeliest tokens, which a pass of it without a gradient finds. Collective."""
    targets = kept_by_row(student.targets(rollout), rollout.weights)
    rows, device = targets.rows or (), rollout.completion_ids.device
    candidates_BCK = rollout.completion_ids.new_full((*rollout.completion_ids.shape, k), -1)
    head = student.head
    head = replace(head, weight=whole(head.weight), bias=None if head.bias is None else whole(head.bias))
    for number, row in enumerate(rows):
        at_n = row.places.to(device)
        top_nK = streamed_likeliest(LazyLogits(row.hidden.to(device), head), k, chunk_tokens, vocabulary)
        sampled_n1 = rollout.completion_ids[number, at_n, None]
        is_missing_n1 = ~(top_nK == sampled_n1).any(1, keepdim=True)
        top_nK[:, -1:] = torch.where(is_missing_n1, sampled_n1, top_nK[:, -1:])
        candidates_BCK[number, at_n, : top_nK.size(1)] = top_nK
    return replace(rollout, candidates=candidates_BCK)
