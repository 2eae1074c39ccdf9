"""The four verbs of a step and the checks around them, with our own types; a trainer fills them in.

B rows · C completion tokens
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from trl_opsd._compat.peft import CausalLM
from trl_opsd.data.intake import Request
from trl_opsd.data.teacher_prompts import Row
from trl_opsd.types import LossParts, Rollout, TeacherTargets


class Verbs:
    """What [`~loop.seams.SeamTrainer`] calls. All of it but `weigh` has to be filled in."""

    # The metaclass of transformers' trainer ignores `abstractmethod`, so these raise.

    def read_rows(self, rows: Sequence[Row]) -> list[Request]:
        """Reads the rows of a generation batch, or refuses one, before anything is generated.

        Returns:
            The same rows, aligned; what `teach` and `weigh` are given.
        """
        raise NotImplementedError

    def check_prompt_ids(self, prompt_ids: list[list[int]]) -> None:
        """Refuses prompts that the student cannot read, before anything is generated."""
        raise NotImplementedError

    def complete(self, prompt_ids: list[list[int]]) -> list[list[int]]:
        """Writes one completion for each prompt; token ids in, token ids out."""
        raise NotImplementedError

    def teach(self, rollout: Rollout, rows: Sequence[Row]) -> TeacherTargets:
        """Lets the teacher read a whole generation batch; the dataset rows it came from are aligned with it."""
        raise NotImplementedError

    def weigh(self, rollout: Rollout, rows: Sequence[Row], targets: TeacherTargets) -> Tensor:
        """What each token of a generation batch counts in the loss; by default what it counted, 1 or 0.

        Selection of tokens, discounts and rewards belong here: whatever it returns is honoured by the loss, its
        gradient, its denominator and the logs alike.

        Args:
            rollout ([`~types.Rollout`]):
                The generation batch of this process; a token of weight 0 in it has to stay at 0.
            rows (`Sequence[Mapping[str, Any]]`):
                Of the dataset, aligned with it.
            targets ([`~types.TeacherTargets`]):
                What the teacher made of it, row-aligned.

        Returns:
            `torch.Tensor`: [B, C], finite and at least 0.
        """
        return rollout.weights

    def compare(
        self, student: CausalLM, rollout: Rollout, targets: TeacherTargets, num_items: Tensor | float | None
    ) -> LossParts:
        """Holds the student against the targets. Runs inside the student wrapper's forward: no collectives in it.

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

    def check_sums(self, sums: dict[str, float]) -> None:
        """Refuses a loss, before its gradient exists, by its sums over all processes, which are finite."""
        raise NotImplementedError

    def footprint(self, phase: str) -> dict[str, int]:
        """What a phase holds, in bytes by name, for an error of lacking memory."""
        raise NotImplementedError
