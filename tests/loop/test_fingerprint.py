"""A run resumes only from a checkpoint with its own fingerprint, unless the differences are accepted by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from support import tiny

from trl_opsd import OPSDTrainer
from trl_opsd.checkpoints import MANIFEST
from trl_opsd.data.datasets import describe_rows
from trl_opsd.loop.fingerprint import FILE, describe_function
from trl_opsd.losses import Divergence, ReverseKL
from trl_opsd.losses.divergence import describe
from trl_opsd.models.weights import digest, sampled


@pytest.fixture
def checkpoint(make_trainer, tmp_path: Path) -> Path:
    """After the first of three steps of a run with the default options of `make_trainer`."""
    make_trainer(save_strategy="steps", save_steps=1, max_steps=1).train()
    return tmp_path / "checkpoint-1"


def test_each_checkpoint_has_the_fingerprint_as_json(checkpoint):
    said = json.loads((checkpoint / FILE).read_text())
    assert said["divergence"] == "ReverseKL()"
    assert said["teachers"] == {"teacher": "Qwen2ForCausalLM [259, 48]"}
    assert said["train_dataset"].startswith("8 rows, digest ")
    assert said["teacher_weights"]["teacher"].startswith("sha256 ")
    assert (said["student"], said["adapter"]) == ("Qwen2ForCausalLM [259, 32]", None), "all of it is in the checkpoint"
    expected = {"temperature": 1.0, "gradient_accumulation_steps": 1, "world_size": 1, "optimizer": "adamw_torch"}
    assert expected.items() <= said.items()


@pytest.mark.refusal
def test_all_differences_are_listed_with_the_option_that_accepts_them(make_trainer, checkpoint):
    changed: dict[str, Any] = {"temperature": 0.7, "beta": 0.0}
    with pytest.raises(ValueError, match=r"temperature: 1\.0") as raised:
        make_trainer(**changed, resume_with_changes=["divergence"]).train(resume_from_checkpoint=str(checkpoint))
    assert "divergence: " not in str(raised.value), "only what was not accepted"
    assert "resume_with_changes=['divergence', 'temperature']" in str(raised.value)


def test_accepted_differences_are_logged_and_saved_in_the_next_checkpoint(trained, checkpoint, tmp_path, caplog):
    options = {"beta": 0.0, "resume_with_changes": ["divergence"], "save_strategy": "steps", "save_steps": 1}
    assert trained(**options, resume=True).state.global_step == 3
    assert "divergence: 'ReverseKL()' in the checkpoint, 'ForwardKL()' now" in caplog.text
    assert json.loads((tmp_path / "checkpoint-3" / FILE).read_text())["divergence"] == "ForwardKL()"


def test_a_checkpoint_without_fingerprint_is_resumed_with_a_warning(trained, checkpoint, caplog):
    (checkpoint / FILE).unlink()
    (checkpoint / MANIFEST).unlink()  # else the manifest reveals the change
    assert trained(beta=0.0, resume=str(checkpoint)).state.global_step == 3
    assert f"has no {FILE}" in caplog.text


def test_a_weight_digest_ignores_dtype_and_adapter_wrapping():
    plain = digest(sampled(tiny.qwen2(32, 0)))
    lora = get_peft_model(tiny.qwen2(32, 0), LoraConfig(target_modules="all-linear", modules_to_save=["lm_head"]))
    assert {plain, digest(sampled(tiny.qwen2(32, 0).bfloat16())), digest(sampled(lora))} == {plain}
    lora.get_base_model().model.layers[1].mlp.up_proj.base_layer.weight.data.mul_(1.02)
    assert len({plain, digest(sampled(lora)), digest(sampled(tiny.qwen2(32, 1)))}) == 3


def test_row_digest_depends_on_columns_read_not_on_storage():
    rows = tiny.rows()
    with_ids = rows.add_column("id", list(range(8)))
    same = [rows.flatten_indices(), with_ids, rows.with_format("torch"), rows.select(range(8))]
    assert {describe_rows(one, ["prompt"]) for one in same} == {describe_rows(rows, ["prompt"])}
    other = [rows.select([1, 0, *range(2, 8)]), rows.select(range(7)), rows.rename_column("prompt", "teacher_prompt")]
    other.append(Dataset.from_list([{"prompt": text + " "} for text in rows["prompt"]]))
    assert len({describe_rows(one, ["prompt", "teacher_prompt"]) for one in [rows, *other]}) == 5
    assert describe_rows(with_ids, None) != describe_rows(rows, None)
    assert describe_rows(rows.to_iterable_dataset(), ["prompt"]) == "a stream"


class Own(Divergence):
    def value(self, log_student_RV, log_teacher_RV):
        return ReverseKL().value(log_student_RV, log_teacher_RV)


class Plain(Own):
    def __init__(self, setting):
        self.setting, self._cache = setting, object()


@dataclass(frozen=True)
class Fields(Own):
    setting: Any


@pytest.mark.quick
@pytest.mark.parametrize("kind", [Plain, Fields])
def test_divergence_settings_are_described_alike_in_all_processes(kind):
    def made():
        table = torch.arange(300_000.0)
        return [0.3, 0.4, lambda logits: logits, table, table[:-1], table + (table == 5000), table.bfloat16()]

    one, other = ([describe(kind(setting)) for setting in made()] for _ in range(2))
    assert one == other
    assert len(set(one)) == len(one)
    assert one[0] == f"{kind.__name__}(setting=0.3)"
    assert describe(kind(made()[3].numpy())) == one[3]
    assert all(len(text) < 130 for text in [*one, describe(kind(["a word"] * 1000))])


@pytest.mark.refusal
def test_resume_refuses_another_setting_of_a_divergence(trained):
    options = {"save_strategy": "steps", "save_steps": 1}
    trained(divergence=Plain(len), max_steps=1, **options)
    with pytest.raises(ValueError, match=r"divergence: 'Plain\(setting=<.*len>\)' in the checkpoint, 'Plain\(.*0\.3"):
        trained(divergence=Plain(0.3), **options, resume=True)
    assert trained(divergence=Plain(len), max_steps=2, **options, resume=True).state.global_step == 2


class Weighing(OPSDTrainer):
    def weigh(self, rollout, rows, targets):
        return super().weigh(rollout, rows, targets)


class WeighingOtherwise(Weighing):
    def weigh(self, rollout, rows, targets):
        return 0.5 * super().weigh(rollout, rows, targets)


def told(row, text, more):
    return row["prompt"] + more


def telling(more):
    return lambda row, text: row["prompt"] + more


@pytest.mark.refusal
def test_changed_functions_are_refused_by_name(trained):
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    trained(Weighing, teacher_prompt_fn=telling("!"), **options)
    resumed = {**options, "max_steps": 2, "resume": True}
    for kind, function, named in (
        (WeighingOtherwise, lambda row, text: text, r"'teacher_prompt_fn': 'test_.*'weigh': 'WeighingOtherwise.weigh'"),
        (OPSDTrainer, telling("!"), r"\{'weigh': 'Weighing.weigh'\} in the checkpoint, \{'weigh': None\}"),
    ):
        with pytest.raises(ValueError, match=rf"functions: .*{named}(?s:.*)=\['functions'\]"):
            trained(kind, teacher_prompt_fn=function, **resumed)
    trained(Weighing, teacher_prompt_fn=telling("!"), **resumed)


def test_functions_are_described_by_name_and_version():
    assert describe_function(partial(told, more="?")) == "told"
    assert [describe_function(one) for one in (Plain(1), Weighing.weigh, len)] == ["Plain", "Weighing.weigh", "len"]
    versioned = telling("!")
    versioned.__version__ = "2"
    assert describe_function(versioned) == "telling.<locals>.<lambda>, version 2"
