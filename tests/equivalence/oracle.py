"""The training of a student in float64, one row at a time, as docs/ describe it; knows nothing of the package's code.

N tokens of a completion · V vocabulary
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from spelling import Spelling
from support.number_formats import quantised
from torch import Tensor
from torch.func import functional_call

TEMPLATE = "{privileged_context} | {prompt}"
"""Joins what only the teacher sees, and a prompt."""
FEEDBACK = "Feedback on an earlier attempt:\n\n{feedback}"
ASKED, ANSWERED = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
"""What is around a prompt that is a message."""
GATE = 0.5
EPSILON = 1e-4
"""Added to each standard deviation of rewards."""
Row = dict[str, Any]

# ---- What a user passes ----------------------------------------------------------------------------------------------


def worth(prompt: str, text: str) -> float:
    """The reward of a completion: 0, a half or 1; always 1 or always 0 for some prompts."""
    return {"The sky is": 1.0, "a": 0.0}.get(prompt, min(text.count("e"), 2) / 2)


def length(prompt: str, text: str) -> float | None:
    """Another reward, which some completions do not have."""
    return None if "s" in text else min(len(text), 10) / 10


REWARDS = {"one": (worth,), "two": (worth, length)}


def hint(prompt: str, text: str) -> str:
    """What a teacher reads in place of a prompt."""
    return f"{prompt} {text[:3]}?"


def judgement(prompt: str, text: str, rewards: Sequence[float | None]) -> str | None:
    """The same by the rewards of all completions of the prompt; nothing where none is good."""
    best = max((one for one in rewards if one is not None), default=0.0)
    return f"{prompt} {best:g} {text[:3]}" if best > 0 else None


def prompt_weight(prompt: str, last: tuple[float | None, int] | None) -> float:
    """The weight of a prompt by the gap of its last visit, and how often it was skipped since."""
    if last is None:
        return 1.0
    gap, skipped = last
    return 0.0 if prompt == "The sky is" and not skipped else 1.0 + abs(gap or 0.0)


def feedback(prompt: str) -> str | None:
    """What an environment says."""
    return None if prompt == "a" else f"shorter than {len(prompt)}"


NLL = 0.2
TOP_K = 4
"""Tokens of each kind that a server tells."""
TABLES = {"rising": (0.25, 0.5, 1.0), "from 0": (0.0, 1.0)}
"""Weights along a completion, by the names of methods."""
FACTORS = {"one": 1.25, "discounted": 0.8}
"""Of the weight of each token relative to the one before."""


def method_weight(prompt: str, step: int) -> float:
    """The weight that it gives to a prompt; one is skipped in the second step."""
    return 0.0 if prompt == "2+2=" and step == 1 else 1.5 if prompt == "The sky is" else 1.0


# ---- Divergences and targets -----------------------------------------------------------------------------------------


def forward_kl(student: Tensor, target: Tensor) -> Tensor:
    """What each token of the vocabulary adds."""
    return target.exp() * (target - student)


def reverse_kl(student: Tensor, target: Tensor) -> Tensor:
    return forward_kl(target, student)


def jsd(student: Tensor, target: Tensor) -> Tensor:
    """With a `beta` of one half."""
    middle = (0.5 * (student.exp() + target.exp())).log()
    return 0.5 * (forward_kl(middle, target) + forward_kl(middle, student))


def in_buckets(logs: Tensor, ids: Tensor) -> Tensor:
    """[N, K + 1], the distribution over these tokens of each position and all others together."""
    rest = logs.exp().scatter(-1, ids, 0.0).sum(-1, keepdim=True).log()
    return torch.cat([logs.gather(-1, ids), rest], -1)


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "forward_kl": forward_kl, "reverse_kl": reverse_kl, "jsd": jsd,
}  # fmt: skip


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    return math.sqrt(sum((one - mean(values)) ** 2 for one in values) / (len(values) - 1))


def entropy(logs: Tensor) -> Tensor:
    return -(logs.exp() * logs).sum(-1)


# ---- A training ------------------------------------------------------------------------------------------------------


class Oracle:
    """A student that is trained by SGD with the options of a run, on the completions that it has recorded.

    A row is its columns and `ids`, `skipped`, `off_policy`, `given`, `kept`: the completion, whether nothing was
    generated, whether it is the dataset's, with how many tokens of it the student went on, and the places of the tokens
    that `token_selection="random"` has drawn.
    """

    def __init__(
        self,
        student: Any,
        teachers: Mapping[str, Any],
        words: Any,
        options: Mapping[str, Any],
        rate: float,
        theirs: Any = None,
    ) -> None:
        self.student, self.origin = student.double(), copy.deepcopy(student).double().eval()
        self.teachers = {name: one.double().eval() for name, one in teachers.items()}
        self.words, self.options, self.rate = words, options, rate
        self.methods = options.get("methods", ())
        self.theirs = words if theirs is None else theirs
        self.spellings = None if theirs is None else (Spelling(words), Spelling(theirs))
        self.temperatures = options.get("student_temperature", 1.0), options.get("teacher_temperature", 1.0)
        self.number = options.get("num_generations", 1)
        self.reads_origin = "extrapolation" in options or "anchor_weight" in options
        self.entries = DIVERGENCES[options.get("divergence", "reverse_kl")]
        self.last: dict[str, tuple[float | None, list[float | None], int]] = {}
        """The last visit of a prompt: gap, rewards, and how often it was skipped since."""
        self.steps = 0

    # ---- Rows ----

    def step(self, rows: Sequence[Row]) -> float:
        """Trains on the rows of a step, in their order; returns the loss."""
        rows = [{**row, "prompt": self._text(row["prompt"])} for row in rows]
        groups = [rows[at : at + self.number] for at in range(0, len(rows), self.number)]
        for group in groups:
            assert len({row["prompt"] for row in group}) == 1, "the completions of a prompt are adjacent"
            self._judge(group)
        self._set_advantages(groups)
        for group in groups:
            self._prepare(group)
        if "shuffled" in self.methods:
            read = [row["told"] for row in rows]
            for place, row in enumerate(rows):
                row["told"] = read[(place + self.number) % len(rows)]
        zero = torch.zeros((), dtype=torch.float64)
        found = self._aggregated(rows, [self._of_row(row) for row in rows])
        weights = sum(float(one.sum()) for one, _, _ in found)
        for group, each in zip(
            groups, (found[at : at + self.number] for at in range(0, len(rows), self.number)), strict=True
        ):
            self._remember(group, each)
        self.steps += 1
        if not weights:
            return 0.0
        loss = sum(((one * value).sum() for one, value, _ in found), zero) / weights
        gradients = torch.autograd.grad(loss, list(self.student.parameters()))
        with torch.no_grad():
            for one, gradient in zip(self.student.parameters(), gradients, strict=True):
                one.sub_(gradient, alpha=self.rate)
        return float(loss.detach())

    def _text(self, prompt: Any) -> str:
        return str(prompt if isinstance(prompt, str) else prompt[0]["content"])

    def _limit(self) -> int:
        """Most tokens of a completion that is generated in this step."""
        most = self.options["max_completion_length"]
        return most - int((most - 3) * max(0.0, 1 - self.steps / 2)) if "growing" in self.methods else most

    def _judge(self, group: Sequence[Row]) -> None:
        """The weight of a prompt, and the rewards of its completions."""
        weight = self._weight_of(group[0]["prompt"])
        functions = REWARDS[self.options.get("reward_funcs", "one")]
        factors = self.options.get("reward_weights", [1.0] * len(functions))
        for row in group:
            assert row["skipped"] == (not weight), f"{row['prompt']!r} is skipped: {row['skipped']}, not {not weight}"
            assert not row["off_policy"] or "lmbda" in self.options
            assert row["off_policy"] or len(row["ids"]) <= self._limit() + row["given"]
            goes_on = row.get("completion_prefix") is not None and not (row["off_policy"] or row["skipped"])
            assert bool(row["given"]) == goes_on
            row["weight"], row["text"] = weight, self.words.decode(row["ids"], skip_special_tokens=True)
            is_judged = weight and not row["off_policy"]
            row["rewards"] = [one(row["prompt"], row["text"]) if is_judged else None for one in functions]
            known = [(one, factor) for one, factor in zip(row["rewards"], factors, strict=True) if one is not None]
            row["reward"] = sum(one * factor for one, factor in known) if known else None
            row["advantage"] = 0.0

    def _set_advantages(self, groups: Sequence[Sequence[Row]]) -> None:
        """As TRL's GRPO: how much better a completion is than the others of its prompt."""
        options = self.options
        rows = [row for group in groups for row in group if row["reward"] is not None]
        if options.get("multi_objective_aggregation") == "normalize_then_sum":
            for row in rows:
                row["sum"] = 0.0
            for place, factor in enumerate(options.get("reward_weights", (1.0,))):
                for group in groups:
                    known = [row for row in group if row["rewards"][place] is not None]
                    values = [row["rewards"][place] for row in known]
                    for row in known if len(known) > 1 else ():
                        row["sum"] += factor * (row["rewards"][place] - mean(values)) / (deviation(values) + EPSILON)
            sums = [row["sum"] for row in rows]
            for row in rows if len(rows) > 1 else ():
                row["advantage"] = (row["sum"] - mean(sums)) / (deviation(sums) + EPSILON)
            return
        scale = options.get("scale_rewards", "group")
        for group in groups:
            known = [row for row in group if row["reward"] is not None]
            compared = rows if scale == "batch" else known
            for row in known if len(compared) > 1 else ():
                of_all = deviation([one["reward"] for one in compared]) + EPSILON
                row["advantage"] = row["reward"] - mean([one["reward"] for one in known])
                row["advantage"] /= 1.0 if scale == "none" else of_all

    def _prepare(self, group: Sequence[Row]) -> None:
        """What the teacher reads, and the weight and pull of each row of a prompt."""
        options = self.options
        kind = options.get("reward_gate")
        for row in group:
            row["gate"] = 1.0
            if kind is not None and row["weight"] and not row["off_policy"]:
                reward = row["reward"]
                by_kind = {"reward": max(0.0, reward or 0.0), "advantage": max(0.0, row["advantage"])}
                row["gate"] = by_kind[kind] if isinstance(kind, str) else float(reward is not None and reward >= kind)
            row["nll_weight"] = options.get("reward_weight", 0.0) * row["advantage"]
            row["nll_weight"] += options.get("sft_weight", 0.0) * row["off_policy"]
            row["nll_weight"] += NLL * ("one" in self.methods) - 0.5 * ("constant" in self.methods)
            told = self._told(row, group)
            row["gate"] *= told is not None
            is_told = told is not None and "unprivileged" not in self.methods
            row["told"] = told if is_told else row["prompt"]
            row["less"] = self._joined(row, row.get("contrast_context", ""))

    def _told(self, row: Row, group: Sequence[Row]) -> str | None:
        """What the teacher reads, `None` where it has nothing to say."""
        options, context, prompt = self.options, row.get("privileged_context"), row["prompt"]
        if function := options.get("teacher_prompt_fn"):
            rewards = [one["reward"] for one in group]
            if row["weight"]:
                return hint(prompt, row["text"]) if function == "hint" else judgement(prompt, row["text"], rewards)
        elif options.get("teacher_context"):
            least = options.get("success_threshold", 1.0)
            others = [one for one in group if one is not row and one["reward"] is not None and one["reward"] >= least]
            context = next((one["text"].strip() for one in others if one["text"].strip()), context)
            return None if context is None else self._joined(row, context)
        elif "environment_factory" in options and not row["off_policy"]:
            context = feedback(prompt)
            if context is not None:
                context = options.get("feedback_template", FEEDBACK).format(feedback=context)
        return prompt if context is None else self._joined(row, context)

    def _joined(self, row: Row, context: str) -> str:
        return TEMPLATE.format(prompt=row["prompt"], privileged_context=context)

    def _weight_of(self, prompt: str) -> float:
        last, weight = self.last.get(prompt), 1.0
        if "by visits" in self.methods:
            weight = prompt_weight(prompt, None if last is None else (last[0], last[2]))
        elif last is not None and not last[2]:
            known = [one for one in last[1] if one is not None]
            is_flat, is_near = len(known) > 1 and len(set(known)) == 1, last[0] is not None and abs(last[0]) < 2.0
            weight = float(not (("flat groups" in self.methods and is_flat) or ("near" in self.methods and is_near)))
        return weight * (method_weight(prompt, self.steps) if "one" in self.methods else 1.0)

    def _remember(self, group: Sequence[Row], found: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        prompt = group[0]["prompt"]
        if group[0]["skipped"]:
            if prompt in self.last:
                gap, rewards, skipped = self.last[prompt]
                self.last[prompt] = gap, rewards, skipped + 1
            return
        total = sum(float(weights.sum()) for weights, _, _ in found)
        gap = sum(float((weights * alone.detach()).sum()) for weights, _, alone in found) / total if total else None
        self.last[prompt] = gap, [row["reward"] for row in group], 0

    def _aggregated(self, rows: Sequence[Row], found: list[tuple[Tensor, Tensor, Tensor]]) -> Any:
        """With each row, or each teacher, counting alike but for the weights of rows and teachers."""
        kind, sums = self.options.get("loss_aggregation"), dict.fromkeys(self.teachers, 0.0)
        for row, (weights, _, _) in zip(rows, found, strict=True):
            sums[self._teacher(row)] += float(weights.sum())
        factors = []
        for row, (weights, _, _) in zip(rows, found, strict=True):
            teacher = self._teacher(row)
            if kind == "rows":
                factors.append(row["gate"] * row["weight"] / (float(weights.sum()) or 1.0))
            elif kind == "teachers" and sums[teacher]:
                factors.append(self.options.get("teacher_weights", {}).get(teacher, 1.0) / sums[teacher])
            else:
                factors.append(1.0)
        return [(factor * one, *others) for factor, (one, *others) in zip(factors, found, strict=True)]

    def _teacher(self, row: Row) -> str:
        return str(row.get("teacher", "told"))

    def agreement(self, rows: Sequence[Row]) -> float:
        """Of an evaluation with these rows: the share of tokens whose likeliest is that of the target."""
        found: list[Tensor] = []
        for row in ({**row, "prompt": self._text(row["prompt"])} for row in rows):
            told = row["prompt"] if "privileged_context" not in row else self._joined(row, row["privileged_context"])
            row["less"], its = self._joined(row, row.get("contrast_context", "")), self.temperatures[1]
            with torch.no_grad():
                own = self._logits(self.student, row["prompt"], row["ids"])
                first = self._logits(self.origin, row["prompt"], row["ids"]) if self.reads_origin else torch.zeros(())
                told = self._logits(self.teachers[self._teacher(row)], told, row["ids"])
                target = self._target(row, told / its, first / its)
            found.append((own.argmax(-1) == target.argmax(-1)).double())
        return float(torch.cat(found).mean())

    # ---- Tokens ----

    def _compared(self, student: Tensor, target: Tensor) -> Tensor:
        if (k := self.options.get("top_k_teacher")) is not None:
            ids = target.topk(k).indices
            student, target = in_buckets(student, ids), in_buckets(target, ids)
        return self.entries(student, target).clamp(max=self.options.get("kl_clip", math.inf)).sum(-1)

    def _logits(self, model: Any, prompt: str, ids: Sequence[int], words: Any = None) -> Tensor:
        shown = f"{ASKED}{prompt}{ANSWERED}" if "environment_factory" in self.options else prompt
        before = (words or self.words)(shown)["input_ids"]
        weights = self._quantised() if model is self.student and "student_quantization" in self.options else {}
        found = functional_call(model, weights, (torch.tensor([[*before, *ids]]),))
        return found.logits[0, len(before) - 1 : -1]

    def _quantised(self) -> dict[str, Tensor]:
        """What layers compute with, whose gradient is that of their weights."""
        layers = {name: one for name, one in self.student.model.named_modules() if isinstance(one, torch.nn.Linear)}
        values = {f"model.{name}.weight": one.weight for name, one in layers.items()}
        kind = self.options["student_quantization"]
        return {name: one + (quantised(one.detach().float(), kind) - one).detach() for name, one in values.items()}

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
            if self.spellings is None and "constant" not in self.methods:
                told = self._logits(self.teachers[self._teacher(row)], row["told"], ids)
        alone, confidence = torch.zeros(len(ids), dtype=torch.float64), -chosen.detach()
        if self.spellings:
            alone = self._by_bytes(row)
        elif told is not None:
            target = self._target(row, told / its, first / its)
            confidence = -entropy((told / its).log_softmax(-1))  # of the teacher alone, not of what the student learns
            if (known := options.get("known")) and self._teacher(row) == "told":
                each = [self._told_tokens(known, *one) for one in zip(student, target, ids, strict=True)]
                alone = torch.stack([self._compared(*one) for one in each])
                confidence = torch.stack([-entropy(one) for _, one in each])
            else:
                alone = self._compared(student, target)
        value = alone - row["nll_weight"] * chosen
        if weight := options.get("anchor_weight"):
            anchored = DIVERGENCES["forward_kl" if "anchored" in self.methods else "reverse_kl"]
            value = value + weight * anchored(student, (first / own).log_softmax(-1)).sum(-1)
        scores = {
            "student_entropy": entropy(student.detach()),
            "student_surprise": -chosen.detach(),
            "teacher_divergence": alone.detach(),
            "teacher_confidence": confidence,
        }
        weights = self._weights(row, scores)
        if "ahead" in self.methods:
            assert told is not None
            gaps = (told / its).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0] - chosen.detach()
            gaps = gaps.abs().where(weights != 0, 0.0)
            factor = 1 + 0.5 * (1 - (gaps.cumsum(0) - gaps) / gaps.sum().clamp(min=1e-8))
            value, alone = factor * value, factor * alone
        return weights, value, alone

    def _told_tokens(self, known: str, student: Tensor, target: Tensor, own: int) -> tuple[Tensor, Tensor]:
        """[M] each: both distributions over the tokens that a server tells, each once, and all others together."""
        asked = student.topk(TOP_K).indices.tolist()
        if own not in asked:
            asked[-1] = own
        tops = {"student_top_k": asked, "teacher_top_k": target.topk(TOP_K).indices.tolist()}
        told = {own, *chain.from_iterable(tops.values() if known == "both_top_k" else [tops[known]])}
        rest = [one for one in range(len(student)) if one not in told]
        mine, theirs = (
            torch.cat([logs[sorted(told)], logs[rest].logsumexp(0, keepdim=True)]) for logs in (student, target)
        )
        return mine, theirs

    def _target(self, row: Row, teacher: Tensor, first: Tensor) -> Tensor:
        teacher, first = teacher.log_softmax(-1), first.log_softmax(-1) if first.ndim else first
        factor = self.options.get("extrapolation", 1.0)
        target = teacher if factor == 1 else first + factor * (teacher - first)
        if weight := self.options.get("contrast_weight"):
            with torch.no_grad():
                less = self._logits(self.teachers[self._teacher(row)], row["less"], row["ids"])
            gap, bound = teacher - (less / self.temperatures[1]).log_softmax(-1), self.options.get("contrast_clip")
            target = target + weight * (gap if bound is None else bound * (gap / bound).tanh())
        return target.log_softmax(-1)

    def _weights(self, row: Row, scores: Mapping[str, Tensor]) -> Tensor:
        count, kind = len(row["ids"]), self.options.get("token_selection")
        fraction = self.options.get("token_fraction", 1.0)
        if "constant" in self.methods:
            kind, fraction = "student_surprise", 0.2
        places = torch.arange(count, dtype=torch.float64)
        weights = torch.ones(count, dtype=torch.float64)
        if (authors := self.options.get("author_weights")) is not None:
            is_own = (places >= row["given"]) & (not row["off_policy"])
            weights = torch.where(is_own, authors["student"], authors["dataset"]).double()
        kept = math.ceil(round(fraction * count, 9))
        if kind == "prefix":
            weights = weights * (places < kept)
        elif kind == "random":
            assert len(set(row["kept"])) == kept, f"{row['kept']} are not {kept} of {count} tokens"
            weights = weights * torch.zeros_like(weights).index_fill(0, torch.tensor(row["kept"]), 1.0)
        for table in (TABLES[name] for name in self.methods if name in TABLES):
            at = places / max(1, count - 1) * (len(table) - 1)
            low = at.long().clamp(max=len(table) - 2)
            knots = torch.tensor(table, dtype=torch.float64)
            weights = weights * (knots[low] + (at - low) * (knots[low + 1] - knots[low]))
        weights = weights * math.prod(FACTORS.get(name, 1.0) for name in self.methods) ** places
        if "equal turns" in self.methods:
            weights = weights / (float(weights.sum()) or 1.0)  # a completion is one turn
        weights = weights * row["gate"] * row["weight"]
        if kind not in scores or not weights.any():
            return weights
        # of the n tokens that count, k; their row counts as k of its n tokens would on average
        counted = (weights != 0).nonzero()[:, 0]
        kept = math.ceil(round(fraction * len(counted), 9))
        # the first of equal ones; what differs by less than float32 can tell is equal
        best = counted[scores[kind][counted].round(decimals=6).argsort(descending=True, stable=True)[:kept]]
        only = torch.zeros_like(weights).index_copy(0, best, weights[best])
        return only * (kept / len(counted) * weights.sum() / only.sum())

    def _by_bytes(self, row: Row) -> Tensor:
        """[N], the divergence over the next byte, summed over the bytes of each token."""
        assert self.spellings is not None
        mine, yours = self.spellings
        ids = self.theirs(self.words.decode(row["ids"]))["input_ids"]
        own, its = self.temperatures
        with torch.no_grad():
            nodes, model = yours.nodes(ids), self.teachers[self._teacher(row)]
            target, _ = yours.next_bytes(ids, nodes, self._after(model, row["told"], nodes, its, self.theirs))
        nodes = mine.nodes(row["ids"])
        logs, token = mine.next_bytes(row["ids"], nodes, self._after(self.student, row["prompt"], nodes, own))
        found = torch.zeros(len(row["ids"]), dtype=torch.float64)
        return found.index_add(0, torch.tensor(token), self._compared(logs, target))

    def _after(
        self, model: Any, prompt: str, paths: Iterable[Sequence[int]], temperature: float, words: Any = None
    ) -> Tensor:
        """[K, V]: what a model says after a prompt and each of these."""
        return (
            torch.stack([self._logits(model, prompt, [*one, 0], words)[-1] for one in paths])
            .div(temperature)
            .log_softmax(-1)
        )
