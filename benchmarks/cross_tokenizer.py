"""Trains the student of `examples/two_tokenizers` by bytes and with the losses that others have for such a pair.

    python benchmarks/cross_tokenizer.py --seeds 0 1 2 --output out/cross_tokenizer

GOLD's losses are called from TRL. All have the same completions, rates and number of steps; a line of `results.jsonl`
is one training, and what it holds is not trained again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import torch
from common import options, read, studied, summary
from torch import Tensor
from trl.experimental.gold import GOLDConfig
from trl.experimental.gold.gold_trainer import ULDLoss
from two_tokenizers import train

from trl_opsd import OPSDTrainer
from trl_opsd.types import LossParts

IGNORED = -100
COLUMNS = {"nats_per_byte_after": 3, "divergence_after": 3, "right_after": 2, "words_after": 0}
"""Of held-out text; of the teacher's distribution, per byte; the share of right transitions; and different words."""


class ByTokens(OPSDTrainer):
    """Replaces the loss by one of the logits of both models, each of its own tokens; one micro-batch a step."""

    loss: Callable[..., Tensor]

    def compare(self, student: Any, rollout: Any, targets: Any, num_items: Any) -> LossParts:
        with torch.no_grad():
            parts = super().compare(student, rollout, targets, num_items)
        teacher = self.teacher
        prompts, completions = rollout.prompt_lists(), rollout.completion_lists()
        sizes, rooms = [len(ids) for ids in completions], [None] * len(completions)
        theirs = [one.ids for one in teacher._read(completions, sizes, rooms)]
        before = self.readers.tokenizers["teacher"](self.processing_class.batch_decode(prompts))["input_ids"]
        mine = self._forward(student, prompts, completions, teacher._student)
        with torch.no_grad():
            yours = self._forward(teacher.teacher.model, before, theirs, teacher.its)
        return replace(parts, loss=type(self).loss(self, mine, yours))

    def _forward(self, model: Any, prompts: list[list[int]], completions: list[list[int]], spelling: Any) -> Any:
        """Logits [B, L, V], labels and ids [B, L], and the first and last byte of each token of the completions."""
        rows = [[*one, *other] for one, other in zip(prompts, completions, strict=True)]
        ids_BL = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
        labels_BL, mask_BL = torch.full_like(ids_BL, IGNORED), torch.zeros_like(ids_BL)
        offsets = []
        for number, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
            ids_BL[number, : len(row)], mask_BL[number, : len(row)] = torch.tensor(row), 1
            labels_BL[number, len(prompt) : len(row)] = ids_BL[number, len(prompt) : len(row)]
            sizes = [0, *(len(one or b"") for one in spelling.spelled(row[len(prompt) :]))]
            ends = torch.tensor(sizes).cumsum(0).tolist()
            offsets.append([[0, 0]] * len(prompt) + [list(pair) for pair in pairwise(ends)])
        return model(input_ids=ids_BL, attention_mask=mask_BL).logits, labels_BL, ids_BL, offsets


class Gold(ByTokens):
    """TRL's universal logit distillation."""

    settings: ClassVar[dict[str, Any]] = {}
    shifts: ClassVar[bool] = False
    """Whether row `k` of the logits predicts token `k`, as the default merge of TRL 1.16 takes them to."""

    def loss(self, mine: Any, yours: Any) -> Tensor:
        # the options alone: making a config resets the launch
        options = {one.name: one.default for one in fields(GOLDConfig) if "uld" in one.name or one.name == "beta"}
        config: Any = SimpleNamespace(**{**options, **self.settings})
        loss = ULDLoss(config, self.processing_class, self.readers.tokenizers["teacher"], torch.device("cpu"))
        (logits, labels, ids, offsets), (its_logits, its_labels, its_ids, its_offsets) = mine, yours
        if self.shifts:
            logits, its_logits = logits.roll(1, 1), its_logits.roll(1, 1)
        padded = torch.zeros(*ids.shape, 2, dtype=torch.long)
        for row, one in enumerate(offsets):
            padded[row, : len(one)] = torch.tensor(one)
        theirs = torch.zeros(*its_ids.shape, 2, dtype=torch.long)
        for row, one in enumerate(its_offsets):
            theirs[row, : len(one)] = torch.tensor(one)
        return loss(logits, its_logits, labels, its_labels, ids, its_ids, padded, theirs).mean()


class GoldHybrid(Gold):
    settings: ClassVar[dict[str, Any]] = {"uld_use_hybrid_loss": True}


class GoldShifted(Gold):
    shifts = True


class GoldHybridShifted(GoldHybrid):
    shifts = True


class GoldBayesian(Gold):
    settings: ClassVar[dict[str, Any]] = {"uld_use_hybrid_loss": True, "uld_token_merge_strategy": "bayesian"}


class Overlap(ByTokens):
    """KDFlow's: where both models are at one border and take one token, the KL of the tokens that both have."""

    def loss(self, mine: Any, yours: Any) -> Tensor:
        teacher = self.teacher
        ids = {text: number for number, text in enumerate(teacher.its.texts) if text}
        shared = [(number, ids[text]) for number, text in enumerate(teacher._student.texts) if text in ids]
        ours_S, theirs_S = map(torch.tensor, zip(*shared, strict=True))
        (logits, labels, _, offsets), (its_logits, its_labels, _, its_offsets) = mine, yours
        found = []
        for row in range(len(logits)):
            spans = {
                tuple(its_offsets[row][at]): at for at in (its_labels[row] != IGNORED).nonzero().flatten().tolist()
            }
            pairs = [
                (at - 1, spans[span] - 1)
                for at in (labels[row] != IGNORED).nonzero().flatten().tolist()
                if (span := tuple(offsets[row][at])) in spans and span[0] < span[1]
            ]
            for one, other in pairs:
                log_p = logits[row, one, ours_S].log_softmax(-1)
                found.append((log_p.exp() * (log_p - its_logits[row, other, theirs_S].log_softmax(-1))).sum())
        return torch.stack(found).mean() if found else logits.sum() * 0


class Supervised(ByTokens):
    """No distillation: cross-entropy of the student's tokens, on samples of the teacher for the same prompts."""

    def __init__(self, *, args: Any, train_dataset: Any, teacher_model: Any, **given: Any) -> None:
        words, prompts = given["teacher_processing_class"], list(train_dataset["prompt"])
        args.lmbda, found = 0.0, []
        torch.manual_seed(args.seed)
        for start in range(0, len(prompts), 256):
            batch = words(prompts[start : start + 256], padding=True, padding_side="left", return_tensors="pt")
            made = teacher_model.generate(**batch, do_sample=True, max_new_tokens=64, top_k=0)
            texts = words.batch_decode(made[:, batch["input_ids"].size(1) :], skip_special_tokens=True)
            found += [one or "." for one in texts]  # a row of 2,560 ended at once, and a completion has to have text
        train_dataset = train_dataset.add_column("completion", found)
        super().__init__(args=args, train_dataset=train_dataset, teacher_model=teacher_model, **given)

    def loss(self, mine: Any, yours: Any) -> Tensor:
        logits, labels = mine[0][:, :-1].flatten(0, 1), mine[1][:, 1:].flatten()
        return torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED)


LOSSES: dict[str, tuple[type[OPSDTrainer], list[str]]] = {
    "bytes, reverse KL": (OPSDTrainer, ["--divergence", "reverse_kl"]),
    "bytes, forward KL": (OPSDTrainer, ["--divergence", "forward_kl"]),
    "bytes, JSD": (OPSDTrainer, ["--divergence", "jsd"]),
    "bytes, reverse KL, no forks": (OPSDTrainer, ["--divergence", "reverse_kl", "--missed", "1"]),
    "bytes, JSD, no forks": (OPSDTrainer, ["--divergence", "jsd", "--missed", "1"]),
    "samples, then bytes, reverse KL": (OPSDTrainer, ["--divergence", "reverse_kl", "--samples", "half"]),
    "samples, then bytes, JSD": (OPSDTrainer, ["--divergence", "jsd", "--samples", "half"]),
    "bytes on samples, forward KL": (OPSDTrainer, ["--divergence", "forward_kl", "--samples", "all"]),
    "GOLD, sorted": (Gold, []),
    "GOLD, hybrid": (GoldHybrid, []),
    "GOLD, sorted, shifted right": (GoldShifted, []),
    "GOLD, hybrid, shifted right": (GoldHybridShifted, []),
    "GOLD, hybrid, Bayesian": (GoldBayesian, []),
    "overlap KL": (Overlap, []),
    "supervised": (Supervised, []),
}


def trained(output: str, name: str, rate: float, seed: int, steps: int) -> dict[str, Any]:
    """Trains once, with samples of the teacher in some or all steps where a loss says so."""
    trainer, more = LOSSES[name]
    samples = {"half": steps // 2, "all": steps}.get((more or [""])[-1], 0)
    more = [str(samples) if one in ("half", "all") else one for one in more]
    given = ["--output", output, "--steps", str(steps - samples), "--learning-rate", str(rate), "--seed", str(seed)]
    found: dict[str, Any] = train.main([*given, *more], trainer)
    return found


def main() -> None:
    asked = options(
        __doc__, seeds=[0, 1, 2], steps=80, rates=[1e-3, 3e-3], losses=list(LOSSES), output="out/cross_tokenizer"
    )
    file = f"{asked.output}/results.jsonl"
    keys = (
        {"loss": name, "rate": rate, "seed": seed, "steps": asked.steps}
        for seed in asked.seeds
        for rate in asked.rates
        for name in asked.losses
    )
    studied(file, keys, partial(trained, asked.output))
    print(summary(read(file), ["loss", "rate"], COLUMNS))


if __name__ == "__main__":
    main()
