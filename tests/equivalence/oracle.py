"""The training of a student in float64, one row at a time, as docs/ describe it; knows nothing of the package's code.

N tokens of a completion · V vocabulary · P byte positions
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

TEMPLATE = "{privileged_context} | {prompt}"
"""Joins what only the teacher sees, and a prompt."""
GATE, THRESHOLD = 0.5, 1.0
OUTCOMES = 257
"""The bytes, and the end of the text or any other special token (docs/tokenizers.md)."""
FLOOR, MOST_ESCAPE, BORDERS = 1e-6, 0.03, 3
"""Added to the probability of each outcome; largest share that a position may miss; tokens that borders reach back."""
Row = dict[str, Any]


def worth(prompt: str, text: str) -> float:
    """The reward of a completion: 0, a half or 1; always 1 or always 0 for some prompts."""
    return {"The sky is": 1.0, "a": 0.0}.get(prompt, min(text.count("e"), 2) / 2)


# ---- Divergences and targets -----------------------------------------------------------------------------------------


def forward_kl(student: Tensor, target: Tensor) -> Tensor:
    return (target.exp() * (target - student)).sum(-1)


def reverse_kl(student: Tensor, target: Tensor) -> Tensor:
    return forward_kl(target, student)


def jsd(student: Tensor, target: Tensor) -> Tensor:
    """With a `beta` of one half."""
    middle = (0.5 * (student.exp() + target.exp())).log()
    return 0.5 * (forward_kl(middle, target) + forward_kl(middle, student))


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "forward_kl": forward_kl, "reverse_kl": reverse_kl, "jsd": jsd,
}  # fmt: skip


def entropy(logs: Tensor) -> Tensor:
    return -(logs.exp() * logs).sum(-1)


# ---- Bytes -----------------------------------------------------------------------------------------------------------


def _letters() -> dict[str, int]:
    """The byte of each letter of a byte-level tokenizer, as in GPT-2."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(others)}


class Spelling:
    """What the tokens of a byte-level tokenizer stand for."""

    def __init__(self, words: Any) -> None:
        letters, self.words = _letters(), words
        tokens = words.convert_ids_to_tokens(list(range(len(words))))
        special = set(words.all_special_ids)
        self.texts = [
            None if number in special else bytes(letters[one] for one in token) for number, token in enumerate(tokens)
        ]
        self.after = lru_cache(None)(self._after)

    def _after(self, begun: bytes) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens that begin with these bytes and go on, the outcome of each; and those that are just the bytes."""
        on = [
            (number, OUTCOMES - 1 if text is None else text[len(begun)])
            for number, text in enumerate(self.texts)
            if (not begun if text is None else text.startswith(begun) and len(text) > len(begun))
        ]
        whole = [number for number, text in enumerate(self.texts) if begun and text == begun]
        ids, outcomes = torch.tensor(on, dtype=torch.long).reshape(-1, 2).unbind(1)
        return ids, outcomes, torch.tensor(whole, dtype=torch.long)

    def next_bytes(self, logs_NV: Tensor, ids: Sequence[int]) -> tuple[Tensor, Tensor, list[int]]:
        """[P, 257], log-probabilities; [P], what is missed; and the token of each position."""
        probs = logs_NV.exp()
        found, escapes, token = [], [], []
        for at, number in enumerate(ids):
            text = self.texts[number]
            first = max([0, at - BORDERS, *(one + 1 for one in range(at) if self.texts[ids[one]] is None)])
            for end in range(1 if text is None else len(text)):
                here = b"" if text is None else text[:end]
                mass = torch.zeros(OUTCOMES, dtype=torch.float64)
                for border in range(first, at + 1):
                    begun = b"".join(self.texts[one] for one in ids[border:at]) + here  # type: ignore[misc]
                    those, outcomes, _ = self.after(begun)
                    path = sum((logs_NV[one, ids[one]] for one in range(border, at)), torch.zeros(()))
                    mass = mass.index_add(0, outcomes, probs[border, those] * (-path).exp())
                found.append((mass / mass.sum() + FLOOR).log().log_softmax(-1))
                those, _, whole = self.after(here)
                missed = float(probs[at, whole].sum().detach())
                escapes.append(missed / (missed + float(probs[at, those].sum().detach())))
                token.append(at)
        return torch.stack(found), torch.tensor(escapes), token


# ---- A training ------------------------------------------------------------------------------------------------------


class Oracle:
    """A student that is trained by SGD with the options of a run, on the completions that it has recorded.

    A row is its columns and `ids`, `skipped`, `off_policy`, `kept`: the completion, whether nothing was generated,
    whether it is the dataset's, and the places of the tokens that `token_selection="random"` has drawn.
    """

    def __init__(
        self, student: Any, teacher: Any, words: Any, options: Mapping[str, Any], rate: float, theirs: Any = None
    ) -> None:
        self.student, self.origin = student.double(), copy.deepcopy(student).double().eval()
        self.teacher, self.words, self.options, self.rate = teacher.double().eval(), words, options, rate
        self.theirs = words if theirs is None else theirs
        self.spellings = None if theirs is None else (Spelling(words), Spelling(theirs))
        self.temperatures = options.get("student_temperature", 1.0), options.get("teacher_temperature", 1.0)
        self.control, self.number = options.get("teacher_control"), options.get("num_generations", 1)
        self.reads_origin = "extrapolation" in options or "anchor_weight" in options
        self.compared = DIVERGENCES[options.get("divergence", "reverse_kl")]
        self.last: dict[str, tuple[float | None, list[float | None], bool]] = {}
        """The last visit of a prompt: gap, rewards, and whether it was skipped since."""

    # ---- Rows ----

    def step(self, rows: Sequence[Row]) -> float:
        """Trains on the rows of a step, in their order; returns the loss."""
        rows = [dict(row) for row in rows]
        groups = [rows[at : at + self.number] for at in range(0, len(rows), self.number)]
        for group in groups:
            assert len({row["prompt"] for row in group}) == 1, "the completions of a prompt are adjacent"
            self._prepare(group)
        if self.control == "shuffled":
            read = [{name: row[name] for name in ("told", "less")} for row in rows]
            for place, row in enumerate(rows):
                row.update(read[(place + self.number) % len(rows)])
        zero = torch.zeros((), dtype=torch.float64)
        found = [self._of_row(row) for row in rows]
        weights = sum(float(one.sum()) for one, _, _ in found)
        for group, each in zip(
            groups, (found[at : at + self.number] for at in range(0, len(rows), self.number)), strict=True
        ):
            self._remember(group, each)
        if not weights:
            return 0.0
        loss = sum(((one * value).sum() for one, value, _ in found), zero) / weights
        gradients = torch.autograd.grad(loss, list(self.student.parameters()))
        with torch.no_grad():
            for one, gradient in zip(self.student.parameters(), gradients, strict=True):
                one.sub_(gradient, alpha=self.rate)
        return float(loss.detach())

    def _prepare(self, group: Sequence[Row]) -> None:
        """What the teacher reads, and the weight of each row of a prompt."""
        skipped = self._is_skipped(group[0]["prompt"])
        for row in group:
            assert row["skipped"] == skipped, f"{row['prompt']!r} is skipped: {row['skipped']}, not {skipped}"
            row["text"] = self.words.decode(row["ids"], skip_special_tokens=True)
            row["reward"] = None if row["off_policy"] or skipped else worth(row["prompt"], row["text"])
        known = torch.tensor([row["reward"] for row in group if row["reward"] is not None], dtype=torch.float64)
        kind = self.options.get("reward_gate")
        for row in group:
            row["gate"] = 1.0
            if kind is not None and row["reward"] is not None:
                advantage = float((row["reward"] - known.mean()) / (known.std() + 1e-4)) if len(known) > 1 else 0.0
                by_kind = {"reward": max(0.0, row["reward"]), "advantage": max(0.0, advantage)}
                row["gate"] = by_kind[kind] if isinstance(kind, str) else float(row["reward"] >= kind)
            context = row.get("privileged_context")
            if self.options.get("teacher_context"):
                others = [one for one in group if one is not row and (one["reward"] or 0) >= THRESHOLD]
                context = next((one["text"].strip() for one in others), context)
                row["gate"] *= context is not None
            is_told = context is not None and self.control != "unprivileged"
            row["told"] = self._joined(row, context) if is_told else row["prompt"]
            row["less"] = self._joined(row, row.get("contrast_context", ""))

    def _joined(self, row: Row, context: str) -> str:
        return TEMPLATE.format(prompt=row["prompt"], privileged_context=context)

    def _is_skipped(self, prompt: str) -> bool:
        kind = self.options.get("skip_prompts")
        gap, rewards, was_skipped = self.last.get(prompt, (None, [], True))
        if kind is None or was_skipped:
            return False
        if kind == "flat_groups":
            known = [one for one in rewards if one is not None]
            return len(known) > 1 and len(set(known)) == 1
        return gap is not None and abs(gap) < kind

    def _remember(self, group: Sequence[Row], found: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        prompt = group[0]["prompt"]
        if group[0]["skipped"]:
            gap, rewards, _ = self.last[prompt]
            self.last[prompt] = gap, rewards, True
            return
        total = sum(float(weights.sum()) for weights, _, _ in found)
        gap = sum(float((weights * alone.detach()).sum()) for weights, _, alone in found) / total if total else None
        self.last[prompt] = gap, [row["reward"] for row in group], False

    # ---- Tokens ----

    def _logits(self, model: Any, prompt: str, ids: Sequence[int], words: Any = None) -> Tensor:
        before = (words or self.words)(prompt)["input_ids"]
        return model(torch.tensor([[*before, *ids]])).logits[0, len(before) - 1 : -1]

    def _of_row(self, row: Row) -> tuple[Tensor, Tensor, Tensor]:
        """[N] each: the weights of tokens, what they add to the loss, and their divergence from the target alone."""
        ids, options = row["ids"], self.options
        if row["skipped"] or not ids:
            return (torch.zeros(0, dtype=torch.float64),) * 3
        own, its = self.temperatures
        logits = self._logits(self.student, row["prompt"], ids)
        student = (logits / own).log_softmax(-1)
        chosen = student.gather(1, torch.tensor(ids)[:, None])[:, 0]
        told = None
        with torch.no_grad():
            first = self._logits(self.origin, row["prompt"], ids) if self.reads_origin else torch.zeros(())
            if self.spellings is None and self.control != "constant":
                told = self._logits(self.teacher, row["told"], ids)
        alone = torch.zeros(len(ids), dtype=torch.float64)
        if self.spellings:
            alone = self._by_bytes(student, row)
        elif told is not None:
            alone = self.compared(student, self._target(row, told / its, first / its))
        value = alone
        if self.control == "constant":
            value = alone + 0.5 * chosen
        if weight := options.get("anchor_weight"):
            anchored = DIVERGENCES[options.get("anchor_divergence", "reverse_kl")]
            value = value + weight * anchored(student, (first / own).log_softmax(-1))
        scores = {
            "student_entropy": entropy(student.detach()),
            "student_surprise": -chosen.detach(),
            "teacher_divergence": alone.detach(),
            "teacher_confidence": -chosen.detach() if told is None else -entropy((told / its).log_softmax(-1)),
        }
        return self._weights(row, scores), value, alone

    def _target(self, row: Row, teacher: Tensor, first: Tensor) -> Tensor:
        teacher, first = teacher.log_softmax(-1), first.log_softmax(-1) if first.ndim else first
        factor = self.options.get("extrapolation", 1.0)
        target = teacher if factor == 1 else first + factor * (teacher - first)
        if weight := self.options.get("contrast_weight"):
            with torch.no_grad():
                less = self._logits(self.teacher, row["less"], row["ids"])
            gap, bound = teacher - (less / self.temperatures[1]).log_softmax(-1), self.options.get("contrast_clip")
            target = target + weight * (gap if bound is None else bound * (gap / bound).tanh())
        return target.log_softmax(-1)

    def _weights(self, row: Row, scores: Mapping[str, Tensor]) -> Tensor:
        count, kind = len(row["ids"]), self.options.get("token_selection")
        fraction = self.options.get("token_fraction", 1.0)
        if self.control == "constant":
            kind, fraction = "student_surprise", 0.2
        places = torch.arange(count, dtype=torch.float64)
        weights = torch.ones(count, dtype=torch.float64)
        kept = math.ceil(round(fraction * count, 9))
        if kind == "prefix":
            weights = (places < kept).double()
        elif kind == "random":
            assert len(set(row["kept"])) == kept, f"{row['kept']} are not {kept} of {count} tokens"
            weights = torch.zeros_like(weights).index_fill(0, torch.tensor(row["kept"]), 1.0)
        if (table := self.options.get("position_weights")) is not None:
            at = places / max(1, count - 1) * (len(table) - 1)
            low = at.long().clamp(max=len(table) - 2)
            knots = torch.tensor(table, dtype=torch.float64)
            weights = weights * (knots[low] + (at - low) * (knots[low + 1] - knots[low]))
        weights = weights * row["gate"]
        if kind not in scores or not weights.any():
            return weights
        # of the n tokens that count, k; their row counts as k of its n tokens would on average
        counted = (weights != 0).nonzero()[:, 0]
        kept = math.ceil(round(fraction * len(counted), 9))
        best = counted[scores[kind][counted].topk(kept).indices]
        only = torch.zeros_like(weights).index_copy(0, best, weights[best])
        return only * (kept / len(counted) * weights.sum() / only.sum())

    def _by_bytes(self, student: Tensor, row: Row) -> Tensor:
        """[N], the divergence over the next byte, summed over the bytes of each token."""
        assert self.spellings is not None
        mine, yours = self.spellings
        ids = self.theirs(self.words.decode(row["ids"]))["input_ids"]
        with torch.no_grad():
            logits = self._logits(self.teacher, row["told"], ids, self.theirs)
            target, missed, _ = yours.next_bytes((logits / self.temperatures[1]).log_softmax(-1), ids)
        logs, escapes, token = mine.next_bytes(student, row["ids"])
        held = (escapes <= MOST_ESCAPE) & (missed <= MOST_ESCAPE)
        found = torch.zeros(len(row["ids"]), dtype=torch.float64)
        return found.index_add(0, torch.tensor(token), self.compared(logs, target) * held)
