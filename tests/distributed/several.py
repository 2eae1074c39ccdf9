"""Trains and evaluates with several completions of each prompt; every completion carries the number of its prompt."""

from __future__ import annotations

import faulthandler
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import astuple
from itertools import chain
from pathlib import Path
from typing import Any

import pandas
from accelerate.utils import gather_object
from controls import Shuffled
from datasets import Dataset, IterableDataset
from groups import GroupSpread
from support import fsdp_on_cpu, tiny
from transformers import PrinterCallback
from visits import Visit, Visits

from trl_opsd import Method, OPSDTrainer, RolloutBackend

PROMPTS = 10
ROWS = 8
"""Rows of an optimizer step, over all processes: completions, as in TRL's GRPO."""
STEPS = 3
LIMIT = 290
"""Seconds after which processes that wait for each other are ended."""
WORDS = tiny.tokenizer()


def make_rows(kind: str = "map") -> Dataset | IterableDataset:
    """Ten numbered prompts: "map", or a "stream" of two shards."""
    rows = Dataset.from_list(
        [{"prompt": f"{'so ' * (number % 3)}{number}=", "completion": f"{number}.given"} for number in range(PROMPTS)]
    )
    return rows if kind == "map" else rows.to_iterable_dataset(num_shards=2)


def number_of(text: str) -> str:
    """The number in a prompt or in a completion."""
    return text.removeprefix("so so ").removeprefix("so ").partition("=")[0].partition(".")[0]


class Numbered(RolloutBackend):
    """Writes the number of the prompt and which of its completions it is, as one that writes apart would.

    Args:
        apart (`bool`):
            Whether it writes apart from the trainer, where rows end in another order.
    """

    def __init__(self, apart: bool) -> None:
        self.generates_out_of_process = apart

    def bind(self, trainer: OPSDTrainer) -> None:
        self._trainer = trainer

    def complete(self, prompt_ids: list[list[int]], step: int) -> list[list[int]]:
        mine = WORDS.batch_decode(prompt_ids)
        everyone = gather_object([mine])
        count = Counter(text for theirs in everyone[: self._trainer.accelerator.process_index] for text in theirs)
        written = []
        for text in mine:
            number, which = int(number_of(text)), count[text]
            count[text] += 1
            written.append(f"{number}.{which}{'x' * (1 + (number * 3 + which * 5) % 9)}<|im_end|>")
        return WORDS(written)["input_ids"]

    def stream(self, prompt_ids: list[list[int]], step: int) -> Iterator[tuple[int, list[int]]]:
        written = self.complete(prompt_ids, step)
        return reversed(list(enumerate(written)))


def worth(completions: list[str], prompts: list[str], **_: Any) -> list[float | None]:
    """A reward that follows from a completion alone; none for one of the dataset, which must not be asked for."""
    for prompt, text in zip(prompts, completions, strict=True):
        assert number_of(prompt) == number_of(text), (prompt, text)
        assert not text.endswith("given"), text
    return [value_of(text) for text in completions]


async def second(completions: list[str], **_: Any) -> list[float | None]:
    """Another, that does not apply to all, of a function that waits."""
    return [None if int(number_of(text)) % 2 else 1.0 + len(text) for text in completions]


def value_of(text: str) -> float:
    """The reward of a completion."""
    return float(len(text) * 7 % 5 + int(number_of(text)))


class ByLastVisit(Visits):
    """Skips some of the prompts at their second visit, and weighs others by what is known of the first."""

    def weight(self, row: Any, last: Visit | None) -> float:
        if last is None or last.skipped:
            return 1.0
        number = int(number_of(row["prompt"]))
        return 0.0 if number in (0, 1, 2, 5, 7) else last.gap + sum(filter(None, last.rewards))


class Pairing(OPSDTrainer):
    """Records which completion is with which row where the teacher reads it, and the divergence of each where it is
    learned, with how much it pulls.
    """

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        if inputs:  # those of a step come in its last call
            self.read.append([row["prompt"] for row in inputs])
        return super().training_step(model, inputs, num_items_in_batch)

    def prediction_step(self, model: Any, inputs: Any, *more: Any, **options: Any) -> Any:
        self.read.append([row["prompt"] for row in inputs])
        return super().prediction_step(model, inputs, *more, **options)

    def teach(self, rollout: Any, rows: list[dict[str, Any]]) -> Any:
        texts = WORDS.batch_decode(rollout.completion_lists(), skip_special_tokens=True)
        self.taught += [(row["prompt"], text) for row, text in zip(rows, texts, strict=True)]
        self.controls += [(row["prompt"], other and other.value) for row in rows for other in [row.notes.get("other")]]
        return super().teach(rollout, rows)

    def weigh(self, rollout: Any, rows: list[dict[str, Any]], targets: Any) -> Any:
        lengths = rollout.completion_mask.sum(1).float()[[not row.is_padding for row in rows]]
        if len(lengths):
            self.record("mine/length", lengths.mean(), len(lengths))
        if self.accelerator.is_last_process:
            self.record("mine/last", 1.0)
        return super().weigh(rollout, rows, targets)

    def compare(self, student: Any, rollout: Any, targets: Any, num_items: Any) -> Any:
        parts = super().compare(student, rollout, targets, num_items)
        texts = WORDS.batch_decode(rollout.completion_lists(), skip_special_tokens=True)
        for text, sums in zip(texts, parts.rows.tolist(), strict=True):
            if sums[0]:
                self.learned.append((self.model.training, self.state.global_step, text, sums[1] / sums[0], sums[4]))
        if rollout.nll_weight is not None:
            self.nll += [(self.state.global_step, *one) for one in zip(texts, rollout.nll_weight.tolist(), strict=True)]
        return parts


def build(
    folder: Path,
    kind: str = "map",
    rows: Any = None,
    apart: bool = False,
    rewarded: bool = False,
    methods: Iterable[type[Method]] = (),
    **options: Any,
) -> Pairing:
    processes = int(options.pop("processes"))
    given = {
        "per_device_train_batch_size": ROWS // processes // 2,
        "gradient_accumulation_steps": 2,
        "per_device_eval_batch_size": 6 // processes,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "num_generations": 4,
        **options,
    }
    rewards = tiny.rewards({"reward_funcs": [worth, second], **given}) if rewarded else []
    given = {name: value for name, value in given.items() if name not in tiny.REWARDS}
    fsdp_on_cpu.allow()
    trainer = Pairing(
        model=str(folder / "student"),
        teacher_model=str(folder / "teacher"),
        args=tiny.config(folder / "out", **given),
        train_dataset=make_rows(kind) if rows is None else rows,
        eval_dataset=make_rows(kind),
        processing_class=tiny.tokenizer(),
        rollout=Numbered(apart),
        methods=[GroupSpread(), *(method() for method in methods), *rewards],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.read, trainer.taught, trainer.learned, trainer.nll, trainer.controls = [], [], [], [], []
    return trainer


def weights(trainer: Pairing) -> list[float]:
    """One number for each weight of the student, which differs if the weight does."""
    return [float(one.detach().double().sum()) for one in trainer.model.parameters()]


def found(trainer: Pairing, logs: list[dict[str, Any]]) -> dict[str, Any]:
    """What all processes have read, paired, learned and logged."""
    read = [list(chain.from_iterable(parts)) for parts in zip(*gather_object([trainer.read]), strict=True)]
    return {
        "read": read,
        "taught": gather_object(trainer.taught),
        "learned": gather_object(trainer.learned),
        "nll": gather_object(trainer.nll),
        "controls": sorted(gather_object(trainer.controls), key=str),
        "logs": logs,
        "weights": weights(trainer),
        "visits": None
        if (visits := trainer.methods.get(Visits)) is None
        else sorted(map(astuple, visits.last.values()), key=str),
    }


def trained(folder: Path, resume: int | None = None, **options: Any) -> dict[str, Any]:
    trainer = build(folder, **options)
    trainer.train(resume_from_checkpoint=None if resume is None else str(folder / "out" / f"checkpoint-{resume}"))
    return found(trainer, [row for row in trainer.state.log_history if "learning_rate" in row])


def evaluated(folder: Path, **options: Any) -> dict[str, Any]:
    trainer = build(folder, **options)
    logs = [trainer.evaluate()]
    predictions = trainer.predict(make_rows(options.get("kind", "map"))).predictions
    texts = WORDS.batch_decode([[one for one in row if one >= 0] for row in predictions], skip_special_tokens=True)
    saved = Path(trainer.args.output_dir) / "completions" / "test_00000.parquet"
    results = {**found(trainer, logs), "predicted": texts, "saved": None}
    if trainer.log_completions and trainer.is_world_process_zero():  # which has written it
        results["saved"] = json.loads(pandas.read_parquet(saved).to_json(orient="split"))
    return results


SAVES = {"save_strategy": "steps", "save_steps": 1}
TRAININGS: dict[str, dict[str, Any]] = {
    "map": SAVES,
    "resumed": {"resume": 2},
    "stream": {"kind": "stream"},
    "overlap": {"apart": True, "overlap": "step", "rewarded": True},
    "ahead": {"apart": True, "overlap": "ahead", "overlap_max_divergence": 1e9},
    "a group in two processes, and a budget": {
        "num_generations": 8,
        "max_tokens_per_microbatch": 60,
        "rewarded": True,
    },
}
REWARDED: dict[str, dict[str, Any]] = {
    "groups": {"reward_weight": 0.5},
    "a group in two processes, and a budget": {
        "reward_weight": 0.5,
        "num_generations": 8,
        "max_tokens_per_microbatch": 60,
        "scale_rewards": "none",
        "reward_weights": [2.0, -1.0],
    },
    "some off policy": {"reward_weight": 0.5, "lmbda": 0.7, "sft_weight": 3.0, "num_generations": 8},
    "ahead": {"reward_weight": 0.5, "apart": True, "overlap": "ahead", "overlap_max_divergence": 1e9},
}
GATED: dict[str, Any] = {
    "rewarded": True,
    "reward_weight": 0.5,
    "reward_gate": 15.0,
    "teacher_context": "group_success",
    "success_threshold": 14.0,
    "num_generations": 8,
}
WEIGHED: dict[str, dict[str, Any]] = {
    "a group in each": {"rewarded": True, "max_steps": 9},
    "a group in two processes": {"rewarded": True, "num_generations": 8, "lmbda": 0.7, "max_steps": 16},
    "one completion": {"num_generations": 1, "max_steps": 5, "max_tokens_per_microbatch": 60},
}
TWICE = Dataset.from_list([{"prompt": f"{number // 2}="} for number in range(2 * PROMPTS)])
"""Each prompt in two rows, one after the other."""
SHUFFLED: dict[str, dict[str, Any]] = {
    f"{number} of each": {"methods": [Shuffled], "num_generations": number, "rows": TWICE} for number in (1, 2)
}
SHUFFLED["4 of each"] = {"methods": [Shuffled]}
OFF_POLICY: dict[str, Any] = {"num_generations": 1, "lmbda": 0.5}
BY_TEACHER: dict[str, Any] = {**OFF_POLICY, "seq_kd": True, "top_k": 1}
EVALUATIONS: dict[str, dict[str, Any]] = {
    "map": {"num_generations_eval": 2},
    "stream, as in training": {"kind": "stream"},
    "rewards": {"num_generations_eval": 1, "rewarded": True, "log_completions": True},
    "rewards of a stream": {"num_generations_eval": 1, "rewarded": True, "kind": "stream", "log_completions": True},
}


def all_of(folder: Path, processes: int) -> dict[str, Any]:
    """Every training and evaluation; a process that does not finish prints its stack and ends."""
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    found = {
        "train": {name: trained(folder, processes=processes, **given) for name, given in TRAININGS.items()},
        "rewarded": {
            name: trained(folder, processes=processes, rewarded=True, **given) for name, given in REWARDED.items()
        },
        "gated": trained(folder, processes=processes, **GATED),
        "weighed": {
            name: trained(folder, processes=processes, methods=[ByLastVisit], **given)
            for name, given in WEIGHED.items()
        },
        "shuffled": {
            name: trained(folder, processes=processes, shuffle_dataset=False, **given)
            for name, given in SHUFFLED.items()
        },
        "off policy": trained(folder, processes=processes, **OFF_POLICY),
        "by the teacher": trained(folder, processes=processes, **BY_TEACHER),
        "eval": {name: evaluated(folder, processes=processes, **given) for name, given in EVALUATIONS.items()},
    }
    faulthandler.cancel_dump_traceback_later()
    return found
