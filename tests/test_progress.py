"""What a training shows while it runs: rows of figures, not a dict of everything, and a bar in a terminal."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from support import tiny

from trl_opsd.progress import ended

COLUMNS = ["step", "divergence", "reward", "length", "tokens/s", "s/step", "gen", "score", "train", "GiB"]


def rewarded(completions, trainer_state, **_):
    """Only in the evaluation after the last step."""
    return [1.0 if trainer_state.global_step == 3 else None] * len(completions)


def lines(capsys) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if not line.startswith("warning")]


@pytest.mark.quick
@pytest.mark.parametrize("quiet", [False, True], ids=["with bars", "disable_tqdm"])
def test_a_training_prints_one_row_for_each_log(make_trainer, capsys, quiet):
    trainer = make_trainer(
        max_steps=3, logging_steps=1, disable_tqdm=quiet, eval_dataset=tiny.rows(2), eval_strategy="steps",
        eval_steps=3, reward_funcs=rewarded, train_dataset=tiny.rows(4),
    )  # fmt: skip
    capsys.readouterr()
    trainer.train()
    *banner, header, first, _, third, evaluated, took, learned, rewarded_by = lines(capsys)
    assert "4 in train_dataset, each read 1.5 times" in " ".join(" ".join(banner).split())
    assert len(banner) < 24, "fits a screen"
    assert header.split() == COLUMNS
    logged = trainer.state.log_history
    assert first.split()[0] == "1/3"
    assert float(first.split()[1]) == pytest.approx(logged[0]["divergence/mean"], rel=1e-3)
    assert float(third.split()[-2]) == pytest.approx(logged[2]["time/compare"], abs=0.006)
    assert evaluated.split()[:3] == ["eval", f"{logged[3]['eval_divergence/mean']:#.4g}", "1.000"]
    tokens = f"{logged[-2]['eval_num_tokens']:,.0f}"
    assert re.fullmatch(rf"3 steps in \d+\.\d s, {tokens} tokens, (\w+ \d+%, )+peak \d+\.\d GiB", took)
    ends = (f"{logged[number]['divergence/mean']:#.4g}" for number in (0, 2))
    at_the_end = f"{logged[3]['eval_divergence/mean']:#.4g} in evaluations"
    assert learned.split(maxsplit=1) == ["divergence", f"{' → '.join(ends)}, {at_the_end}"]
    assert rewarded_by.split(maxsplit=1) == ["reward", "1.000 in evaluations"]
    trainer.save_model()
    assert capsys.readouterr().out.endswith(f"next: vllm serve {trainer.args.output_dir}\n")
    assert max(map(len, (header, third, evaluated))) <= 80, "fits a terminal"


@pytest.mark.parametrize(
    ("reward", "divergence", "is_worse"),
    [((0.4, 0.05), (0.2, 0.1), True), ((0.4, 0.5), (0.2, 0.3), False), ((), (0.2, 0.3), True), ((), (), False)],
)
def test_end_of_a_training_warns_of_evaluations_that_got_worse(reward, divergence, is_worse):
    log: list[dict[str, float]] = [{"divergence/mean": 0.3}, {"divergence/mean": 0.1}]
    log += [{"eval_reward": one} for one in reward] + [{"eval_divergence/mean": one} for one in divergence]
    state = SimpleNamespace(log_history=[*log, {"train_runtime": 61.0}], global_step=5)
    first, *lines = ended(SimpleNamespace(report=True, output_dir="out"), state, start=2)
    assert first.startswith("3 steps in 1 min 1 s")
    assert lines[0].split()[:4] == ["divergence", "0.3000", "→", "0.1000" + "," * bool(divergence)]
    assert ("evaluations got worse" in lines[-1]) == is_worse
    assert sum("out/report.html" in line for line in lines) == 1
