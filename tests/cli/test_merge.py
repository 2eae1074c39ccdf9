"""`experts` of a run: what is measured is that of the models themselves; the table says what the student is worth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from support import tiny
from transformers import AutoModelForCausalLM

from trl_opsd.cli.merge import AFTER, AVERAGE, BEFORE, Experts, Metric, table
from trl_opsd.cli.train import main
from trl_opsd.teacher.build import average_of

WORDS = tiny.tokenizer()
LENGTH = 8


def letters(completions: list[str], **_: Any) -> list[float]:
    """How much of a completion is letters."""
    return [sum(map(str.isalpha, one)) / (len(one) or 1) for one in completions]


@pytest.fixture(scope="module")
def disk(tmp_path_factory) -> Path:
    """A base, two full experts of its shape, and rows of each."""
    folder = tmp_path_factory.mktemp("experts")
    for seed, name in enumerate(("base", "one", "two")):
        model = tiny.qwen2(32, seed=seed)
        model.save_pretrained(folder / name)
        WORDS.save_pretrained(folder / name)
    for name, some in (("one", slice(0, 6)), ("two", slice(2, 8))):
        tiny.Dataset.from_dict({"prompt": tiny.PROMPTS[some]}).to_json(folder / f"{name}.jsonl")
        tiny.Dataset.from_dict({"prompt": tiny.PROMPTS[:3]}).to_json(folder / f"{name}-test.jsonl")
    return folder


def file(disk: Path, out: Path, **more: Any) -> str:
    """The file of a run."""
    experts = {
        name: {
            "model": str(disk / name),
            "dataset": str(disk / f"{name}.jsonl"),
            "test": str(disk / f"{name}-test.jsonl"),
            "metric": f"{__name__}.letters",
        }
        for name in ("one", "two")
    }
    options = tiny.options(out / "run", eval_temperature=0.0, max_completion_length=LENGTH, learning_rate=1e-2)
    path = out / "experts.yaml"
    path.write_text(yaml.safe_dump(options | {"model_name_or_path": str(disk / "base"), "experts": experts} | more))
    return str(path)


def measured(model: Any) -> float:
    """By `generate`, greedily and row by row."""
    texts = []
    for prompt in tiny.PROMPTS[:3]:
        ids = torch.tensor([WORDS(prompt)["input_ids"]])
        said = model.generate(ids, max_new_tokens=LENGTH, do_sample=False, pad_token_id=WORDS.pad_token_id)
        texts.append(WORDS.decode(said[0, ids.size(1) :], skip_special_tokens=True))
    found = letters(texts)
    return sum(found) / len(found)


def loaded(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def test_everybody_is_measured_and_the_student_is_trained(disk, tmp_path, capsys):
    trainer = main(["--config", file(disk, tmp_path, max_steps=2)])
    run = tmp_path / "run"
    found = json.loads((run / "experts.json").read_text())["accuracy"]
    average = loaded(disk / "one")
    for one, other in zip(average.parameters(), loaded(disk / "two").parameters(), strict=True):
        one.data = (one.data + other.data) / 2
    models = {
        "one": loaded(disk / "one"),
        "two": loaded(disk / "two"),
        AVERAGE: average,
        BEFORE: loaded(disk / "base"),
        AFTER: trainer.model,
    }
    assert {name: [*of] for name, of in found.items()} == {name: ["one", "two"] for name in models}
    for name, model in models.items():
        assert found[name]["one"] == found[name]["two"] == pytest.approx(measured(model), abs=1e-6), name
    assert len({of["one"] for of in found.values()}) == 5, "else a model could be another"
    lines = table(found, {"one": 3, "two": 3})
    assert "\n".join(lines) in capsys.readouterr().out
    assert (run / "README.md").read_text().rstrip().endswith("\n".join(lines))
    assert {*trainer.teachers} == {"one", "two"}
    assert {"rewards/one/mean", "rewards/two/mean"} & {name for row in trainer.state.log_history for name in row}


def test_an_average_merges_adapters(disk, tmp_path):
    adapted = get_peft_model(
        loaded(disk / "base"), LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    )
    adapted.save_pretrained(tmp_path / "adapter")
    args = tiny.config(tmp_path)
    found = average_of([str(disk / "one"), str(tmp_path / "adapter")], args)
    merged = adapted.merge_and_unload()
    for mine, one, two in zip(found.parameters(), loaded(disk / "one").parameters(), merged.parameters(), strict=True):
        torch.testing.assert_close(mine, (one + two) / 2)
    tiny.qwen2(48, 1).save_pretrained(tmp_path / "wide")
    with pytest.raises(ValueError, match="their weights differ in names or shapes"):
        average_of([str(disk / "one"), str(tmp_path / "wide")], args)


def weighted(completions: list[str], weight: list[int], trainer_state: int, **_: Any) -> list[float]:
    return [trainer_state * one for one in weight]


async def awaited(**given: Any) -> list[float]:
    return weighted(**given)


@pytest.mark.parametrize("function", [weighted, awaited])
def test_a_metric_is_of_the_rows_of_its_expert(function):
    metric = Metric("one", function)
    given = {"teacher": ["two", "one", "one"], "completions": ["", "", ""], "weight": [1, 2, 3]}
    assert metric(**given, trainer_state=10) == [None, 20, 30]
    assert metric(**{name: values[:1] for name, values in given.items()}, trainer_state=10) == [None]


def test_the_share_of_the_headroom_is_that_of_the_means():
    found = {
        "a": {"a": 0.9, "b": 0.1}, "b": {"a": 0.2, "b": 0.7}, BEFORE: {"a": 0.3, "b": 0.3}, AFTER: {"a": 0.6, "b": 0.5},
    }  # fmt: skip
    assert table(found, {"a": 1, "b": 1})[-1] == f"| {AFTER} | 0.600 | 0.500 | 0.550 | 50% |"
    del found["b"]  # behind a server
    assert table(found, {"a": 1, "b": 1})[-1] == f"| {AFTER} | 0.600 | 0.500 | 0.550 | – |"


WHOLE = {"model": "m", "dataset": "d", "metric": "x"}
OTHER = {**WHOLE, "metric": "accuracy_reward"}
BAD: list[tuple[str, dict[str, Any]]] = [
    ("at least two", {"experts": ["a"]}),
    ("at least two", {"experts": {"a": WHOLE}}),
    (r"a\.metric", {"experts": {"a": {"model": "m", "dataset": "d"}, "b": OTHER}}),
    (r"a\.data", {"experts": {"a": {**WHOLE, "data": 1}, "b": OTHER}}),
    ("`dataset_name`", {"dataset_name": "rows"}),
    ("`teacher_models`", {"teacher_models": {"a": "b"}}),
    ("`teacher_model_kind`", {"teacher_model_kind": "base"}),
    ("`rewards`", {"methods": {"rewards": {"functions": ["accuracy_reward"]}}}),
]


@pytest.mark.refusal
@pytest.mark.quick
@pytest.mark.parametrize(("named", "more"), BAD)
def test_a_wrong_file_is_refused(disk, tmp_path, named, more):
    with pytest.raises(ValueError, match=named):
        main(["--config", file(disk, tmp_path, **more)])


def test_a_resume_measures_the_student_alone(disk, tmp_path):
    given = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    main(["--config", file(disk, tmp_path, **given)])
    known = tmp_path / "run" / "experts.json"
    marked = {name: {"one": 7.0, "two": 7.0} for name in json.loads(known.read_text())["accuracy"]}
    known.write_text(json.dumps({"accuracy": marked}))
    main(["--config", file(disk, tmp_path, **given), "--resume_from_checkpoint", str(tmp_path / "run/checkpoint-1")])
    found = json.loads(known.read_text())["accuracy"]
    assert [name for name in found if found[name] != marked[name]] == [AFTER]


@pytest.mark.long
def test_a_used_folder_is_measured_again_for_another_student(disk, tmp_path, capsys):
    main(["--config", file(disk, tmp_path, max_steps=1)])
    first = json.loads((tmp_path / "run" / "experts.json").read_text())["accuracy"]
    (tmp_path / "run" / "README.md").unlink()
    capsys.readouterr()
    main(["--config", file(disk, tmp_path, max_steps=1), "--model_name_or_path", str(disk / "two")])
    again = json.loads((tmp_path / "run" / "experts.json").read_text())["accuracy"]
    assert again[BEFORE] == first["two"] != first[BEFORE]
    assert capsys.readouterr().out.count("share of the headroom") == 1, "none of the first training"


@pytest.mark.long
def test_what_is_measured_does_not_change_the_training(disk, tmp_path, monkeypatch):
    adapted = get_peft_model(loaded(disk / "one"), LoraConfig(target_modules="all-linear", init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    found = []
    for place in ("measured", "not"):
        (tmp_path / place).mkdir()
        if place == "not":
            monkeypatch.setattr(Experts, "evaluate", lambda *_: None)
        path = Path(file(disk, tmp_path / place, use_peft=True, lora_target_modules="all-linear"))
        path.write_text(path.read_text().replace(str(disk / "one") + "\n", str(tmp_path / "adapter") + "\n"))
        found.append(tiny.weights(main(["--config", str(path)])))
    assert torch.equal(*found)
