"""What trackio, TensorBoard and W&B get of a training.

Run by `make trackers`, which installs them apart; not part of `make test`.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from datasets import Dataset
from support import tiny

from trl_opsd.report.samples import recorded_in

pytestmark = pytest.mark.trackers

SECRET = "the secret is 7"


@pytest.fixture(scope="module")
def trackio():
    return pytest.importorskip("trackio")


@pytest.fixture
def project(tmp_path):
    return tmp_path.parent.name + tmp_path.name


@pytest.fixture
def make_tracked(make_trainer, tmp_path, monkeypatch, project):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    rows = Dataset.from_dict({"prompt": tiny.PROMPTS, "privileged_context": [SECRET] * 8})

    def make(*names: str, **given):
        options = {
            **{"report": True, "report_to": list(names), "project": project, "run_name": "one", "logging_steps": 1},
            **{"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True, "eval_dataset": rows.select(range(4))},
        }
        return make_trainer(**{**options, "train_dataset": rows, "reward_funcs": even, **given})

    return make


def even(completions, **_):
    return [float(len(one) % 2 == 0) for one in completions]


def numbers_of(log):
    """What transformers passes on of the entries of a log, by name, with the steps."""
    found = {}
    for entry in log:
        for name, value in entry.items():
            if name != "step" and not name.startswith(("train_", "total_flos")):
                shown = "eval/" + name.removeprefix("eval_") if name.startswith("eval_") else f"train/{name}"
                found.setdefault(shown, []).append((entry["step"], value))
    return found


def of_tensorboard(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(next(folder.rglob("events.out.*")).parent))
    events.Reload()
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_trackers_get_every_number_of_the_log_under_its_group(make_tracked, trackio, tmp_path, project):
    import wandb

    trainer = make_tracked("trackio", "tensorboard", "wandb", log_completions=True)
    trainer.train()
    expected = numbers_of(trainer.state.log_history)
    groups = {name.rpartition("/")[0] for name in expected}
    assert {f"{of}/{group}" for of in ("train", "eval") for group in ("divergence", "time", "completions")} <= groups
    assert {"eval/rewards/even", "train", "eval"} <= groups

    shown = of_tensorboard(tmp_path)
    assert expected.keys() <= shown.keys()
    for name, points in expected.items():
        assert shown[name] == [(step, pytest.approx(value, rel=1e-5, nan_ok=True)) for step, value in points], name

    rows = trackio.SQLiteStorage.get_logs(project, "one")
    for name, points in expected.items():
        theirs = [(row["train/global_step"], row[name]) for row in rows if name in row]
        assert theirs == [(step, pytest.approx(value, nan_ok=True)) for step, value in points], name
    assert sum("completions" in row for row in rows) == len(trainer.state.log_history) - 1, "not for the summary"

    last = dict(wandb.run.summary)
    for name, points in expected.items():
        value = last[name]
        assert value == pytest.approx(points[-1][1]) or math.isnan(points[-1][1]), name
    wandb.finish()


def test_privileged_context_is_not_logged(make_tracked, trackio, tmp_path, project):
    trainer = make_tracked("trackio", "tensorboard", log_completions=True)
    trainer.train()
    assert recorded_in(tmp_path)
    for folder in (tmp_path, Path(trackio.utils.TRACKIO_DIR)):
        stored = [file.read_bytes() for file in folder.rglob("*") if file.is_file()]
        assert any(tiny.PROMPTS[0].encode() in content for content in stored)
        assert not any(SECRET.encode() in content for content in stored)


def test_tracker_not_in_report_to_gets_nothing(make_tracked, trackio, project):
    make_tracked("tensorboard").train()
    assert not trackio.SQLiteStorage.get_runs(project)
