"""A trainer that measures in float64, from whole logits, how far each sampler is from the student when it learns."""

from __future__ import annotations

from collections import defaultdict
from copy import deepcopy

import torch
from support.rollouts import Apart

from trl_opsd import OPSDTrainer


class Told(Apart):
    """Knows what each token was drawn with: a number that follows from the token and its place."""

    returns_logprobs = True

    def logprobs(self, prompt_ids, completion_ids):
        return [-(4 + token / 128 + place / 64) for place, token in enumerate(completion_ids)]


class Measured(OPSDTrainer):
    """Keeps `r - 1 - log r` of each token, by its step, or by a name in evaluations. `told` is by prompt and ids."""

    def __init__(self, **given):
        super().__init__(**given)
        self.told, self.of_step = self.rollout.logprobs, defaultdict(list)

    def compare(self, student, rollout, targets, num_items):
        exact = deepcopy(self.accelerator.unwrap_model(self.model)).double().eval()
        for row, (prompt, ids) in enumerate(zip(rollout.prompt_lists(), rollout.completion_lists(), strict=True)):
            told = self.told(prompt, ids) if rollout.weights[row].any() else None
            if told:
                with torch.no_grad():
                    logits_CV = exact(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
                own_C = logits_CV.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
                ratio_C = (own_C - torch.tensor(told, dtype=torch.float64)).exp()
                name = self.state.global_step if self.model.training else "eval"
                self.of_step[name] += (ratio_C - 1 - ratio_C.log()).tolist()
        return super().compare(student, rollout, targets, num_items)

    def mean(self, name):
        """Over the tokens of a step."""
        return sum(self.of_step[name]) / len(self.of_step[name])


def remembered(trainer):
    """Has a trainer's engine remember what it was asked for, as its `told`."""
    found, write = {}, trainer.rollout.engine.write

    def recording(prompt_ids, options):
        rows = write(prompt_ids, options)
        for row, given in zip(rows, options, strict=True):
            if "logprobs" in given and "temperature" in given:  # not those of a proof
                found[tuple(row.prompt_ids), tuple(row.completion_ids)] = row.logprobs
        return rows

    trainer.rollout.engine.write = recording
    trainer.told = lambda prompt, ids: found.get((tuple(prompt), tuple(ids)))
