"""An engine that is the student itself: every sync arrives, and nothing is sent."""

from __future__ import annotations

import torch
from support import tiny

from trl_opsd.rollout.synced import SyncedRollout
from trl_opsd.types import Completion

BYTES = 1000
"""What a sync says that it has sent."""


class Mirror:
    """An engine that holds the student itself, so that every sync arrives."""

    name, block_size = "a mirror", 16

    def __init__(self, trainer):
        self._trainer = trainer

    def write(self, prompt_ids, options):
        with self._trainer.student_for_generation() as student:
            return [self._row(student, *row) for row in zip(prompt_ids, options, strict=True)]

    def _row(self, student, prompt, options):
        written = [number * 31 % tiny.VOCABULARY for number in range(3, 3 + min(options["max_tokens"], 16))]
        ids = torch.tensor([prompt + written])
        scores = student(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].tolist()
        first = len(prompt) - 1
        asked = scores[first:] if "logprobs" in options else []
        return Completion(prompt_ids=prompt, completion_ids=written, prompt_logprobs=scores[:first], logprobs=asked)

    def forget_prefixes(self):
        """Does nothing: there are no prefixes."""

    def close(self):
        """Does nothing: the student is the trainer's."""


class Mirrored(SyncedRollout):
    """Follows the sync of a separate engine, and sends nothing."""

    def bind(self, trainer):
        self.set_up(trainer, Mirror(trainer), {}, torch.float32)

    def send_weights(self):
        return BYTES
