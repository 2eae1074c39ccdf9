"""Trains the student of `examples/two_tokenizers` by bytes and with the losses that others have for such a pair.

    python benchmarks/cross_tokenizer.py --seeds 0 1 2 --output out/cross_tokenizer

GOLD's losses are called from TRL. The same completions, rate and number of steps for each; a line of `results.jsonl` is
one training, and what it holds is not trained again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import torch
from torch import Tensor
from trl.experimental.gold import GOLDConfig
from trl.experimental.gold.gold_trainer import ULDLoss
from two_tokenizers import train

from trl_opsd import OPSDTrainer
from trl_opsd.types import LossParts

RATES = [1e-3, 3e-3]
"""All are tried for each loss, and the best one is shown."""
IGNORED = -100


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


def table(lines: list[dict[str, Any]]) -> str:
    """Means over seeds of each loss at its better rate, by the likelihood of held-out sentences."""
    rows = []
    for name in LOSSES:
        by_rate = {rate: [one for one in lines if one["loss"] == name and one["rate"] == rate] for rate in RATES}
        best = min(
            (group for group in by_rate.values() if group),
            key=lambda group: statistics.mean(one["nats_per_byte_after"] for one in group),
            default=[],
        )
        if best:
            mean = {key: statistics.mean(one[key] for one in best) for key in best[0] if key not in ("loss",)}
            ends = [one["nats_per_byte_after"] for one in best]
            rows.append(
                f"| {name} | {mean['rate']:g} | {mean['divergence_after']:.3f} | {mean['right_after']:.2f} | "
                f"{mean['nats_per_byte_after']:.3f} ({min(ends):.3f}–{max(ends):.3f}) | {mean['words_after']:.0f} |"
            )
    head = "| loss | rate | nats per byte to the teacher | right transitions | held-out nats per byte | words |"
    return "\n".join([head, "|---|---|---|---|---|---|", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--losses", nargs="+", choices=list(LOSSES), default=list(LOSSES), metavar="NAME")
    parser.add_argument("--output", type=Path, default=Path("out/cross_tokenizer"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    file = options.output / "results.jsonl"
    torch.set_num_threads(1)
    for seed in options.seeds:
        for rate in options.rates:
            for name in options.losses:
                done = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
                key = {"loss": name, "rate": rate, "seed": seed, "steps": options.steps}
                if any(key.items() <= one.items() for one in done):
                    continue
                trainer, more = LOSSES[name]
                samples = {"half": options.steps // 2, "all": options.steps}.get((more or [""])[-1], 0)
                more = [str(samples) if one in ("half", "all") else one for one in more]
                steps = str(options.steps - samples)
                given = ["--output", str(options.output), "--steps", steps, "--learning-rate", str(rate)]
                found = train.main([*given, "--seed", str(seed), *more], trainer)
                with file.open("a") as out:
                    out.write(json.dumps({**key, **found}) + "\n")
    print(table([json.loads(line) for line in file.read_text().splitlines()]))


if __name__ == "__main__":
    main()
