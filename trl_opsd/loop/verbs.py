"""The four verbs of a step and the checks around them, in our own types; a trainer implements them.

B rows · C completion tokens
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from trl_opsd._compat.peft import CausalLM
from trl_opsd.data.readers import Request
from trl_opsd.data.teacher_prompts import Row
from trl_opsd.parallel.pulled import Endable
from trl_opsd.types import LossParts, Rollout, TeacherTargets


class Verbs:
    """What [`~loop.hooks.TrainerHooks`] calls. All of it but `weigh` has to be implemented."""

    # The metaclass of transformers' trainer ignores `abstractmethod`, so these raise.

    def read_rows(self, rows: Sequence[Row]) -> list[Request]:
        """Checks the rows of a generation batch before generation; one entry each, for `teach` and `weigh`."""
        raise NotImplementedError

    def rows_of(self, rollout: Rollout) -> Sequence[Row]:
        """Rows for a batch that comes from no dataset; raises where a prompt alone does not make one."""
        raise NotImplementedError

    def check_prompt_ids(self, prompt_ids: list[list[int]]) -> None:
        """Rejects prompts that the student cannot read, before generation."""
        raise NotImplementedError

    def complete(self, prompt_ids: list[list[int]]) -> list[list[int]]:
        """Generates one completion for each prompt; token ids in, token ids out."""
        raise NotImplementedError

    @property
    def streams(self) -> bool:
        """Whether `stream` generates what `complete` does."""
        raise NotImplementedError

    @property
    def writes_apart(self) -> bool:
        """Whether `stream` generates without this process."""
        raise NotImplementedError

    def stream(self, prompt_ids: list[list[int]]) -> Endable[tuple[int, list[int]]]:
        """Generates as `complete`: the number of each prompt with its completion, checked, as it ends."""
        raise NotImplementedError

    def session(self) -> AbstractContextManager[None]:
        """Entered around all calls of `complete` for a generation batch, and around an evaluation; it nests."""
        raise NotImplementedError

    def checked_completions(self, prompt_ids: list[list[int]], completions: Any) -> list[list[int]]:
        """What `complete` returned, as token ids up to the first end token; raises if these cannot be trained on."""
        raise NotImplementedError

    def teach(self, rollout: Rollout, rows: Sequence[Row]) -> TeacherTargets:
        """Has the teacher score a whole generation batch; `rows` are its dataset rows, aligned with it."""
        raise NotImplementedError

    @property
    def teaches_early(self) -> bool:
        """Whether a teacher benefits from `expect`."""
        raise NotImplementedError

    def expect(self, rollout: Rollout, rows: Sequence[Row]) -> None:
        """Notifies the teacher of rows that `teach` will soon be called with; `rows` are their dataset rows."""
        raise NotImplementedError

    def forget_expected(self) -> None:
        """Notifies the teacher that expected rows will not come: a step was interrupted."""
        raise NotImplementedError

    def weigh(self, rollout: Rollout, rows: Sequence[Row], targets: TeacherTargets) -> Tensor:
        """The weight of each token of a generation batch in the loss; by default 1 or 0, with `position_discount`.

        Token selection and discounts belong here: the returned weights apply to the loss, its gradient, its denominator
        and the logs alike. Rewards are in `rollout.pull`.

        Args:
            rollout ([`~types.Rollout`]):
                The generation batch of this process; a token of weight 0 in it has to stay at 0.
            rows (`Sequence[Mapping[str, Any]]`):
                The dataset rows, aligned with it.
            targets ([`~types.TeacherTargets`]):
                The teacher's targets for it, row-aligned.

        Returns:
            `torch.Tensor`: [B, C], finite and at least 0.
        """
        return rollout.weights

    def compare(
        self, student: CausalLM, rollout: Rollout, targets: TeacherTargets, num_items: Tensor | float | None
    ) -> LossParts:
        """Compares the student with the targets. Runs inside the student wrapper's forward: no collectives in it.

        Args:
            student ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
                The student without its distributed wrapper.
            rollout ([`~types.Rollout`]):
                One micro-batch.
            targets ([`~types.TeacherTargets`]):
                Row-aligned with it.
            num_items (`torch.Tensor` or `float`, *optional*):
                Denominator of the loss for the whole optimizer step; `None` means the tokens of this micro-batch.
        """
        raise NotImplementedError

    def check_effect(self) -> None:
        """Rejects a training that would change nothing, before it begins; options may have been changed."""
        raise NotImplementedError

    def check_sums(self, sums: dict[str, float]) -> None:
        """Rejects an implausible loss before its gradient is computed, by its sums over all processes, all finite."""
        raise NotImplementedError

    def footprint(self, phase: str) -> dict[str, int]:
        """Memory of a phase, in bytes by name, for out-of-memory errors."""
        raise NotImplementedError


VERBS = ("complete", "teach", "weigh", "compare")
"""What a user's subclass may override."""


def check_verbs(trainer: type) -> None:
    """Rejects signatures and misspelt names of verbs, which are called only after the first (expensive) rollout."""
    for one in trainer.__mro__:
        if one.__module__.split(".")[0] == __package__.split(".")[0]:  # ours, and its bases
            return
        for name, value in vars(one).items():
            if not inspect.isfunction(value):
                continue
            if name in VERBS:
                _check_signature(f"{one.__name__}.{name}", value, getattr(Verbs, name))
            # A longer name, such as `complete_with_hints`, is a helper and no misspelling.
            elif (near := difflib.get_close_matches(name, VERBS, n=1, cutoff=0.8)) and not name.startswith(near[0]):
                raise TypeError(f"`{one.__name__}.{name}` is called by nothing, did you mean `{near[0]}`.")


def _check_signature(name: str, given: Any, ours: Any) -> None:
    parameters = list(inspect.signature(ours).parameters)
    try:
        inspect.signature(given).bind(*parameters)
    except TypeError as error:
        raise TypeError(f"`{name}` is called as `({', '.join(parameters[1:])})`: {error}.") from None
