"""Several completions of a prompt stay with it: in one process and in two, however rows are read, dealt and learned.

Every completion carries the number of its prompt.
"""

from __future__ import annotations

import faulthandler
import json
from collections import Counter, defaultdict
from dataclasses import astuple
from itertools import chain
from pathlib import Path

import pandas
import pytest
import torch
from accelerate.utils import gather_object
from controls import Shuffled
from datasets import Dataset
from groups import GroupSpread
from support import forks, fsdp_on_cpu, tiny
from transformers import PrinterCallback
from visits import Visits

from trl_opsd import OPSDTrainer, RolloutBackend

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(forks.SECONDS + 60)]

PROMPTS = 10
ROWS = 8
"""Rows of an optimizer step, over all processes: completions, as in TRL's GRPO."""
STEPS = 3
LIMIT = 290
"""Seconds after which processes that wait for each other are ended."""
WORDS = tiny.tokenizer()


def make_rows(kind="map"):
    """Ten numbered prompts: "map", or a "stream" of two shards."""
    rows = Dataset.from_list(
        [{"prompt": f"{'so ' * (number % 3)}{number}=", "completion": f"{number}.given"} for number in range(PROMPTS)]
    )
    return rows if kind == "map" else rows.to_iterable_dataset(num_shards=2)


def number_of(text):
    """The number in a prompt or in a completion."""
    return text.removeprefix("so so ").removeprefix("so ").partition("=")[0].partition(".")[0]


def answer(number, which=0):
    """The tokens of a completion of a prompt, of unequal lengths."""
    return WORDS(f"{number}.{which}{'x' * (1 + (number * 3 + which * 5) % 9)}<|im_end|>")["input_ids"]


class Numbered(RolloutBackend):
    """Writes the number of the prompt and which of its completions it is; `apart` from the trainer, where rows end in
    another order.
    """

    def __init__(self, apart):
        self.generates_out_of_process = apart

    def bind(self, trainer):
        self._trainer = trainer

    def complete(self, prompt_ids, step):
        mine = WORDS.batch_decode(prompt_ids)
        everyone = gather_object([mine])
        count = Counter(text for theirs in everyone[: self._trainer.accelerator.process_index] for text in theirs)
        written = []
        for text in mine:
            written.append(answer(int(number_of(text)), count[text]))
            count[text] += 1
        return written

    def stream(self, prompt_ids, step):
        return reversed(list(enumerate(self.complete(prompt_ids, step))))


def worth(completions, prompts, **_):
    """A reward that follows from a completion alone; none for one of the dataset, which must not be asked for."""
    for prompt, text in zip(prompts, completions, strict=True):
        assert number_of(prompt) == number_of(text), (prompt, text)
        assert not text.endswith("given"), text
    return [value_of(text) for text in completions]


async def second(completions, **_):
    """Another, that does not apply to all, of a function that waits."""
    return [None if int(number_of(text)) % 2 else 1.0 + len(text) for text in completions]


def value_of(text):
    """The reward of a completion."""
    return float(len(text) * 7 % 5 + int(number_of(text)))


class ByLastVisit(Visits):
    def weight(self, row, last):
        if last is None or last.skipped:
            return 1.0
        number = int(number_of(row["prompt"]))
        return 0.0 if number in (0, 1, 2, 5, 7) else last.gap + sum(filter(None, last.rewards))


class Pairing(OPSDTrainer):
    """Records the prompts that this process reads in each generation batch, which completion is with which where the
    teacher reads it, and the divergence of each where it is learned, with how much it pulls.
    """

    def training_step(self, model, inputs, num_items_in_batch=None):
        if inputs:  # those of a step come in its last call
            self.read.append([row["prompt"] for row in inputs])
        return super().training_step(model, inputs, num_items_in_batch)

    def prediction_step(self, model, inputs, *more, **options):
        self.read.append([row["prompt"] for row in inputs])
        return super().prediction_step(model, inputs, *more, **options)

    def teach(self, rollout, rows):
        texts = WORDS.batch_decode(rollout.completion_lists(), skip_special_tokens=True)
        self.taught.append([(row["prompt"], text) for row, text in zip(rows, texts, strict=True)])
        self.controls += [(row["prompt"], other and other.value) for row in rows for other in [row.notes.get("other")]]
        return super().teach(rollout, rows)

    def weigh(self, rollout, rows, targets):
        lengths = rollout.completion_mask.sum(1).float()[[not row.is_padding for row in rows]]
        if len(lengths):
            self.record("mine/length", lengths.mean(), len(lengths))
        if self.accelerator.is_last_process:
            self.record("mine/last", 1.0)
        return super().weigh(rollout, rows, targets)

    def compare(self, student, rollout, targets, num_items):
        parts = super().compare(student, rollout, targets, num_items)
        texts = WORDS.batch_decode(rollout.completion_lists(), skip_special_tokens=True)
        for row, (text, sums) in enumerate(zip(texts, parts.rows.tolist(), strict=True)):
            if sums[0]:  # else its completion may be cut
                self.learned.append((self.state.global_step, text, sums[1] / sums[0], sums[4]))
                if rollout.nll_weight is not None:
                    self.nll.append((self.state.global_step, text, float(rollout.nll_weight[row])))
        return parts


def build(folder, processes, kind="map", rows=None, evaluated=None, apart=False, rewarded=False, methods=(), **options):
    models, teachers = [str(folder / name) for name in ("teacher", "student")], options.pop("teachers", None)
    if teachers is not None:
        rows = evaluated = make_rows().add_column("teacher", [teachers[number % 3 > 0] for number in range(PROMPTS)])
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
    args = tiny.config(folder / "out", **given)
    fsdp_on_cpu.allow()
    trainer = Pairing(
        model=str(folder / "student"),
        teacher_model=models[0] if teachers is None else dict(zip(teachers, models, strict=True)),
        args=args,
        train_dataset=make_rows(kind) if rows is None else rows,
        eval_dataset=make_rows(kind) if evaluated is None else evaluated,
        processing_class=tiny.tokenizer(),
        rollout=Numbered(apart),
        methods=[GroupSpread(), *(method() for method in methods), *rewards],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.read, trainer.taught, trainer.learned, trainer.nll, trainer.controls = [], [], [], [], []
    return trainer


def flat(lists):
    return [*chain.from_iterable(lists)]


def found(trainer, logs):
    """What all processes have read, paired, learned and logged."""
    visits = trainer.methods.get(Visits)
    return {
        "read": [flat(parts) for parts in zip(*gather_object([trainer.read]), strict=True)],
        "taught": gather_object(flat(trainer.taught)),
        **{name: gather_object(getattr(trainer, name)) for name in ("learned", "nll", "controls")},
        "logs": logs,
        "weights": [float(one.detach().double().sum()) for one in trainer.model.parameters()],
        "visits": [] if visits is None else sorted(map(astuple, visits.last.values()), key=str),
    }


def trained(folder, processes, resume=None, **options):
    trainer = build(folder, processes, **options)
    trainer.train(resume_from_checkpoint=None if resume is None else str(folder / "out" / f"checkpoint-{resume}"))
    return found(trainer, [row for row in trainer.state.log_history if "learning_rate" in row])


def evaluated(folder, processes, **options):
    trainer = build(folder, processes, **options)
    logs = [trainer.evaluate()]
    predictions = trainer.predict(make_rows(options.get("kind", "map"))).predictions
    texts = WORDS.batch_decode([[one for one in row if one >= 0] for row in predictions], skip_special_tokens=True)
    saved = Path(trainer.args.output_dir) / "completions" / "test_00000.parquet"
    results = {**found(trainer, logs), "predicted": texts, "saved": None}
    if trainer.log_completions and trainer.is_world_process_zero():  # which has written it
        results["saved"] = json.loads(pandas.read_parquet(saved).to_json(orient="split"))
    return results


BUDGET = {"num_generations": 8, "max_tokens_per_microbatch": 60, "rewarded": True}
"""A group in two processes, and rows dealt by their tokens."""
AHEAD = {"apart": True, "overlap": "ahead", "overlap_max_divergence": 1e9}
PLAIN = {
    "map": {"save_strategy": "steps", "save_steps": 1},
    "resumed": {"resume": 2},
    "stream": {"kind": "stream"},
    "overlap": {"apart": True, "overlap": "step", "rewarded": True},
    "ahead": AHEAD,
    "budget": BUDGET,
}
PULLED = {
    "rewards": {"rewarded": True, "reward_weight": 0.5},
    "rewards, budget": {
        **BUDGET, "reward_weight": 0.5, "scale_rewards": "none", "reward_weights": [2.0, -1.0],
    },
    "rewards, some off policy": {
        "rewarded": True, "reward_weight": 0.5, "lmbda": 0.7, "sft_weight": 3.0, "num_generations": 8,
    },
    "rewards, ahead": {**AHEAD, "rewarded": True, "reward_weight": 0.5},
}  # fmt: skip
SKIPPING = {
    "skipped": {"rewarded": True, "max_steps": 9},
    "skipped, a group in two processes": {"rewarded": True, "num_generations": 8, "lmbda": 0.7, "max_steps": 16},
    "skipped, one completion": {"num_generations": 1, "max_steps": 5, "max_tokens_per_microbatch": 60},
}
OFF_POLICY = {"num_generations": 1, "lmbda": 0.5}
OFF_POLICY_RUNS = {"off policy": OFF_POLICY, "by the teacher": {**OFF_POLICY, "seq_kd": True, "top_k": 1}}
TRAININGS = {
    **PLAIN,
    **PULLED,
    **{name: {"methods": [ByLastVisit], **given} for name, given in SKIPPING.items()},
    "two teachers": {"teachers": ("first", "second"), "num_generations": 2, "loss_aggregation": "teachers"},
    "shuffled": {"methods": [Shuffled], "shuffle_dataset": False},
    "gated": {
        "rewarded": True, "reward_weight": 0.5, "reward_gate": 15.0, "num_generations": 8,
        "teacher_context": "group_success", "success_threshold": 14.0,
    },
    **OFF_POLICY_RUNS,
}  # fmt: skip
EVALUATIONS = {
    "map": {"num_generations_eval": 2},
    "stream, as in training": {"kind": "stream"},
    "rewards": {"num_generations_eval": 1, "rewarded": True, "log_completions": True},
    "rewards of a stream": {"num_generations_eval": 1, "rewarded": True, "kind": "stream", "log_completions": True},
}


def all_of(folder, processes):
    """Every training and evaluation; a process that does not finish prints its stack and ends."""
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    found = {name: trained(folder, processes, **given) for name, given in TRAININGS.items()}
    found["eval"] = {name: evaluated(folder, processes, **given) for name, given in EVALUATIONS.items()}
    faulthandler.cancel_dump_traceback_later()
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("several")
    tiny.save_pair(folder)
    return folder


@pytest.fixture(scope="module")
def results(models):
    """What one process has found, and what two have."""
    return {2: forks.results("ddp", all_of, models, 2)[0], 1: all_of(models, 1)}


each_processes = pytest.mark.parametrize("processes", [1, 2])
OF_A_PROCESS = (
    *("time/", "tokens_per_second", "step_time", "overlap/", "runtime", "samples_per", "steps_per", "model_prep"),
    "agreement/top",
)
"""What is measured where it happens: seconds, and the agreement of one token in 16."""


OTHER_BATCHES = ("overlap", "budget", "off policy", "skipped")
"""Runs with micro-batches of unequal tokens, over which TRL's means are other ones."""


def close(one, other):
    return one is other is None or one == pytest.approx(other, rel=1e-4, abs=1e-6)


def check_logs(name, one, two):
    """Whatever is logged is of all processes, also what a user records, and what only one of them knows."""
    for logs in zip(one, two, strict=True):
        mine, yours = ({key.removeprefix("eval_"): value for key, value in of.items()} for of in logs)
        names = {key for key in mine.keys() | yours.keys() if not key.startswith(OF_A_PROCESS)}
        if any(part in name for part in OTHER_BATCHES):
            names -= {"mine/length", "entropy"}
        assert {key: (mine.get(key), yours.get(key)) for key in names if not close(mine.get(key), yours.get(key))} == {}
        assert "skipped" in name or "mine/last" in names


@pytest.mark.parametrize("name", TRAININGS)
def test_two_processes_learn_what_one_learns(results, name):
    one, two = (results[processes][name] for processes in (1, 2))
    assert one["read"] == two["read"]
    assert close(one["weights"], two["weights"])
    for part in ("taught", "controls"):
        assert sorted(one[part], key=str) == sorted(two[part], key=str)
    for part in ("learned", "nll"):
        for row, other in zip(sorted(one[part]), sorted(two[part]), strict=True):
            assert row[:2] == other[:2]
            assert close(row[2:], other[2:])
    for visit, other in zip(one["visits"], two["visits"], strict=True):
        assert visit[1:] == other[1:]
        assert close(visit[0], other[0])
    check_logs(name, one["logs"], two["logs"])


@each_processes
@pytest.mark.parametrize("name", PLAIN)
def test_each_prompt_gets_num_generations_completions_within_one_step(results, name, processes):
    found, number = results[processes][name], PLAIN[name].get("num_generations", 4)
    for batch in found["read"]:
        assert len(batch) == ROWS
        assert batch == [batch[place] for place in range(0, ROWS, number) for _ in range(number)], "next to each other"
        assert len(set(batch)) == ROWS // number
    if name != "ahead":  # which reads a step twice
        prompts = [prompt for batch in found["read"] for prompt in batch[::number]]
        assert len(prompts) == len(set(prompts)) == len(found["logs"][-len(found["read"]) :]) * ROWS // number
    assert all(number_of(prompt) == number_of(text) for prompt, text in found["taught"])
    learned = defaultdict(list)
    for step, text, *_ in found["learned"]:
        learned[step, number_of(text)].append(text.rstrip("x").partition(".")[2])
    assert {tuple(sorted(which)) for which in learned.values()} == {tuple(map(str, range(number)))}


@pytest.mark.parametrize("name", PLAIN)
def test_group_std_is_that_of_completions_of_each_prompt(results, name):
    """Recomputed from the divergence of each completion, by the number that it carries."""
    found, by_step = results[1][name], defaultdict(lambda: defaultdict(list))
    for step, text, divergence, tokens in found["learned"]:
        by_step[step][number_of(text)].append((divergence, tokens))
    logs = {row["step"]: row for row in found["logs"]}
    for step, groups in by_step.items():
        deviations = torch.stack([torch.tensor(rows).std(0) for rows in groups.values()]).mean(0)
        row = logs[step + 1]
        assert [row["group/divergence_std"], row["group/length_std"]] == pytest.approx(deviations.tolist(), rel=1e-3)
        assert deviations.min() > 0


@each_processes
@pytest.mark.parametrize("name", ["resumed", "overlap"])
def test_resumed_and_overlapped_runs_learn_the_same(results, name, processes):
    plain, other = (results[processes][key] for key in ("map", name))
    assert plain["read"][-len(other["read"]) :] == other["read"]
    assert close(plain["weights"], other["weights"])


@each_processes
@pytest.mark.parametrize("name", EVALUATIONS)
def test_evaluation_counts_each_completion_once(results, name, processes):
    found, alone, given = results[processes]["eval"][name], results[1]["eval"][name], EVALUATIONS[name]
    number = given.get("num_generations_eval", 4)
    (logs,) = found["logs"]
    written = [number_of(text) for text in found["predicted"]]
    assert written == [str(prompt) for prompt in range(PROMPTS) for _ in range(number)], "in the order of the rows"
    assert all(number_of(prompt) == number_of(text) for prompt, text in found["taught"])
    values = torch.tensor([row[2:] for row in alone["learned"][: PROMPTS * number]])  # then comes the prediction
    assert logs["eval_divergence/mean"] == pytest.approx(
        float((values[:, 0] * values[:, 1]).sum() / values[:, 1].sum()), rel=1e-5
    )
    assert logs["eval_loss"] == pytest.approx(alone["logs"][0]["eval_loss"], rel=1e-5)
    check_logs(name, alone["logs"], found["logs"])


@each_processes
@pytest.mark.parametrize("name", ["rewards", "rewards of a stream"])
def test_evaluation_rewards_each_row_once(results, name, processes):
    """Ten rows in batches of six: the last batch of two processes is filled up with rows that were seen."""
    found = results[processes]["eval"][name]
    values = torch.tensor([value_of(text) for text in found["predicted"]])
    assert len(values) == PROMPTS
    (logs,) = found["logs"]
    assert logs["eval_rewards/worth/mean"] == pytest.approx(float(values.mean()))
    assert logs["eval_rewards/worth/std"] == pytest.approx(float(values.std()))
    table = found["saved"]
    assert table["columns"] == ["step", "prompt", "completion", "worth", "second"]
    assert [line[2] for line in table["data"]] == found["predicted"], "each row once, in its order"
    assert [line[3] for line in table["data"]] == pytest.approx(values.tolist())
    others = [None if number % 2 else 1.0 + len(text) for number, text in enumerate(found["predicted"])]
    assert [line[4] for line in table["data"]] == others
    asked = [prompt.partition("=")[0] for _, prompt, *_ in table["data"]]
    assert [text.partition(".")[0] for text in found["predicted"]] == [prompt.split()[-1] for prompt in asked]


def test_runs_gate_shuffle_skip_mix_and_log_rewards(results):
    """Else two processes that do nothing of it would be the same as one."""
    one = results[1]
    for name in OFF_POLICY_RUNS:
        assert 0 < sum(map(tiny.share_of_others, one[name]["logs"])) < len(one[name]["logs"])
    assert 0 < sum(row["gate/mean"] for row in one["gated"]["logs"]) < len(one["gated"]["logs"])
    assert len(one["shuffled"]["controls"]) == STEPS * ROWS
    assert all(read not in (None, own) for own, read in one["shuffled"]["controls"])
    for name in SKIPPING:
        shares = {row["prompts/skipped"] for row in one[name]["logs"]}
        assert len(shares) > 1
        assert 1 in shares or name != "skipped, a group in two processes"
    for name in ("overlap", "budget"):
        assert all({"reward", "reward_std", "rewards/worth/mean"} <= row.keys() for row in one[name]["logs"])
        assert one[name]["nll"] == []
