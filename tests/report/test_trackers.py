"""What trackio, TensorBoard and W&B get of a training.

Run by `make trackers`, which installs them apart; not part of `make test`.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from datasets import Dataset
from environments.worlds import call, given, once, rows
from support import tiny

from trl_opsd.report.records import recorded_in

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
    assert sum("completions" in row for row in rows) == len(trainer.state.log_history), "a table for each log"

    last = dict(wandb.run.summary)
    for name, points in expected.items():
        value = last[name]
        assert value == pytest.approx(points[-1][1]) or math.isnan(points[-1][1]), name
    wandb.finish()


def test_every_sample_is_a_trace_of_its_tokens(make_tracked, trackio, tmp_path, project):
    make_tracked("trackio").train()
    recorded = recorded_in(tmp_path)
    assert [(one.split, one.step) for one in recorded] == [
        *[("eval", 0), ("train", 0), ("eval", 2), ("train", 2), ("eval", 3)]
    ]
    traces = trackio.SQLiteStorage.get_traces(project, "one", sort="step_asc")
    by_name = {(trace["key"], trace["metadata"]["optimizer_steps"]): trace for trace in traces}
    assert len(by_name) == len(traces) == sum(len(one.samples) for one in recorded)
    for one in recorded:
        for number, sample in enumerate(one.samples):
            trace = by_name[f"{one.split}/sample_{number}", one.step]
            prompt, completion = (message["content"] for message in trace["messages"])
            assert (prompt, completion) == (sample.prompt, "".join(token.text for token in sample.tokens))
            nats = [token.divergence for token in sample.tokens]
            assert float(trace["metadata"]["divergence"]) == pytest.approx(sum(nats) / len(nats), rel=1e-2)
            for token, span in zip(sample.tokens, trace["spans"], strict=True):
                nats, unit = span["name"].split()[-2:]
                assert (float(nats), unit) == (pytest.approx(token.divergence, abs=0.01), "nats")
                assert span["metadata"] == {
                    name: pytest.approx(getattr(token, name), rel=1e-3) for name in ("divergence", "student", "teacher")
                }
                assert len(span["output"].splitlines()) == 1 + len(token.choices)


def test_trace_of_an_agent_has_a_message_for_each_turn(make_tracked, trackio, project):
    make_tracked("trackio", **given(once(call(number=2)), eval_dataset=rows(1))).train()
    trace = next(one for one in trackio.SQLiteStorage.get_traces(project, "one") if one["key"].startswith("eval"))
    assert [message["role"] for message in trace["messages"]] == ["user", "assistant", "tool", "assistant"]
    _, first, answer, last = (message["content"] for message in trace["messages"])
    assert first == call(number=2)
    assert "<tool_response>\n2\n</tool_response>" in answer
    assert last == "done<|im_end|>"
    assert len(trace["spans"]) == len(first + last) - 2 * (len("<|im_end|>") - 1), "one for each generated token"


def test_privileged_context_is_not_logged(make_tracked, trackio, tmp_path, project):
    trainer = make_tracked("trackio", "tensorboard", log_completions=True)
    trainer.train()
    assert recorded_in(tmp_path)
    assert trackio.SQLiteStorage.get_traces(project, "one")
    for folder in (tmp_path, Path(trackio.utils.TRACKIO_DIR)):
        stored = [file.read_bytes() for file in folder.rglob("*") if file.is_file()]
        assert any(tiny.PROMPTS[0].encode() in content for content in stored)
        assert not any(SECRET.encode() in content for content in stored)


def test_tracker_not_in_report_to_gets_nothing(make_tracked, trackio, project):
    make_tracked("tensorboard").train()
    assert not trackio.SQLiteStorage.get_runs(project)


def test_trackio_without_traces_only_loses_the_traces(make_tracked, trackio, tmp_path, project, monkeypatch, caplog):
    monkeypatch.delattr(trackio, "Trace")
    trainer = make_tracked("trackio")
    trainer.train()
    assert trainer.state.global_step == 3
    assert caplog.text.count("samples cannot be sent to trackio") == 1
    assert len(recorded_in(tmp_path)) == 5
    assert (tmp_path / "report.html").exists()
    assert trackio.SQLiteStorage.get_logs(project, "one")
