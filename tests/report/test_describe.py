"""A trainer in words: what banner and model card say is what really runs, whether or not an option asked for it."""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from pathlib import Path

import pytest
from datasets import IterableDataset
from huggingface_hub import HfApi, ModelCard, RepoUrl
from support import tiny

from trl_opsd import OPSDTrainer

pytestmark = pytest.mark.quick


def parts(trainer: OPSDTrainer) -> dict[str, str]:
    """The entries of the description by name, unwrapped."""
    first, *lines = repr(trainer).splitlines()
    assert first == type(trainer).__name__
    found: dict[str, str] = {}
    for line in lines:
        if line[2] != " ":  # else the line goes on with the entry above it
            name, _, text = line.strip().partition("  ")
            found[name] = text.strip()
        else:
            found[name] += " " + line.strip()
    return found


def megabytes(parameters) -> str:
    return f"{sum(one.numel() * one.element_size() for one in parameters) / 1e6:.2f} MB"


def test_models_steps_and_options_are_those_of_the_run(make_trainer, tmp_path):
    tiny.qwen2(48, seed=1).bfloat16().save_pretrained(tmp_path / "teacher")
    options = {"divergence": "jsd", "temperature": 0.7, "gradient_accumulation_steps": 2, "learning_rate": 3e-4}
    options |= {"token_selection": "prefix", "token_fraction": 0.5}
    found = parts(trainer := make_trainer(teacher_model=str(tmp_path / "teacher"), **options))
    size = megabytes(trainer.teacher.model.parameters())
    expected = {
        "student": f"Qwen2ForCausalLM, {megabytes(trainer.model.parameters())} in float32",
        "teacher": f"Qwen2ForCausalLM {str(tmp_path / 'teacher')!r}, {size} in bfloat16, on cpu",
        "steps": "3 of 4 prompts each: 2 per device x 1 processes x 2 accumulation steps",
        "objective": f"{trainer.divergence!r}, temperature 0.7",
        "methods": "TokenSelection(criterion='prefix', fraction=0.5)",
        "optimizer": "adamw_torch_fused, learning rate 0.0003",
    }
    assert {name: found[name] for name in expected} == expected


def test_prompts_of_student_and_teacher_and_unread_columns_are_shown(make_trainer):
    rows = (
        tiny.rows().add_column("teacher_prompt", ["so: " + row for row in tiny.PROMPTS]).add_column("id", [*range(8)])
    )
    found = parts(make_trainer(train_dataset=rows, shuffle_dataset=False))
    assert found["prompt"].endswith(f": {tiny.PROMPTS[0]!r}")
    assert found["teacher's prompt"].endswith(f": 'so: {tiny.PROMPTS[0]}'")
    assert found["unused columns"] == "'id'"
    assert parts(make_trainer())["teacher's prompt"] == "the same"


# ---- The banner ------------------------------------------------------------------------------------------------------


@pytest.mark.refusal
def test_a_stream_without_rows_is_refused_when_a_training_begins(make_trainer):
    trainer = make_trainer(train_dataset=IterableDataset.from_generator(lambda: iter([])))
    with pytest.raises(ValueError, match="the stream is empty"):
        trainer.train()


# ---- The model card -------------------------------------------------------------------------------------------------


def card_of(trainer, **given) -> ModelCard:
    trainer.create_model_card(**given)
    card = ModelCard.load(f"{trainer.args.output_dir}/README.md")
    assert "None" not in card.text
    return card


def test_the_card_shows_no_addresses_of_servers(make_trainer, monkeypatch):
    trainer = make_trainer()
    behind = "'/home/me/large' behind http://10.0.0.1:8000 and https://b.example/v1"
    monkeypatch.setattr(type(trainer.teacher), "__str__", lambda _: behind)
    assert "- Teacher: 'large' behind a server and a server\n" in card_of(trainer).text


class LocalHub(HfApi):
    """The Hub's client, whose repositories are folders."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def create_repo(self, repo_id, **_):
        (self.folder / repo_id).mkdir(parents=True, exist_ok=True)
        return RepoUrl(f"https://huggingface.co/{repo_id}")

    def upload_folder(self, *, repo_id, folder_path, ignore_patterns=(), **_):
        ignored = shutil.ignore_patterns(*ignore_patterns)
        shutil.copytree(folder_path, self.folder / repo_id, dirs_exist_ok=True, ignore=ignored)
        uploaded = Future()
        uploaded.set_result(None)
        return uploaded


def test_pushed_model_has_the_whole_card(make_trainer, tmp_path, monkeypatch):
    hub = LocalHub(tmp_path / "hub")
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: hub)
    trainer = make_trainer(
        **{"max_steps": 1, "logging_steps": 1, "output_dir": str(tmp_path / "run"), "save_strategy": "epoch"},
        **{"push_to_hub": True, "hub_model_id": "me/mine", "log_completions": True},
    )
    trainer.train()
    trainer.save_model()
    card = ModelCard.load(hub.folder / "me/mine/README.md")
    assert "None" not in card.text
    assert 'model="me/mine"' in card.text
    assert {"trl", "opsd"} <= set(card.data.tags)
    assert (tmp_path / "run/checkpoint-1").exists()
    uploaded = {path.name for path in (hub.folder / "me/mine").iterdir()}
    assert {"README.md", "model.safetensors", "tokenizer.json", "completions"} <= uploaded
    assert "checkpoint-1" not in uploaded
