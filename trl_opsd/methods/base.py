"""The seam: what a method may do in an optimizer step, hook by hook in the order of the calls.

Methods do not know each other: they meet in the columns of a [`BatchRow`] and in the weights of tokens. Everything that
they have in common is decided once, where their hooks are called (`order.py`).

B rows of this process · R rows of all processes · C completion tokens
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from numpy import ndarray
from torch import Tensor

from trl_opsd.losses.divergence import describe
from trl_opsd.losses.objective import Objective
from trl_opsd.methods.rows import BatchRow, Complete, Written
from trl_opsd.types import Rollout, TeacherTargets
from trl_opsd.types.metrics import Metric

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerState


class MethodHost(Protocol):
    """The trainer, as a method sees it."""

    args: Any
    """The options."""
    model: PreTrainedModel
    """The student, in training mode but for evaluations."""
    accelerator: Accelerator
    """Processes and devices of the launch."""
    state: TrainerState
    """State of the training; `global_step` counts optimizer steps."""
    processing_class: PreTrainedTokenizerBase
    """The student's tokenizer."""
    train_dataset: Any
    """What it is trained on."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Adds the time spent inside to `time/<name>` in the log."""

    def record(self, name: str, value: float, count: float = 1) -> None:
        """Adds a value to the next log, which has the mean of all processes; in an evaluation weighted by `count`."""

    def gather_distinct_rows(self, rows: Tensor) -> Tensor:
        """Values of the rows of all processes, [R, ...], without those that only fill a batch. Collective."""


@dataclass(slots=True)
class Generated:
    """A generation batch once its completions are known."""

    rows: Sequence[BatchRow]
    """B of them."""
    written: Written
    """Their prompts and completions as token ids."""
    rollout: Rollout
    """The same, padded."""
    counts: Mapping[str, Tensor]
    """[R] each, what was counted of all completions: `"length"`, `"generated"` and others of `StepStats.completed`."""
    is_training: bool
    rewards: Sequence[float | None] = ()
    """R values, the `BatchRow.reward` of the rows of all processes; empty without rewards."""


@dataclass(frozen=True, slots=True)
class Part:
    """A micro-batch after its loss."""

    rows: Sequence[BatchRow]
    """B of them."""
    rollout: Rollout
    """What the loss read."""
    sums: Tensor
    """[B, columns], statistics of each row: `LossParts.rows`, read with [`~types.loss.columns`]."""


class Method:
    """A part of a training that can be left out: its settings, metrics, state and code stand in it alone.

    Subclass it, as a dataclass if it has settings, override the hooks that are needed, and pass an instance:
    `OPSDTrainer(methods=[Mine(0.5)])`, or `OPSDConfig(methods={"my_module.Mine": {"factor": 0.5}})`. A step asks
    all methods for a hook before it goes on to the next hook; those of the package first. `before`, `complete`,
    `select`, `token_weights`, `tally`, `stepped` and `limit` are called in training only, the others in evaluations
    too. A hook may be collective unless it says otherwise. A method that is a `TrainerCallback` too is called as one.

    Attributes:
        host ([`MethodHost`]): the trainer, before the first hook is called.
        name (`str`): names the state in checkpoints, and the method in a fingerprint; by default that of its class.
        metrics (`Mapping[str, Metric]`): what it logs; read of methods of the package alone.
        needs_rewards (`bool`): whether training depends on the rewards of rows, which are then never only logged.
        reads_outcomes (`bool`): whether it reads `BatchRow.outcome`.
        reads (`Sequence[str]`): what its target is made of beside the teacher: `"contrast"`, the teacher in the context
            of the row's contrast, or `"origin"`, the student as it was passed.
        adds_nll (`bool`): whether it sets `BatchRow.nll_weight`.
        skips (`bool`): whether it sets `BatchRow.prompt_weight` to 0.
        by_token (`bool`): whether it reads distributions over tokens, of a teacher with the student's tokens.
        needs_whole (`bool`): whether it needs whole distributions of all teachers, not of some tokens.
        whole_rows (`bool`): whether it needs whole rows in a process, which `sp_size` divides.
        whole_batch (`bool`): whether it needs all completions of a step before the first is trained on.
        in_groups (`bool`): whether it compares the completions of a prompt.
        moves_target (`bool`): whether a student that teaches itself without context learns something by it.
        falls_back (`bool`): whether a teacher for whose context its prompt is too long reads the columns instead; when
            `False` that is an error.
        resumed (`bool`): Whether a run resumes only with the same settings.
    """

    name: str = ""
    metrics: ClassVar[Mapping[str, Metric]] = {}
    needs_rewards: bool = False
    reads_outcomes: bool = False
    reads: Sequence[str] = ()
    adds_nll: bool = False
    skips: bool = False
    falls_back: bool = False
    by_token: bool = False
    needs_whole: bool = False
    whole_rows: bool = True
    in_groups: bool = False
    moves_target: bool = False
    resumed: bool = True

    @property
    def whole_batch(self) -> bool:
        """Whether it needs all completions of a step before the first is trained on."""
        return self.has("generated") or self.needs_rewards or self.reads_outcomes

    @property
    def writes(self) -> bool:
        """Whether the student does not generate its completions alone."""
        return self.has("complete")

    @property
    def host(self) -> Any:
        """The trainer, a [`MethodHost`]."""
        return self._host

    def bind(self, host: Any) -> None:
        """Sets the trainer, of which a method has one."""
        if getattr(self, "_host", host) is not host:
            raise ValueError(f"`{type(self).__name__}` belongs to another trainer: make another instance.")
        self._host = host

    def check(self, args: Any, teachers: Sequence[str]) -> None:
        """Checks the settings against the options and the names of the teachers, before anything is loaded."""

    def described(self) -> str:
        """Its settings in one line, which all processes share and a resume compares."""
        return describe(self)

    def has(self, hook: str) -> bool:
        """Whether it overrides a hook; the trainer calls no others."""
        return getattr(type(self), hook) is not getattr(Method, hook)

    def build(self) -> None:
        """Builds what needs the trainer, once it is there."""

    def begin(self) -> None:
        """Sets the initial state; called when the trainer is built, and when a training begins.

        A checkpoint is restored after this.
        """

    # ---- A generation batch -----------------------------------------------------------------------------------------

    def before(self, rows: Sequence[BatchRow]) -> None:
        """Before generation: may set `prompt_weight` (at 0 it is skipped) of rows, and add to `nll_weight`."""

    def complete(self, rows: Sequence[BatchRow], prompt_ids: list[list[int]], alone: Complete) -> list[list[int]]:
        """The completions of the student's rows, in place of those that `alone`, the rollout, returns for prompts.

        May set `authors` and `logprobs` of rows. One method has this hook; a row without a prompt is `is_padding`.
        """
        return alone(prompt_ids)

    def generated(self, batch: Generated) -> None:
        """All completions of a batch are known: may set the `gate` of rows, and add to their `nll_weight`."""

    def teacher_prompt(self, row: BatchRow, completion_text: str, prompt: Any) -> Any:
        """What the teacher reads before a completion, text or messages, in place of the text or messages in
        `prompt.value`.

        Returned as it is, it stays; `None` where there is nothing to read, so that the row does not count. No
        collectives in it.
        """
        return prompt

    # ---- The weights of tokens --------------------------------------------------------------------------------------

    def select(self, weights: Tensor, rollout: Rollout, rows: Sequence[BatchRow]) -> Tensor:
        """[B, C], the weights with 0 for tokens that the teacher need not score."""
        return weights

    def token_weights(
        self, weights: Tensor, rollout: Rollout, rows: Sequence[BatchRow], targets: TeacherTargets
    ) -> Tensor:
        """[B, C], the weights of tokens in the loss; a weight of 0 has to stay. A subclass's `weigh` comes after it."""
        return weights

    def final_weights(self, weights: Tensor, rows: Sequence[BatchRow]) -> Tensor:
        """[B, C], the weights whose sum is the denominator of the loss, after gates and weights of prompts; of methods
        of a user after `Aggregation`.
        """
        return weights

    # ---- The loss ---------------------------------------------------------------------------------------------------

    def objective(self, objective: Objective) -> Objective:
        """How student and teacher are compared. For each micro-batch, and no collectives in it."""
        return objective

    def tally(self, part: Part) -> Tensor | None:
        """Sums of a micro-batch, always of one shape, which are added over those of a step and over processes.

        No collectives in it; `None` with the same options in all processes.
        """
        return None

    def stepped(self, sums: Mapping[str, float], tally: ndarray | None) -> None:
        """A step has its gradient: sums over its tokens by [`~types.LossParts`], and those that `tally` made, NumPy."""

    def limit(self, tokens: int) -> int:
        """The completion limit in training now, from 1 to `tokens`. No collectives in it."""
        return tokens

    # ---- Evaluations and checkpoints --------------------------------------------------------------------------------

    def evaluated(self, sums: MutableMapping[str, Any]) -> None:
        """A dataset is evaluated: may change the sums over its tokens, by [`~types.LossParts`], of teachers too."""

    def evaluation(self, prefix: str) -> AbstractContextManager[None]:
        """Surrounds the evaluation of a dataset, whose metrics get this prefix."""
        return nullcontext()

    def state(self) -> Mapping[str, Any] | None:
        """What a checkpoint keeps, as JSON; `None` for nothing. Called in one process; all restore it."""
        return None

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on with what a checkpoint has kept."""

    def saved(self, folder: Path, in_checkpoint: bool) -> None:
        """The student, or its adapter, was written into a folder, of a checkpoint or by `save_model`.

        Called in the process that writes, so no collectives in it.
        """
