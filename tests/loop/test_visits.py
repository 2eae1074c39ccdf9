"""Prompts are skipped or weighted by their last visits, before anything is generated for them."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest
import torch
from datasets import Dataset
from small_methods import Discounted
from support import tiny, tool_calls, vision_language
from support.mirror_engine import Mirrored
from support.rollouts import Numbered

from trl_opsd import FixedRollout, HFRollout, OPSDTrainer
from trl_opsd.data.outcomes import Visit
from trl_opsd.methods.visits import Visits, is_skipped

WORDS = tiny.tokenizer()
WEIGHTS = dict(zip(tiny.PROMPTS, [0.0, 1.0, 2.5, 1.0, 0.0, 0.0, 0.5, 1.0], strict=True))
"""From the second visit on."""


def after_the_first(row: dict[str, Any], last: Visit | None) -> float:
    return 1.0 if last is None else WEIGHTS[row["prompt"]]


class Noting(FixedRollout):
    """Notes the prompts of each call."""

    def __init__(self) -> None:
        super().__init__(tiny.recorded(WORDS))
        self.calls: list[tuple[int, list[str]]] = []

    def complete(self, prompt_ids: list[list[int]], step: int) -> list[list[int]]:
        self.calls.append((step, WORDS.batch_decode(prompt_ids)))
        return super().complete(prompt_ids, step)


class Watching(OPSDTrainer):
    """Notes what its teacher reads, the weights of rows, and the tokens of a row in the student's pass."""

    def __init__(self, *args: Any, **given: Any) -> None:
        self.read: list[int] = []
        self.weighed: list[tuple[float, int]] = []
        super().__init__(*args, **given)
        for teacher in self.teachers.values():
            teacher.targets = self._noted(teacher.targets)

    def _noted(self, targets: Any) -> Any:
        def noted(rollout: Any) -> Any:
            self.read.append(len(rollout.prompt_ids))
            return targets(rollout)

        return noted

    def compare(self, student, rollout, targets, num_items):
        self.weighed += [
            (weights.max().item(), length.total)
            for weights, length in zip(rollout.weights, rollout.measured(), strict=True)
        ]
        return super().compare(student, rollout, targets, num_items)


class ByHand(OPSDTrainer):
    """Weighs the rows that the other skips or weighs."""

    def weigh(self, rollout, rows, targets):
        weights = super().weigh(rollout, rows, targets)
        if not self.model.training or self.state.global_step < 2:
            return weights
        return weights * torch.tensor([[WEIGHTS[row["prompt"]]] for row in rows])


OPTIONS = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4, "shuffle_dataset": False,
    "optim": "sgd", "learning_rate": 1e-2, "lr_scheduler_type": "constant", "max_grad_norm": 1e9,
}  # fmt: skip
"""Two steps are an epoch."""


@pytest.fixture
def trained(trained):
    return lambda cls=OPSDTrainer, **given: trained(cls, **{"rollout": Noting(), **OPTIONS, **given})


def contexts(**columns: list[Any]) -> Dataset:
    told = [f"hint {row}" for row in range(8)]
    wrong = [f"wrong {row}" for row in range(8)]
    return Dataset.from_dict({"prompt": tiny.PROMPTS, "privileged_context": told, "contrast_context": wrong, **columns})


# ---- What is saved ---------------------------------------------------------------------------------------------------


def test_skipped_prompts_cost_nothing_and_their_tokens_are_counted(trained):
    found = trained(Watching, prompt_weight_fn=after_the_first)
    first, second = tiny.PROMPTS[:4], tiny.PROMPTS[4:]
    kept = [[one for one in half if WEIGHTS[one]] for half in (first, second)]
    assert found.rollout.calls == [(0, first), (1, second), (2, kept[0]), (3, kept[1])]
    assert found.read == [4, 4, 3, 2]
    assert sorted(found.weighed[8:]) == sorted(
        (WEIGHTS[one], len(WORDS(one + answer)["input_ids"]) if WEIGHTS[one] else 1)
        for one, answer in zip(tiny.PROMPTS, tiny.ANSWERS, strict=True)
    )
    lengths = {one: len(WORDS(answer)["input_ids"]) for one, answer in zip(tiny.PROMPTS, tiny.ANSWERS, strict=True)}
    saved = [sum(lengths[one] for one in half if not WEIGHTS[one]) for half in (first, second)]
    assert tiny.logged(found, "prompts/skipped") == [0, 0, 0.25, 0.5]
    assert tiny.logged(found, "prompts/tokens_saved") == [0, 0, *saved]
    assert tiny.logged(found, "prompts/tokens_saved_total") == [0, 0, saved[0], sum(saved)]
    # TRL's own figures are of what was generated.
    mean = [sum(lengths[one] for one in call) / len(call) for _, call in found.rollout.calls]
    assert tiny.logged(found, "completions/mean_length") == pytest.approx(mean)
    read = [sum(len(WORDS(one)["input_ids"]) + lengths[one] for one in call) for _, call in found.rollout.calls]
    assert tiny.logged(found, "num_tokens") == [sum(read[: step + 1]) for step in range(4)]


WITH: dict[str, dict[str, Any]] = {
    "itself": {},
    "two teachers": {"teachers": True},
    "two models beside": {"contrast_weight": 0.5, "anchor_weight": 0.3, "train_dataset": contexts()},
    "one micro-batch": {"max_tokens_per_microbatch": 100_000},
    "rows without padding": {"padding_free": True},
    "some tokens": {"token_selection": "student_entropy", "token_fraction": 0.5},
    "a discount": {"methods": [Discounted(0.9)], "divergence": "jsd"},
}


@pytest.mark.parametrize("other", WITH)
def test_a_weight_equals_one_by_hand(trained, other):
    """Also the losses, whose denominator is the sum of the weights."""
    given = dict(WITH[other])
    if given.pop("teachers", False):
        given["teacher_model"] = {"one": tiny.qwen2(48, 1), "two": tiny.qwen2(40, 2)}
        given["train_dataset"] = contexts(teacher=["one", "two", "two", "one"] * 2)
    ours, by_hand = (
        trained(cls, **given, **more)
        for cls, more in ((OPSDTrainer, {"prompt_weight_fn": after_the_first}), (ByHand, {}))
    )
    assert tiny.logged(ours, "loss") == pytest.approx(tiny.logged(by_hand, "loss"), abs=2e-6)
    assert tiny.logged(ours, "divergence/mean") == pytest.approx(tiny.logged(by_hand, "divergence/mean"), abs=2e-6)
    torch.testing.assert_close(tiny.weights(ours), tiny.weights(by_hand), rtol=0, atol=1e-6)


def test_a_step_whose_prompts_are_all_skipped_changes_nothing(make_trainer, trained, tmp_path):
    def once(row: dict[str, Any], last: Visit | None) -> bool:
        return last is None

    def told(row: dict[str, Any], completion: str) -> str:
        read.append(completion)
        return f"{row['prompt']} {completion}"

    read: list[str] = []
    given = {
        "save_strategy": "steps",
        "save_steps": 2,
        "max_steps": 6,
        "teacher_prompt_fn": told,
        "optim": "adamw_torch",
    }
    found = trained(Watching, prompt_weight_fn=once, **given)
    assert len(read) == len(set(read)) == 8, "and never asks for the prompt of a teacher"
    two = make_trainer(model=str(tmp_path / "checkpoint-2")).model
    for mine, other in zip(found.model.parameters(), two.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert [step for step, _ in found.rollout.calls] == [0, 1]
    assert tiny.logged(found, "prompts/skipped") == [0, 0, 1, 1, 1, 1]
    assert len(tiny.logged(found, "loss")) == len(tiny.logged(found, "grad_norm")) == 2
    written = sum(len(answer) for answer in WORDS(tiny.ANSWERS)["input_ids"])
    assert found.methods.get(Visits).tokens_saved == 2 * written
    saved = json.loads((tmp_path / "checkpoint-6" / "opsd_visits.json").read_text())
    assert {counts[-1] for counts in saved["last"].values()} == {2}, "how often each was skipped"
    assert not any("completions/mean_length" in entry for entry in found.state.log_history[2:6])


def test_an_evaluation_skips_nothing_and_is_no_visit(trained):
    def never(row: dict[str, Any], last: Visit | None) -> int:
        seen.append(last)
        return 0

    seen: list[Visit | None] = []
    given = {"eval_dataset": tiny.rows(4), "eval_strategy": "steps", "eval_steps": 1, "max_steps": 1}
    found = trained(prompt_weight_fn=never, **given)
    assert [len(prompts) for _, prompts in found.rollout.calls] == [4]
    assert tiny.logged(found, "eval_divergence/mean")[0] > 0
    assert seen == [None] * 4


@pytest.mark.parametrize("lmbda", [0.0, 0.5])
def test_skipped_dataset_completions_count_no_generated_token(trained, lmbda):
    data = Dataset.from_dict({"prompt": tiny.PROMPTS, "completion": ["given"] * 8})
    found = trained(Watching, prompt_weight_fn=after_the_first, lmbda=lmbda, train_dataset=data)
    assert found.read == [4, 4, 3, 2]
    written = {prompt for step, prompts in found.rollout.calls if step < 2 for prompt in prompts}
    assert bool(written) == bool(lmbda)
    answers = dict(zip(tiny.PROMPTS, WORDS(tiny.ANSWERS)["input_ids"], strict=True))
    assert found.methods.get(Visits).tokens_saved == sum(len(answers[one]) for one in written if not WEIGHTS[one])


def test_teacher_writes_nothing_for_skipped_prompts_and_counts_savings(make_trainer):
    given = {"seq_kd": True, "lmbda": 0.0, "max_completion_length": 4, "prompt_weight_fn": after_the_first}
    trainer = make_trainer(rollout=Noting(), **OPTIONS, **given)
    generated, rows = trainer._generation._of_teachers, []

    def noted(requests: list[Any]) -> list[list[int]]:
        completions = generated(requests)
        rows.append({request["prompt"]: len(one) for request, one in zip(requests, completions, strict=True)})
        return completions

    trainer._generation._of_teachers = noted
    trainer.train()
    assert [len(one) for one in rows] == [4, 4, 3, 2]
    first = rows[0] | rows[1]
    assert trainer.methods.get(Visits).tokens_saved == sum(first[one] for one in tiny.PROMPTS if not WEIGHTS[one]) > 0
    assert not trainer.rollout.calls


# ---- What is known of a visit ----------------------------------------------------------------------------------------


def numbered(prompt: str, which: int) -> str:
    """The number of the prompt, and of the completion if the prompt is an even one."""
    number = tiny.PROMPTS.index(prompt)
    return f"{number}{'x' * (which * (1 - number % 2))}"


def lengths(completions: list[str], prompts: list[str], **_: Any) -> list[float | None]:
    return [None if prompt == "a" else float(len(one)) for prompt, one in zip(prompts, completions, strict=True)]


GROUPS = {
    "num_generations": 2, "per_device_train_batch_size": 4, "rollout": Numbered(numbered), "reward_funcs": lengths,
    "max_steps": 12,
}  # fmt: skip
"""Two steps of four prompts are an epoch."""


def test_flat_groups_are_skipped_every_other_time(trained):
    called = []

    def prompt(row: dict[str, Any], completion: str, outcome: Any) -> str:
        called.append(completion)
        return f"{row['prompt']} {outcome.reward}"

    found = trained(skip_prompts="flat_groups", teacher_prompt_fn=prompt, **GROUPS)
    # Those of odd numbers have equal completions; the first of the others is no group with rewards.
    assert tiny.logged(found, "prompts/skipped") == [0, 0, 0.5, 0.5] * 3
    assert tiny.logged(found, "prompts/tokens_saved") == [0, 0, 8, 8] * 3
    assert tiny.logged(found, "frac_reward_zero_std")[:4] == [0.5, 0.5, 0, 0], "of rows that were generated"
    assert len(called) == 3 * (16 + 8)
    assert "" not in called
    assert "prompts skipped by their last visit (flat_groups)" in repr(found)


def test_a_function_reads_divergence_rewards_and_tokens(trained):
    visits: dict[str, list[Visit | None]] = defaultdict(list)

    def noted(row: dict[str, Any], last: Visit | None) -> float:
        visits[row["prompt"]].append(last)
        return 0.5

    class Divergences(OPSDTrainer):
        def compare(self, student, rollout, targets, num_items):
            parts = super().compare(student, rollout, targets, num_items)
            for prompt, row in zip(rollout.prompt_lists(), parts.rows, strict=True):
                sums[WORDS.decode(prompt)].append(row[:2])
            return parts

    sums: dict[str, list[torch.Tensor]] = defaultdict(list)
    trained(Divergences, prompt_weight_fn=noted, **GROUPS | {"max_steps": 3})
    assert [len(one) for one in visits.values()] == [2, 2, 2, 2, 1, 1, 1, 1]
    for number, prompt in enumerate(tiny.PROMPTS[:4]):
        unknown, visit = visits[prompt]
        weight, divergence = torch.stack(sums[prompt][:2]).sum(0).tolist()
        more = 1 - number % 2
        rewards = (None, None) if prompt == "a" else (1.0, 1.0 + more)
        assert unknown is None
        assert visit == Visit(1, pytest.approx(divergence / weight), rewards, 4 + more)


def test_what_is_logged_of_rewards_is_of_what_was_generated(trained):
    def odd_ones(row: dict[str, Any], last: Visit | None) -> bool:
        return last is None or tiny.PROMPTS.index(row["prompt"]) % 2 == 1

    def noted(completions: list[str], **_: Any) -> list[float]:
        rewarded.extend(completions)
        return [1.0 + len(one) for one in completions]

    rewarded: list[str] = []
    given = GROUPS | {"reward_funcs": noted, "reward_gate": "reward", "max_steps": 4}
    found = trained(prompt_weight_fn=odd_ones, **given)
    assert len(rewarded) == 2 * 8 + 2 * 4
    assert "" not in rewarded
    assert tiny.logged(found, "frac_reward_zero_std") == [0.5, 0.5, 1, 1]
    assert tiny.logged(found, "reward") == tiny.logged(found, "gate/mean") == [2.25, 2.25, 2, 2]


def test_only_completions_that_are_generated_are_rewarded(trained):
    def counted(completions: list[str], **_: Any) -> list[float]:
        calls.append(len(completions))
        return [0.0] * len(completions)

    given = GROUPS | {"reward_funcs": counted, "max_steps": 2}
    calls: list[int] = []
    logged = trained(skip_prompts=1e9, **GROUPS | {"reward_funcs": counted, "max_steps": 4})
    assert "counted, logged only" in repr(logged)
    assert calls == [8, 8], "in the second epoch all prompts are skipped"
    reads = trained(prompt_weight_fn=lambda row, last: 1, **given)
    assert "logged only" not in repr(reads)
    assert calls == [8, 8, 8, 8]


@pytest.mark.parametrize(
    ("kind", "visit", "skips"),
    [
        ("flat_groups", Visit(1, 1.0, (1.0, 1.0), 9), True),
        ("flat_groups", Visit(1, 1.0, (0.0, 0.0, None), 9), True),
        ("flat_groups", Visit(1, 1.0, (0.0, 1.0), 9), False),
        ("flat_groups", Visit(1, 1.0, (1.0, None), 9), False),
        ("flat_groups", Visit(1, 1.0, (None, None), 9), False),
        ("flat_groups", Visit(1, 1.0, (1.0, 1.0), 9, skipped=1), False),
        (0.1, Visit(1, 0.09, (), 9), True),
        (0.1, Visit(1, -0.09, (), 9), True),
        (0.1, Visit(1, 0.11, (), 9), False),
        (0.1, Visit(1, None, (), 9), False),
        (0.1, Visit(1, 0.09, (), 9, skipped=1), False),
        (0.1, None, False),
    ],
)
def test_which_prompts_are_skipped(kind, visit, skips):
    assert is_skipped(kind, visit) is skips


@pytest.mark.parametrize(
    ("options", "warns"), [({"max_steps": 2}, True), ({"max_steps": 3}, False), ({"num_train_epochs": 1}, True)]
)
def test_training_in_which_no_prompt_comes_again_warns(make_trainer, caplog, options, warns):
    make_trainer(skip_prompts=0.1, **{**OPTIONS, "max_steps": -1, **options})
    assert ("skips prompts that come again, but in this training none does" in caplog.text) is warns


def test_a_report_has_no_sample_of_a_skipped_prompt(trained, tmp_path):
    trained(prompt_weight_fn=after_the_first, report=True)
    lines = (tmp_path / "report" / "samples.jsonl").read_text().splitlines()
    samples = [json.loads(line)["samples"] for line in lines]
    assert len(samples) == 2
    assert all(one["tokens"] for each in samples for one in each)


def test_rows_that_differ_are_different_prompts(trained):
    data = Dataset.from_dict({"prompt": ["a"] * 4, "privileged_context": ["b", "c", "b", "d"]})
    found = trained(prompt_weight_fn=lambda row, last: 1, train_dataset=data, max_steps=1)
    assert len(found.methods.get(Visits)._last) == 3


# ---- With others -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 3])
def test_a_resumed_run_skips_as_an_uninterrupted_one(trained, tmp_path, step):
    given = {
        **GROUPS, "skip_prompts": "flat_groups", "max_steps": 6, "save_strategy": "steps", "save_steps": 1,
        "optim": "adamw_torch", "shuffle_dataset": True,
    }  # fmt: skip
    whole = trained(**given)
    again = trained(resume=str(tmp_path / f"checkpoint-{step}"), **given)
    assert torch.equal(tiny.weights(again), tiny.weights(whole))
    assert again.methods.get(Visits)._last == whole.methods.get(Visits)._last
    assert again.methods.get(Visits).tokens_saved == whole.methods.get(Visits).tokens_saved > 0
    for name in ("prompts/skipped", "prompts/tokens_saved_total"):
        assert tiny.logged(again, name) == tiny.logged(whole, name)
    whole.train()
    assert tiny.logged(whole, "prompts/skipped")[:2] == [0, 0], "another training begins without visits"


def test_importance_weights_are_known_beside_skipped_rows(trained, tmp_path):
    given = {"divergence": "sampled_reverse_kl", "max_completion_length": 16}
    found = trained(rollout=Mirrored(tiny.config(tmp_path)), prompt_weight_fn=after_the_first, **given)
    assert tiny.logged(found, "importance/mean") == pytest.approx([1] * 4, rel=1e-4)
    assert tiny.logged(found, "prompts/skipped") == [0, 0, 0.25, 0.5]


def test_a_prompt_with_images_is_skipped_with_them(trained):
    def every_other(row: dict[str, Any], last: Visit | None) -> float:
        seen.append(last)
        return 1.0 if last is None else len(seen) % 2

    seen: list[Visit | None] = []
    given = {**vision_language.arguments(), "rollout": HFRollout(), "max_completion_length": 4}
    found = trained(train_dataset=vision_language.rows([2, 1, 0, 1]), prompt_weight_fn=every_other,
                    **given, max_steps=2)  # fmt: skip
    assert tiny.logged(found, "prompts/skipped") == [0, 0.5]
    assert None not in seen[4:], "the pixels are the same, whatever the object"


def test_answers_of_tools_are_no_generated_tokens(trained):
    words = tool_calls.words()
    found = trained(
        Watching,
        model=tiny.qwen2(max_position_embeddings=4096),
        teacher_model=tiny.qwen2(48, seed=1, max_position_embeddings=4096),
        train_dataset=tiny.rows(4).map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]}),
        processing_class=words,
        rollout=tool_calls.CallsOnce(),
        tools=[tiny.add],
        max_completion_length=400,
        max_steps=3,
        prompt_weight_fn=lambda row, last: last is None or last.skipped or len(row["prompt"][0]["content"]) > 5,
    )
    generated = sum(map(len, words([tool_calls.CALL, "four<|im_end|>"])["input_ids"]))
    assert tiny.logged(found, "prompts/skipped") == [0, 0.5, 0]
    assert tiny.logged(found, "prompts/tokens_saved") == [0, 2 * generated, 0]
    assert found.read == [4, 2, 4]
