"""Several completions of a prompt stay with it: in one process and in two, however rows are read, dealt and learned."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import several
import torch
from datasets import Dataset
from several import EVALUATIONS, PROMPTS, REWARDED, ROWS, SHUFFLED, STEPS, TRAININGS, WEIGHED, number_of, value_of
from support import forks, tiny

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(forks.SECONDS + 60)]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("several")
    tiny.save_pair(folder)
    return folder


@pytest.fixture(scope="module")
def results(models) -> dict[int, dict[str, Any]]:
    """What one process has found, and what two have."""
    return {2: forks.results("ddp", several.all_of, models, 2)[0], 1: several.all_of(models, 1)}


def generations(name: str, options: dict[str, Any]) -> int:
    return options.get("num_generations_eval", options.get("num_generations", 4))


def close(one: Any, other: Any) -> bool:
    return one == pytest.approx(other, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("name", TRAININGS)
def test_each_prompt_gets_num_generations_completions_within_one_step(results, name, processes):
    found, number = results[processes]["train"][name], generations(name, TRAININGS[name])
    for batch in found["read"]:
        assert len(batch) == ROWS
        assert batch == [batch[place] for place in range(0, ROWS, number) for _ in range(number)], "next to each other"
        assert len(set(batch)) == ROWS // number
    if name != "ahead":  # which reads a step twice
        prompts = [prompt for batch in found["read"] for prompt in batch[::number]]
        assert len(prompts) == len(set(prompts)) == len(found["logs"][-len(found["read"]) :]) * ROWS // number


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("name", TRAININGS)
def test_completions_are_scored_and_learned_with_their_own_prompts(results, name, processes):
    found, number = results[processes]["train"][name], generations(name, TRAININGS[name])
    assert all(number_of(prompt) == number_of(text) for prompt, text in found["taught"])
    learned: dict[tuple[int, str], list[str]] = defaultdict(list)
    for _, step, text, *_ in found["learned"]:
        learned[step, number_of(text)].append(text.rstrip("x").partition(".")[2])
    assert {tuple(sorted(which)) for which in learned.values()} == {tuple(map(str, range(number)))}


SECONDS = ("time/", "tokens_per_second", "step_time", "overlap/", "runtime", "samples_per", "steps_per", "model_prep")
OF_A_PROCESS = (*SECONDS, "agreement/top")
"""What is measured where it happens: seconds, and the agreement of one token in 16."""


@pytest.mark.parametrize("kind", ["train", "eval"])
def test_whatever_is_logged_is_of_all_processes(results, kind):
    """Also what a user records, and what only one of them knows."""
    for name in TRAININGS if kind == "train" else EVALUATIONS:
        for row, other in zip(*(results[processes][kind][name]["logs"] for processes in (1, 2)), strict=True):
            one, two = (
                {key.removeprefix("eval_"): value for key, value in logs.items() if not key.startswith("agreement/top")}
                for logs in (row, other)
            )  # agreement is that of one token in 16, and which ones depends on the micro-batches
            names = {key for key in one.keys() | two.keys() if not key.startswith((*OF_A_PROCESS, "agreement/top"))}
            assert {"mine/length", "mine/last"} <= names
            if name in ("overlap", "a group in two processes, and a budget"):  # means over other micro-batches
                names -= {"mine/length", "entropy"}
            assert {key: (one.get(key), two.get(key)) for key in names if not close(one.get(key), two.get(key))} == {}


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("name", TRAININGS)
def test_group_std_is_that_of_completions_of_each_prompt(results, name, processes):
    """Recomputed from the divergence of each completion, by the number that it carries."""
    found = results[processes]["train"][name]
    by_step: dict[int, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for _, step, text, divergence, tokens in found["learned"]:
        by_step[step][number_of(text)].append((divergence, tokens))
    logs = {row["step"]: row for row in found["logs"]}
    for step, groups in by_step.items():
        deviations = torch.stack([torch.tensor(rows).std(0) for rows in groups.values()]).mean(0)
        row = logs[step + 1]
        assert [row["group/divergence_std"], row["group/length_std"]] == pytest.approx(deviations.tolist(), rel=1e-3)
        assert deviations.min() > 0


@pytest.mark.parametrize("name", TRAININGS)
def test_two_processes_learn_what_one_learns(results, name):
    one, two = (results[processes]["train"][name] for processes in (1, 2))
    assert one["read"] == two["read"]
    assert close(one["weights"], two["weights"])
    for row, other in zip(one["logs"], two["logs"], strict=True):
        for metric in ("loss", "group/divergence_std", "group/length_std"):
            assert close(row[metric], other[metric]), metric


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("name", ["resumed", "overlap"])
def test_resumed_and_overlapped_runs_learn_the_same(results, name, processes):
    plain, other = (results[processes]["train"][key] for key in ("map", name))
    if name == "resumed":
        assert plain["read"][-1:] == other["read"]
    assert close(plain["weights"], other["weights"])


def test_num_generations_equals_training_on_repeated_rows(results, models):
    plain = results[1]["train"]["map"]
    rows = Dataset.from_list([{"prompt": prompt} for batch in plain["read"] for prompt in batch])
    repeated = several.trained(models, rows=rows, processes=1, num_generations=1, shuffle_dataset=False)
    assert repeated["read"] == plain["read"]
    assert repeated["weights"] == plain["weights"]
    assert len(plain["logs"]) == STEPS
    assert not any(key.startswith("group/") for row in repeated["logs"] for key in row)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("name", EVALUATIONS)
def test_evaluation_counts_each_completion_once(results, name, processes):
    found, number = results[processes]["eval"][name], generations(name, EVALUATIONS[name])
    (logs,) = found["logs"]
    written = [number_of(text) for text in found["predicted"]]
    assert written == [str(prompt) for prompt in range(PROMPTS) for _ in range(number)], "in the order of the rows"
    assert all(number_of(prompt) == number_of(text) for prompt, text in found["taught"])
    alone = results[1]["eval"][name]
    values = torch.tensor([row[3:] for row in alone["learned"][: PROMPTS * number]])  # then comes the prediction
    assert logs["eval_divergence/mean"] == pytest.approx(
        float((values[:, 0] * values[:, 1]).sum() / values[:, 1].sum()), rel=1e-5
    )
    assert logs["eval_loss"] == pytest.approx(alone["logs"][0]["eval_loss"], rel=1e-5)


@pytest.mark.parametrize("processes", [1, 2])
def test_completions_of_dataset_are_learned_with_their_own_prompts(results, processes):
    found = results[processes]["off policy"]
    assert all(number_of(prompt) == number_of(text) for prompt, text in found["taught"])
    given = [[text for _, step, text, *_ in found["learned"] if step == one] for one in range(len(found["logs"]))]
    shares = [sum(text.endswith("given") for text in texts) / ROWS for texts in given]
    assert [row["off_policy/share"] for row in found["logs"]] == pytest.approx(shares)
    assert 0 < sum(shares) < len(shares)


def test_off_policy_rows_do_not_depend_on_number_of_processes(results):
    one, two = (results[processes]["off policy"] for processes in (1, 2))
    assert sorted(row[1:3] for row in one["learned"]) == sorted(row[1:3] for row in two["learned"])
    assert close(one["weights"], two["weights"])
    for row, other in zip(one["logs"], two["logs"], strict=True):
        for metric in ("loss", "off_policy/share", "off_policy/divergence", "on_policy/divergence"):
            assert close(row[metric], other[metric]), metric


def test_completions_of_teacher_do_not_depend_on_number_of_processes(results):
    one, two = (results[processes]["by the teacher"] for processes in (1, 2))
    assert sorted(one["taught"]) == sorted(two["taught"])
    by_student = [number_of(prompt) == number_of(text) for prompt, text in one["taught"] if "." in text]
    assert by_student.count(True) + sum("." not in text for _, text in one["taught"]) == len(one["taught"])
    assert 0 < by_student.count(True) < len(one["taught"])
    assert close(one["weights"], two["weights"])
    assert [row["off_policy/share"] for row in one["logs"]] == [row["off_policy/share"] for row in two["logs"]]


@pytest.mark.parametrize("processes", [1, 2])
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
    asked = [prompt.partition("=")[0] for _, prompt, *_ in table["data"]]
    assert [text.partition(".")[0] for text in found["predicted"]] == [prompt.split()[-1] for prompt in asked]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("name", REWARDED)
def test_each_completion_has_the_advantage_of_its_own_reward(results, name, processes):
    """Recomputed from the completions of each prompt, by the number that they carry."""
    given, found = REWARDED[name], results[processes]["rewarded"][name]
    weights = given.get("reward_weights", [1.0, 1.0])
    by_group: dict[tuple[int, str], dict[str, float]] = defaultdict(dict)
    for step, text, nll_weight in found["nll"]:
        if text.endswith("given"):
            assert nll_weight == 3.0
        else:
            by_group[step, number_of(text)][text] = nll_weight
    assert len(found["nll"]) == ROWS * len(found["logs"])
    for (_, number), pulls in by_group.items():
        of_second = [0.0 if int(number) % 2 else 1.0 + len(text) for text in pulls]
        rewards = torch.tensor([value_of(text) * weights[0] for text in pulls]) + torch.tensor(of_second) * weights[1]
        expected = rewards - rewards.mean()
        if given.get("scale_rewards") != "none":
            expected = (expected / (rewards.std() + 1e-4)).nan_to_num(0.0)
        assert list(pulls.values()) == pytest.approx((0.5 * expected).tolist(), rel=1e-4, abs=1e-5)
    assert max(abs(nll_weight) for pulls in by_group.values() for nll_weight in pulls.values()) > 0.1


@pytest.mark.parametrize("name", ["overlap", "a group in two processes, and a budget"])
def test_rewards_that_are_only_logged_are_those_of_all_processes(results, name):
    one, two = (results[processes]["train"][name] for processes in (1, 2))
    for row, other in zip(one["logs"], two["logs"], strict=True):
        for metric in ("reward", "reward_std", "rewards/worth/mean"):
            assert close(row[metric], other[metric]), metric
    assert one["nll"] == two["nll"] == []


def test_two_processes_gate_what_one_gates(results):
    """With groups in both of them."""
    one, two = (results[processes]["gated"] for processes in (1, 2))
    for row, other in zip(one["logs"], two["logs"], strict=True):
        for metric in ("loss", "gate/mean", "num_tokens"):  # no loss where no row counts
            assert row.get(metric) is other.get(metric) is None or close(row[metric], other[metric]), metric
    assert 0 < sum(row["gate/mean"] for row in one["logs"]) < len(one["logs"])
    assert close(one["weights"], two["weights"])


@pytest.mark.parametrize("name", SHUFFLED)
def test_two_processes_shuffle_as_one(results, name):
    one, two = (results[processes]["shuffled"][name] for processes in (1, 2))
    assert one["controls"] == two["controls"]
    assert len(one["controls"]) == STEPS * ROWS
    assert all(read not in (None, own) for own, read in one["controls"])
    assert [row["loss"] for row in one["logs"]] == pytest.approx([row["loss"] for row in two["logs"]], rel=1e-5)


@pytest.mark.parametrize("name", WEIGHED)
def test_two_processes_skip_and_weigh_the_prompts_that_one_does(results, name):
    """Also where one of them has skipped all of its rows, or both have."""
    one, two = (results[processes]["weighed"][name] for processes in (1, 2))
    for row, other in zip(one["logs"], two["logs"], strict=True):
        for metric in ("loss", "num_tokens", *(key for key in row if key.startswith(("prompts/", "completions/")))):
            assert row.get(metric) is other.get(metric) is None or close(row[metric], other[metric]), metric
    shares = {row["prompts/skipped"] for row in one["logs"]}
    assert len(shares) > 1
    assert 1 in shares or name != "a group in two processes"
    for visit, other in zip(one["visits"], two["visits"], strict=True):
        assert visit[1:] == other[1:]
        assert visit[0] is other[0] is None or close(visit[0], other[0])
    assert close(one["weights"], two["weights"])


@pytest.mark.parametrize("name", REWARDED)
def test_two_processes_reward_what_one_rewards(results, name):
    one, two = (results[processes]["rewarded"][name] for processes in (1, 2))
    assert len({text for _, text, _ in one["nll"]}) > ROWS
    for row, other in zip(sorted(one["nll"]), sorted(two["nll"]), strict=True):
        assert row[:2] == other[:2]
        assert row[2] == pytest.approx(other[2], rel=1e-5, abs=1e-6)
    for row, other in zip(one["logs"], two["logs"], strict=True):
        for metric in ("loss", "reward", "reward_std", "rewards/second/mean", "frac_reward_zero_std"):
            assert row.get(metric) is other.get(metric) is None or close(row[metric], other[metric]), metric
    assert close(one["weights"], two["weights"])
