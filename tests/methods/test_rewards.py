"""Rewards are TRL's: the same functions are called with the same arguments, and give the same advantages."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import random
import textwrap
from collections import defaultdict

import numpy as np
import pytest
import torch
from datasets import Dataset
from support import tiny
from support.rollouts import Numbered
from transformers import AutoModelForSequenceClassification, EarlyStoppingCallback, Qwen2Config
from trl import GRPOTrainer
from trl.trainer.utils import nanstd
from visits import SkipNear

from trl_opsd import HFRollout, OPSDTrainer
from trl_opsd.methods.rewards import advantages

WORDS = tiny.tokenizer()
PROMPTS = [f"{'so ' * (number % 3)}{number}=" for number in range(8)]


def rows(number: int = 8, kind: str = "text") -> Dataset:
    """Prompts with their number, as text or as messages."""
    prompts = PROMPTS[:number]
    if kind == "messages":
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return Dataset.from_dict({"prompt": prompts, "answer": list(range(number))})


def numbered(prompt: str, which: int) -> str:
    """How often the batch had this prompt before, and as many characters as tell no row from another."""
    number = prompt.partition("=")[0].split()[-1]
    return f"{number}.{which}{'x' * ((int(number) * 3 + which * 5) % 9)}"


def length(completions, **_):
    """A reward that differs between completions."""
    return [float(len(one)) for one in completions]


class Recording(OPSDTrainer):
    """Keeps the advantage of each row where the teacher reads it, with prompt and completion."""

    def __init__(self, *args, **kwargs):
        self.taught, self.learned = [], []
        super().__init__(*args, **kwargs)

    def teach(self, rollout, rows):
        texts = WORDS.batch_decode(rollout.completion_lists(), skip_special_tokens=True)
        pulls = [None] * len(rows) if rollout.nll_weight is None else rollout.nll_weight.tolist()
        self.taught += zip(rows, texts, pulls, strict=True)
        return super().teach(rollout, rows)

    def compare(self, student, rollout, targets, num_items):
        texts = WORDS.batch_decode(rollout.completion_lists(), skip_special_tokens=True)
        if rollout.nll_weight is not None:
            self.learned += zip(texts, rollout.nll_weight.tolist(), strict=True)
        return super().compare(student, rollout, targets, num_items)


GIVEN = rows().add_column("completion", ["given"] * 8)
UNTRAINED = {"reward_weight": 0.0, "num_generations": 1}
SAVED = {"save_strategy": "steps", "save_steps": 1}


@pytest.fixture
def trained(trained):
    """Two steps of eight rows, four completions of a prompt."""
    options = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4, "reward_weight": 0.5,
        "max_steps": 2, "train_dataset": rows(), "reward_funcs": length,
    }  # fmt: skip
    return lambda **given: trained(Recording, **{"rollout": Numbered(numbered), **options, **given})


@pytest.fixture
def evaluating(make_trainer):
    return lambda **given: make_trainer(rollout=Numbered(numbered), **given)


# ---- Advantages -----------------------------------------------------------------------------------------------------


def of_trl(rewards: torch.Tensor, weights: torch.Tensor, number: int, scale: str, aggregation: str) -> torch.Tensor:
    """The lines of TRL's own method between the rewards of functions and the advantages."""
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    first = source.index("        unscorable_mask = ")
    last = source.index("        # Slice to keep only the local part of the data")

    class Self:
        reward_funcs, reward_weights = weights.tolist(), weights
        scale_rewards, multi_objective_aggregation = scale, aggregation

    names = {"torch": torch, "nanstd": nanstd, "self": Self, "device": "cpu", "num_generations": number}
    names["rewards_per_func"] = rewards
    exec(textwrap.dedent(source[first:last]), names)
    return names["advantages"], names["is_std_zero"]


def rewards_of(kind: str) -> torch.Tensor:
    """[24, 3]."""
    found = torch.randn(24, 3, generator=torch.Generator().manual_seed(0)) * 3
    if kind == "some are None":
        found[torch.rand(24, 3, generator=torch.Generator().manual_seed(1)) < 0.4] = math.nan
        found[3], found[8:11] = math.nan, math.nan
        assert found.isnan().all(1).sum() > 3
    if kind == "all of a prompt are None":
        found[4:8] = math.nan
    if kind == "alike":
        found[:12] = 1.0
    return found


@pytest.mark.quick
@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("kind", ["plain", "some are None", "all of a prompt are None", "alike"])
def test_advantages_are_those_of_trls_grpo(kind, scale, aggregation):
    weights = torch.tensor([1.0, 0.3, -2.0])
    for number in (2, 4, 12):
        expected, flat = of_trl(rewards_of(kind), weights, number, scale, aggregation)
        values, is_flat = advantages(rewards_of(kind), weights, number, scale, aggregation)
        assert torch.equal(values, expected)
        assert torch.equal(is_flat, flat)
        assert values.isfinite().all()
        assert values.abs().max() > 0


# ---- Training -------------------------------------------------------------------------------------------------------


def expected_pulls(texts, reward):
    """Half the advantages of completions by the number they carry: group-relative, scaled by the deviation."""
    groups = defaultdict(list)
    for text in texts:
        groups[text.partition(".")[0]].append(reward(text))
    found = {}
    for text in texts:
        group = groups[text.partition(".")[0]]
        found[text] = 0.5 * (reward(text) - np.mean(group)) / (np.std(group, ddof=1) + 1e-4)
    return found


@pytest.mark.parametrize(("kind", "budget"), [("text", 60), ("messages", None)])
def test_each_completion_has_the_advantage_of_its_own_reward(trained, kind, budget):
    """Rows are shuffled and dealt by length between the reward and the loss; each completion carries its number."""

    def count(completions, answer, prompts, completion_ids, trainer_state, **_):
        texts = [one if kind == "text" else one[0]["content"] for one in completions]
        asked = [one if kind == "text" else one[-1]["content"] for one in prompts]
        assert all(str(number) == text.partition(".")[0] for number, text in zip(answer, texts, strict=True))
        assert all(prompt == PROMPTS[number] for prompt, number in zip(asked, answer, strict=True))
        assert [WORDS.decode(ids) for ids in completion_ids] == [f"{text}<|im_end|>" for text in texts]
        steps.append(trainer_state.global_step)
        return [number * 10.0 + len(text) for number, text in zip(answer, texts, strict=True)]

    steps: list[int] = []
    trainer = trained(reward_funcs=count, train_dataset=rows(kind=kind), max_tokens_per_microbatch=budget)
    assert steps == [0, 1]
    for at in (0, 8):
        learned = dict(trainer.learned[at : at + 8])
        expected = expected_pulls(learned, lambda text: int(text.partition(".")[0]) * 10.0 + len(text))
        assert learned == pytest.approx(expected, rel=1e-5)
        assert max(learned.values()) > 0.1 > -0.1 > min(learned.values())
        assert {text: nll_weight for _, text, nll_weight in trainer.taught[at : at + 8]} == learned


def test_a_training_logs_what_trl_logs_of_rewards(trained):
    calls = []

    def some(completions, log_metric, **_):
        calls.append([None if text.endswith("x") else len(text) for text in completions])
        log_metric("longest", max(map(len, completions)))
        return calls[-1]

    trainer = trained(reward_funcs=[length, some], reward_weights=[1.0, 2.0], scale_rewards="none")
    logs = [row for row in trainer.state.log_history if "loss" in row]
    for at, row in enumerate(logs):
        lengths = torch.tensor([float(len(text)) for _, text, _ in trainer.taught[8 * at : 8 * at + 8]])
        those = torch.tensor([math.nan if one is None else one for one in calls[at]])
        totals = lengths + 2 * those.nan_to_num(0.0)
        assert 0 < those.isnan().sum() < 8
        wanted = {
            "rewards/length/mean": lengths.mean(),
            "rewards/length/std": lengths.std(),
            "rewards/some/mean": those.nanmean(),
            "rewards/some/std": nanstd(those),
            "reward": totals.mean(),
            "reward_std": totals.std(),
            "frac_reward_zero_std": 0.0,
            "longest": lengths.max(),
        }
        assert {name: row[name] for name in wanted} == pytest.approx({k: float(v) for k, v in wanted.items()})
        assert row["time/reward"] > 0


def drawn(completions, **_):
    """As `length`, after it has advanced every random state."""
    random.random(), np.random.rand(), torch.rand(1)
    return length(completions)


@pytest.mark.parametrize("methods", [[], [SkipNear(1e-9)]], ids=["all", "skipping"])
def test_rewards_not_trained_on_are_logged_and_change_nothing(trained, methods):
    given = {**UNTRAINED, "train_dataset": GIVEN, "lmbda": 0.6, "methods": methods}
    plain, found = (
        trained(reward_funcs=rewards, model=tiny.qwen2(attention_dropout=0.1), **given) for rewards in (None, drawn)
    )
    for log, step in zip(found.state.log_history[:-1], range(2), strict=True):
        lengths = [float(len(text)) for *_, text, _ in found.taught[8 * step :][:8] if text != "given"]
        assert 0 < len(lengths) < 8
        assert log["rewards/drawn/mean"] == log["reward"] == pytest.approx(sum(lengths) / len(lengths))
        assert log["reward_std"] == pytest.approx(float(torch.tensor(lengths).std()))
        assert "frac_reward_zero_std" not in log
    assert {nll_weight for *_, nll_weight in found.taught} == {None}
    assert torch.equal(tiny.weights(found), tiny.weights(plain))


def test_a_step_without_completions_of_the_student_calls_no_function(trained):
    called = []

    def counted(completions, **_):
        called.append(len(completions))
        return [0.0] * len(completions)

    found = trained(reward_funcs=counted, train_dataset=GIVEN, lmbda=0.0, **UNTRAINED)
    assert not called
    assert not any("reward" in name for row in found.state.log_history for name in row if name != "time/reward")
    found.evaluate(GIVEN.select(range(2)))
    assert called == [2], "evaluations are of the student"


def test_rewards_without_training_columns_are_logged_in_evaluations_only(trained):
    labelled = {"eval_dataset": rows(2).add_column("label", [1, 1]), "eval_strategy": "steps", "eval_steps": 1}
    trainer = trained(reward_funcs=needs_label, **UNTRAINED, **labelled)
    named = {name for row in trainer.state.log_history for name in row if "reward" in name}
    assert "eval_reward" in named
    assert not [name for name in named if not name.startswith("eval_")]


def test_dataset_completions_get_no_reward_and_are_no_baseline(trained):
    seen = []

    def count(completions, **_):
        seen.extend(completions)
        return [100.0 if text == "given" else float(len(text)) for text in completions]

    options = {"lmbda": 0.5, "sft_weight": 0.25, "scale_rewards": "none", "max_steps": 3}
    trainer = trained(reward_funcs=count, train_dataset=GIVEN, **options)
    assert "given" not in seen
    assert len(seen) + sum(text == "given" for text, _ in trainer.learned) == 24
    assert {nll_weight for text, nll_weight in trainer.learned if text == "given"} == {0.25}
    for at in range(0, 24, 8):
        groups = defaultdict(list)
        for row, text, nll_weight in trainer.taught[at : at + 8]:
            if text != "given":
                groups[row["answer"]].append((len(text), nll_weight))
        for group in groups.values():
            lengths, pulls = np.array(group).T
            assert pulls == pytest.approx(0.5 * (lengths - lengths.mean()))
    assert any(len(group) > 1 for group in groups.values())


def test_a_run_resumes_with_its_rewards_or_with_others_that_are_only_logged(trained, tmp_path):
    whole = trained(**SAVED)
    resume = {"resume": str(tmp_path / "checkpoint-1")}
    assert trained(**resume).learned == whole.learned[8:]
    with pytest.raises(ValueError, match=r"methods: .*functions=\['length'\].*in the .*functions=\['length', 'slow'\]"):
        trained(reward_funcs=[length, slow], scale_rewards="none", **resume)
    logged = trained(**SAVED, **UNTRAINED)
    resumed = trained(**UNTRAINED, reward_funcs=[slow, length], **resume)
    assert tiny.logged(resumed, "rewards/length/mean") == tiny.logged(logged, "rewards/length/mean")


def test_reward_functions_may_change_their_arguments(trained):
    """Their prompts and columns are copies: the teacher reads the rows as they are."""

    def greedy(prompts, completions, completion_ids, **columns):
        for prompt, ids in zip(prompts, completion_ids, strict=True):
            prompt.clear()
            ids.clear()
        return [0.0] * len(completions)

    plain = trained(train_dataset=rows(kind="messages"), reward_weight=0.0, reward_funcs=None)
    other = trained(train_dataset=rows(kind="messages"), reward_funcs=greedy)
    assert [one[:2] for one in other.taught] == [one[:2] for one in plain.taught]


def test_rewards_read_the_turns_of_a_beginning_as_messages(trained):
    seen, call = [], {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "4"},
        {"role": "assistant", "content": "So "},
    ]
    begun = rows(2, "messages").add_column("completion_prefix", [turns, turns[:2]])

    def told(completions, **_):
        seen.extend(completions)
        return [0.0] * len(completions)

    trained(reward_funcs=told, train_dataset=begun, rollout=HFRollout(), max_steps=1, reward_weight=0.0)
    assert {len(one) for one in seen} == {3}
    assert all(one[:2] == turns[:2] for one in seen)
    assert {one[2]["content"][:3] == "So " for one in seen} == {True, False}


# ---- What may be a reward -------------------------------------------------------------------------------------------


async def slow(completions, **_):
    """A coroutine."""
    await asyncio.sleep(0.3)
    return [len(one) + 1 for one in completions]


class Judge:
    """An object that is called, and waits for the other one."""

    def __init__(self):
        self.loops = set()

    async def __call__(self, completions, **_):
        await asyncio.sleep(0.3)
        self.loops.add(id(asyncio.get_running_loop()))
        return [None] * len(completions)


def test_coroutines_wait_together_and_in_one_loop(evaluating):
    judge = Judge()
    trainer = evaluating(eval_dataset=rows(4), reward_funcs=[slow, length, judge, functools.partial(slow)])

    async def in_a_notebook():  # whose thread runs a loop already
        return trainer.evaluate()

    found = asyncio.run(in_a_notebook())
    trainer.evaluate()
    assert 0.25 < found["eval_time/reward"] < 0.55
    assert len(judge.loops) == 1, "clients of the first call belong to its loop"
    assert found["eval_rewards/slow/mean"] == found["eval_rewards/length/mean"] + 1 == found["eval_rewards/slow_2/mean"]
    assert found["eval_reward"] == pytest.approx(3 * found["eval_rewards/length/mean"] + 2)


def classifier(folder, labels):
    """A folder with a reward model, whose weights are there."""
    torch.manual_seed(3)
    config = Qwen2Config(**{**tiny.qwen2(32).config.to_dict(), "num_labels": labels, "pad_token_id": None})
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    WORDS.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["text", "messages"])
def test_a_reward_model_scores_prompt_and_completion(evaluating, tmp_path, kind):
    seen = []

    def see(prompts, completions, **_):
        seen.extend(zip(prompts, completions, strict=True))
        return [0.0] * len(prompts)

    folder = classifier(tmp_path / "judge", 1)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    trainer = evaluating(
        eval_dataset=rows(5, kind), reward_funcs=[str(folder), see, model],
        reward_processing_classes=[None, None, tiny.tokenizer()], per_device_train_batch_size=2,
    )  # fmt: skip
    found = trainer.evaluate()
    texts = [p + c if kind == "text" else WORDS.apply_chat_template(p + c, tokenize=False) for p, c in seen]
    alone = [model(torch.tensor([WORDS(text)["input_ids"]])).logits.item() for text in texts]
    assert len(set(alone)) == 5
    for name in ("judge", "judge_2"):
        assert found[f"eval_rewards/{name}/mean"] == pytest.approx(np.mean(alone), rel=1e-4)
        assert found[f"eval_rewards/{name}/std"] == pytest.approx(np.std(alone, ddof=1), rel=1e-4)
    assert not model.training


# ---- Evaluations ----------------------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_an_evaluation_averages_over_all_of_its_rows(evaluating, kind):
    """Batches of 4 of 7 rows: the second has three, and a mean over batches would be another number."""
    dataset = rows(7) if kind == "map" else rows(7).to_iterable_dataset()
    sets = {"some": dataset, "few": rows(2)}
    trainer = evaluating(eval_dataset=sets, reward_funcs=length, per_device_eval_batch_size=4, max_steps=1)
    found = trainer.evaluate()
    written = WORDS.batch_decode(Numbered(numbered).complete(WORDS(PROMPTS)["input_ids"], 0), skip_special_tokens=True)
    lengths = [len(text) for text in written]
    assert found["eval_some_rewards/length/mean"] == pytest.approx(np.mean(lengths[:7]))
    assert found["eval_some_rewards/length/std"] == pytest.approx(np.std(lengths[:7], ddof=1))
    assert found["eval_some_reward"] == pytest.approx(np.mean(lengths[:7]))
    assert found["eval_few_rewards/length/mean"] == pytest.approx(np.mean(lengths[:2]))
    predicted = trainer.predict(dataset).metrics
    assert predicted["test_rewards/length/mean"] == found["eval_some_rewards/length/mean"]


def test_solution_column_reaches_reward_functions(make_trainer):
    seen = []

    def right(completions, solution, **_):
        seen.extend(solution)
        return [0.0] * len(completions)

    dataset = tiny.rows(4).add_column("solution", list("abcd"))
    given = {"teacher_model": None, "teacher_model_kind": "live", "reward_funcs": right, "rollout": HFRollout()}
    make_trainer(train_dataset=dataset, eval_dataset=dataset, **given).evaluate()
    assert sorted(seen) == list("abcd")


def test_base_teacher_can_be_the_reference_of_a_reward(trained):
    given = {"teacher_model": None, "teacher_model_kind": "base", "rollout": HFRollout(), "learning_rate": 1e-2}
    trainer = trained(
        reward_funcs=lambda completions, **_: [float(sum(map(ord, text))) for text in completions], **given
    )
    first, second = tiny.logged(trainer, "divergence/mean")
    assert first == 0.0 < second
    assert tiny.logged(trainer, "grad_norm")[0] > 0.1


# ---- Steps and evaluations without a reward -------------------------------------------------------------------------


def in_even_steps(completions, trainer_state, **_):
    """Applies to the rows of every other step only."""
    return [float(len(one)) if trainer_state.global_step % 2 == 0 else None for one in completions]


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["None", "off-policy"])
def test_a_step_without_reward_is_saved_and_resumed(trained, tmp_path, kind):
    """The function answers None for all rows of a step, or all rows of a step have the dataset's completions."""
    options = {"None": {"reward_funcs": in_even_steps}, "off-policy": {"lmbda": 0.6}}[kind]
    options |= {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 2, "num_generations": 2}
    dataset = rows().add_column("completion", [f"{number}" for number in range(8)])

    def logs(**resume):
        trainer = trained(train_dataset=dataset, max_steps=4, **SAVED, **options, **resume)
        return [log for log in trainer.state.log_history if "loss" in log]

    whole = logs()
    having = [log["step"] for log in whole if "reward" in log]
    assert having == {"None": [1, 3], "off-policy": [1, 4]}[kind]
    assert not [name for log in whole for name, value in log.items() if value is None]
    again = logs(resume=str(tmp_path / "checkpoint-2"))
    assert [[log["loss"], log.get("reward")] for log in again] == [[log["loss"], log.get("reward")] for log in whole]


@pytest.mark.parametrize("scheduler", ["constant", "reduce_lr_on_plateau"])
def test_evaluation_without_reward_is_not_best_and_stops_nothing(evaluating, scheduler):
    def in_odd_steps(completions, trainer_state, **_):
        return [float(len(one)) if trainer_state.global_step % 2 else None for one in completions]

    trainer = evaluating(
        train_dataset=rows(), eval_dataset=rows(2), reward_funcs=in_odd_steps, max_steps=4,
        metric_for_best_model="reward", eval_strategy="steps", eval_steps=1, save_strategy="best",
        greater_is_better=True, load_best_model_at_end=True, lr_scheduler_type=scheduler,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=4)],
    )  # fmt: skip
    trainer.train()
    evaluated = {log["step"]: log.get("eval_reward") for log in trainer.state.log_history if "eval_loss" in log}
    assert {step: value is None for step, value in evaluated.items()} == {1: False, 2: True, 3: False, 4: True}
    best = max((1, 3), key=evaluated.get)
    assert (trainer.state.best_global_step, trainer.state.best_metric) == (best, evaluated[best])


# ---- What is refused ------------------------------------------------------------------------------------------------


def wrong(returned):
    def bad(**_):
        return returned

    return bad


def raises(**_):
    raise KeyError("answer")


@pytest.mark.parametrize(
    "function",
    [*map(wrong, ([1.0], "ab", None, [1.0, math.inf])), raises],
    ids=["one", "text", "none", "inf", "raises"],
)
def test_errors_of_reward_functions_name_function_and_rows(evaluating, function):
    trainer = evaluating(eval_dataset=rows(2), reward_funcs=function)
    with pytest.raises(RuntimeError, match=f"'{function.__name__}' failed for row 0 of an evaluation batch to row 1"):
        trainer.evaluate()


def needs_label(completions, label, **_):
    return [0.0] * len(completions)


def needs_answer(completions, answer, **_):
    return [0.0] * len(completions)


def takes_few(completions, prompts):
    return [0.0] * len(completions)


LABELLED = {"reward_funcs": needs_label, "eval_dataset": rows(2)}
RENAMED = ("completion", "completions")
REFUSED = [
    ("functions", {"reward_funcs": length, "reward_weights": [1, 2]}),
    ("weights", {"reward_weights": 3}),
    ("scale", {"scale_rewards": "groups"}),
    ("aggregation", {"multi_objective_aggregation": "sum"}),
    ("eval_dataset: .*'label'", LABELLED),
    ("eval_dataset: .*'answer'", {**LABELLED, "reward_funcs": needs_answer, "remove_unused_columns": True}),
    ("takes_few", {**LABELLED, "reward_funcs": takes_few}),
    ("train_dataset: .*'label'", {"reward_funcs": needs_label, "reward_weight": 1.0, "num_generations": 2}),
    ("has a column 'completions'", {"reward_funcs": length, "eval_dataset": GIVEN.rename_column(*RENAMED)}),
]


@pytest.mark.before_loading
@pytest.mark.quick
@pytest.mark.parametrize(("named", "given"), REFUSED)
def test_wrong_reward_arguments_are_refused_before_loading(make_trainer, named, given):
    with pytest.raises(ValueError, match=named):
        make_trainer(**given)


def test_reward_model_without_a_single_output_is_refused(make_trainer, tmp_path):
    causal = tiny.qwen2(32)
    causal.save_pretrained(tmp_path / "causal")
    WORDS.save_pretrained(tmp_path / "causal")
    with pytest.raises(ValueError, match="lacks weights of Qwen2ForSequenceClassification"):
        make_trainer(reward_funcs=str(tmp_path / "causal"))
    causal.config._name_or_path = str(tmp_path / "causal")
    two = AutoModelForSequenceClassification.from_pretrained(classifier(tmp_path / "two", 2))
    for model in (causal, two):
        with pytest.raises(ValueError, match="does not give one number for each text"):
            make_trainer(reward_funcs=model)
