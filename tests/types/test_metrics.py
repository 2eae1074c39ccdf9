"""Metrics logged by real trainings: each has a row in the table of metrics, and each row is logged."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from datasets import Dataset
from environments import worlds
from peft import LoraConfig, get_peft_model
from support import tiny
from support.mirror_engine import BYTES, Mirrored
from support.rollouts import Apart
from support.scores import known_teacher
from trl import DistillationConfig, DistillationTrainer

from trl_opsd import FixedRollout, HFRollout, OPSDTrainer
from trl_opsd.methods import Blend, OffPolicy

METRICS = OPSDTrainer.known_metrics

OPTIONS = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 1, "max_steps": 2}


def rewarded(name):
    """A reward function with a name of the table."""
    function = lambda completions, **_: [float(len(one)) for one in completions]  # noqa: E731
    function.__name__ = name
    return function


class SpoiledOnce(OPSDTrainer):
    """Its teacher's states are NaN in the first step."""

    def teach(self, rollout, rows):
        targets = super().teach(rollout, rows)
        if self.state.global_step == 0:
            targets.hidden.fill_(float("nan"))
        return targets


class Pulled(OPSDTrainer):
    """Its rows are pulled towards what was written."""

    def score(self, rows):
        batch = super().score(rows)
        nll_weight = torch.ones(len(batch.rows)) if self.model.training else None
        return replace(batch, rollout=replace(batch.rollout, nll_weight=nll_weight))


def with_column(name: str, values: list[str]) -> dict[str, Dataset]:
    """Rows to train and to evaluate on."""
    rows = tiny.rows().add_column(name, values)
    return {"train_dataset": rows, "eval_dataset": rows}


ADAPTER = LoraConfig(r=4, target_modules="all-linear")
TEACHERS = {"math": get_peft_model(tiny.qwen2(48, seed=1), ADAPTER), "prose": tiny.llama(64, seed=2)}
ROUTED = with_column("teacher", ["math", "prose"] * 4)
OF_SERVER = {"divergence": "total_variation", "student_quantization": "fp8"}
BY_BYTES = {"cross_tokenizer": "bytes", "teacher_processing_class": tiny.tokenizer()}


def some_tokens():
    """A teacher whose server tells the probabilities of some tokens alone."""
    return known_teacher(tiny.qwen2(48, seed=1), "student_top_k", 8)


def configurations(tmp_path):
    """Arguments of the trainer, by name."""
    words = tiny.recorded(tiny.tokenizer())

    def engine() -> dict[str, Any]:
        return {"rollout": Mirrored(tiny.config(tmp_path)), "max_completion_length": 16}

    adder = type("math", (worlds.Adder,), {})
    return {
        "plain": {},
        "bytes": BY_BYTES,
        "bytes, written by the teacher": {**BY_BYTES, "seq_kd": True, "lmbda": 0.5},
        "a pull": {"cls": Pulled},
        "a policy gradient": {**engine(), "divergence": {"sampled_reverse_kl": {"clip_min": 0.1}}},
        "some tokens": {
            "divergence": "total_variation", "token_selection": "student_entropy", "token_fraction": 0.5,
        },
        "its own teacher, LoRA": {
            **with_column("privileged_context", ["a hint"] * 8), "teacher_model": None, "teacher_model_kind": "ema",
            "peft_config": ADAPTER,
        },
        "several teachers": {**ROUTED, "teacher_model": TEACHERS},
        "completions of the dataset": {
            **with_column("completion", ["so"] * 8), "lmbda": 0.5, "per_device_train_batch_size": 8,
        },
        "completions by both models": {"methods": [Blend(0.3)], "rollout": HFRollout()},
        "beginnings of completions": {**with_column("completion_prefix", ["so"] * 8), "rollout": HFRollout()},
        "rewards": {
            "reward_funcs": [rewarded("math"), rewarded("prose")], "reward_weight": 0.1, "num_generations": 2,
            "kl_clip": 0.01, "teacher_prefix_cache_gb": 0.1,
        },
        "remedies": {
            "reward_funcs": rewarded("math"), "teacher_context": "group_success", "success_threshold": -99.0,
            "num_generations": 2, "anchor_weight": 0.1,
        },
        # Which would have an acceptance.
        "a server that tells some tokens": {**OF_SERVER, "teacher_model": some_tokens()},
        "a server beside another teacher": {
            **OF_SERVER, **ROUTED, "teacher_model": {**TEACHERS, "math": some_tokens()}, "loss_aggregation": "teachers",
        },
        "a step that is left out": {"cls": SpoiledOnce, "nonfinite": "skip"},
        "rows that are learned as they end": {"rollout": Apart(words), "overlap": "step"},
        "rows that are written ahead": {  # of one epoch, in which the next step is known
            "rollout": Apart(words), "overlap": "ahead", "train_dataset": tiny.rows(),
        },
        "agents": {
            **worlds.given(worlds.once(worlds.call(number=1)), adder), "max_steps": OPTIONS["max_steps"],
            "eval_dataset": worlds.rows(), "methods": [OffPolicy(weights={"environment": 0.1})],
        },
        "an engine": engine(),
        # Weights move after each step; the first evaluation finds an engine that was never sent any.
        "an engine that is evaluated": {**engine(), "eval_on_start": True},
    }  # fmt: skip


def of_trl(folder) -> set[str]:
    """Names that TRL and transformers log themselves."""
    trainer = DistillationTrainer(
        model=tiny.qwen2(32, seed=0),
        teacher_model=tiny.qwen2(48, seed=1),
        args=DistillationConfig(**tiny.options(folder, **OPTIONS)),
        train_dataset=tiny.rows(),
        eval_dataset=tiny.rows(4),
        processing_class=tiny.tokenizer(),
    )
    trainer.train()
    return {name for row in trainer.state.log_history for name in row}


@pytest.fixture(scope="module")
def logged(make_shared, tmp_path_factory):
    """The logs of every configuration, by name."""
    logs = {}
    for name, given in configurations(tmp_path_factory.mktemp("engines")).items():
        trainer = make_shared(**{**OPTIONS, "eval_dataset": tiny.rows(4), **given})
        trainer.train()
        logs[name] = trainer.state.log_history
    return logs


def test_logged_metrics_match_the_table(logged, tmp_path):
    theirs = of_trl(tmp_path)
    theirs |= {f"{prefix}tools/{what}_frequency" for prefix in ("", "eval_") for what in ("call", "failure")}
    assert {"loss", "entropy", "step_time", "eval_loss"} <= theirs, "TRL has trained and evaluated"
    ours = {
        f"{prefix}{name}".replace("<name>", named)
        for name, one in METRICS.items()
        for prefix in ("", "eval_")
        for named in ("math", "prose")
        if one.logs.evaluated or not prefix
    }
    found = {key for rows in logged.values() for row in rows for key in row} - theirs
    assert found - ours == set(), "logged, and in no row of METRICS"
    assert ours - found == set(), "in METRICS, and logged by no configuration here"
    for name in ("divergence/mean", "entropy/student", "time/complete", "tokens_per_second", "eval_divergence/mean"):
        assert all(any(name in row for row in rows) for rows in logged.values()), name


def test_what_some_tokens_do_not_tell_is_not_logged(logged):
    unknown = ("acceptance", "agreement/", "entropy/teacher")
    for name, rows in logged.items():
        found = {one for one in unknown for row in rows for key in row if key.removeprefix("eval_").startswith(one)}
        if name.startswith("a server"):
            assert found == set()
        elif not name.startswith("bytes"):
            assert found >= {"agreement/", "entropy/teacher"}
    assert "acceptance" in {key for rows in logged.values() for row in rows for key in row}


def test_metrics_are_reduced_as_the_table_says(logged):
    for rows in logged.values():
        for row in rows:
            assert all(math.isfinite(row[name]) for name in METRICS.keys() & row.keys())
    syncs = [row for row in logged["an engine"] if "sync/bytes" in row]
    assert [row["step"] for row in syncs] == [1, 2]
    assert {row["sync/bytes"] for row in syncs} == {BYTES}, "a mean over syncs"
    assert all(row["time/sync"] > row["sync/seconds"] + row["sync/proof_seconds"] for row in syncs)
    assert max(row["rollout/logprob_gap"] for row in syncs) < 1e-4
    of_some = [row for row in logged["some tokens"] if "loss" in row]
    assert [row["acceptance"] for row in of_some] == pytest.approx([1 - row["divergence/mean"] for row in of_some])
    importance = [row["importance/mean"] for row in logged["a policy gradient"] if "loss" in row]
    assert importance == pytest.approx([1, 1], rel=1e-4), "the weights that write are those that learn"
    assert [row["importance/gated"] for row in logged["a policy gradient"] if "loss" in row] == [0, 0]
    of_engine = logged["an engine that is evaluated"]
    sampler = [
        row[name] for name in ("rollout/kl_sampler", "eval_rollout/kl_sampler") for row in of_engine if name in row
    ]
    assert sampler == pytest.approx([0] * 4, abs=1e-9)
    left_out = [row["nonfinite/skipped_steps"] for row in logged["a step that is left out"] if "loss" in row]
    assert left_out == [1, 1]
    for row in (row for row in logged["plain"] if "loss" in row):
        phases = [row[name] for name in ("time/complete", "time/teach", "time/compare")]
        assert 0.5 * row["step_time"] < sum(phases) <= row["step_time"]
    saves = [row["step"] for row in logged["plain"] if "time/save" in row]
    assert saves == [2], "the log after the checkpoint of step 1"


class OneTeacherApart(OPSDTrainer):
    """Counts the rows of one teacher only."""

    def weigh(self, rollout, rows, targets):
        mine = torch.tensor([[row["teacher"] == "prose"] for row in rows])
        return super().weigh(rollout, rows, targets) * mine


def test_metrics_of_a_teacher_cover_its_rows_only(make_trainer):
    found, its = (
        make_trainer(cls, **ROUTED, teacher_model=TEACHERS).evaluate() for cls in (OPSDTrainer, OneTeacherApart)
    )
    of_prose = "divergence/teacher/prose", "entropy/teacher/prose"
    alone = [its["eval_divergence/mean"], its["eval_entropy/teacher"]]
    assert [found[f"eval_{name}"] for name in of_prose] == pytest.approx(alone, rel=1e-5)
    assert found["eval_divergence/teacher/math"] != pytest.approx(found["eval_divergence/teacher/prose"], rel=0.01)
    assert "eval_divergence/teacher/math" not in its, "it had no token"


def test_divergences_by_position_average_to_the_mean(make_trainer):
    trainer = make_trainer(train_dataset=tiny.rows(1), per_device_train_batch_size=1, max_steps=1)
    prompt = tuple(tiny.tokenizer()(tiny.PROMPTS[0])["input_ids"])
    trainer.rollout = FixedRollout({prompt: [*range(10, 30)]})
    trainer.train()
    (row,) = (one for one in trainer.state.log_history if "divergence/mean" in one)
    tenths = [row[f"divergence/position_{tenth}"] for tenth in range(10)]
    assert sum(tenths) / 10 == pytest.approx(row["divergence/mean"], rel=1e-5)
    assert min(tenths) < max(tenths)


class Counting(OPSDTrainer):
    def complete(self, prompt_ids):
        self.record("prompts", float(len(prompt_ids)))
        return super().complete(prompt_ids)


def test_each_evaluation_dataset_has_its_own_metric_names(trained):
    sets = {"short": tiny.rows(4), "long": tiny.rows(6)}
    trainer = trained(cls=Counting, eval_dataset=sets, eval_strategy="steps", eval_steps=1, max_steps=1)
    logs = [row for row in trainer.state.log_history if any(name.startswith("eval_") for name in row)]
    for row, name in zip(logs, sets, strict=True):
        alone = trainer.evaluate(sets[name], metric_key_prefix=f"eval_{name}")
        assert row.keys() == alone.keys() | {"step"}
        assert {key for key in row if not key.startswith(f"eval_{name}_")} == {"epoch", "step"}
        own = ("loss", "divergence/mean", "entropy", "num_tokens", "prompts")
        assert [row[f"eval_{name}_{one}"] for one in own[1:3]] == [
            alone[f"eval_{name}_{one}"] for one in ("loss", own[2])
        ]
        assert {f"eval_{name}_{one}" for one in (*own, "time/complete")} <= row.keys()
    assert logs[0]["eval_short_entropy"] != logs[1]["eval_long_entropy"]
    assert logs[0]["eval_short_prompts"] == 4


def test_evaluations_count_tokens_alike_in_batches_of_any_size(make_trainer):
    found = make_trainer(eval_dataset=tiny.rows(8), per_device_eval_batch_size=3).evaluate()
    assert found["eval_entropy"] == pytest.approx(found["eval_entropy/student"], rel=1e-6)


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_predict_returns_the_completions_in_the_order_of_the_rows(make_trainer, kind):
    rows, words = tiny.rows(7), tiny.tokenizer()
    recorded = {**tiny.recorded(words), tuple(words("a")["input_ids"]): []}
    trainer = make_trainer(rollout=FixedRollout(recorded), per_device_eval_batch_size=4)
    output = trainer.predict(rows if kind == "map" else rows.to_iterable_dataset())
    written = [recorded[tuple(words(row["prompt"])["input_ids"])] for row in rows]
    longest = max(map(len, written))
    assert output.predictions.tolist() == [ids + [-100] * (longest - len(ids)) for ids in written]
    predictions, label_ids, metrics = output
    assert (label_ids, metrics) == (None, output.metrics)
    assert predictions is output.predictions
    assert output.texts == [words.decode(ids, skip_special_tokens=True) for ids in written]
    assert {"", "4", " blue today"} < set(output.texts)
    evaluated = trainer.evaluate(rows, metric_key_prefix="test")
    assert output.metrics.keys() == evaluated.keys() - {"epoch"}
    assert output.metrics["test_loss"] == pytest.approx(evaluated["test_loss"], rel=1e-6) != 0
    assert trainer.state.log_history[0].keys() == evaluated.keys() | {"step"}, "`predict` logs nothing"


def test_predict_with_prediction_loss_only_returns_no_texts(make_trainer):
    output = make_trainer(prediction_loss_only=True).predict(tiny.rows(2))
    assert (output.predictions, output.texts) == (None, [])
    assert output.metrics["test_loss"] > 0


def test_summary_covers_steps_after_the_last_log(trained):
    options = {"max_steps": 3, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3}
    for given in ({}, {**options, "eval_dataset": tiny.rows(2)}):
        trainer = trained(**{**options, "eval_strategy": "no", **given})
        *_, summary = trainer.state.log_history
        assert summary["step"] == 3
        assert {"train_runtime", "divergence/mean", "completions/mean_length", "time/complete"} <= set(summary)
        assert not trainer.model.training or not given
        assert not trainer._metrics["train"]
