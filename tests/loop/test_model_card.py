"""The model card says which model was trained, who taught it, and by which method; nothing in it is "None"."""

from __future__ import annotations

import re
import shutil
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi, ModelCard, RepoUrl
from peft import LoraConfig
from support import tiny

import trl_opsd
from trl_opsd import FrozenTeacher, HFRollout, Teacher
from trl_opsd.losses import DIVERGENCES
from trl_opsd.losses.registry import Settings

GKD, OPSD = "2306.13649", "2601.18734"


def card_of(trainer, **given) -> ModelCard:
    trainer.create_model_card(**given)
    card = ModelCard.load(f"{trainer.args.output_dir}/README.md")
    assert "None" not in card.text
    return card


def named(model, path):
    model.config._name_or_path = path
    return model


@pytest.mark.parametrize("adapter", [None, LoraConfig(r=4, target_modules="all-linear")], ids=["full", "adapter"])
def test_a_model_that_is_saved_elsewhere_has_our_card(make_trainer, tmp_path, adapter):
    trainer = make_trainer(peft_config=adapter, max_steps=1, save_strategy="no", output_dir=tmp_path / "run")
    trainer.train()
    trainer.save_model(tmp_path / "final")
    card = ModelCard.load(tmp_path / "final" / "README.md")
    assert "# Model Card for final" in card.text
    assert "- Objective: `ReverseKL()` at temperature 1" in card.text
    assert not (tmp_path / "run" / "README.md").exists()
    assert trainer.args.output_dir == str(tmp_path / "run")
    trainer.save_model()
    assert "# Model Card for run" in ModelCard.load(tmp_path / "run" / "README.md").text


@pytest.mark.quick
def test_the_card_links_models_of_the_hub(make_trainer):
    trainer = make_trainer(
        model=named(tiny.qwen2(32), "Qwen/Qwen2.5-0.5B"),
        teacher_model=named(tiny.qwen2(48, seed=1), "Qwen/Qwen2.5-1.5B"),
        divergence="reverse_kl",
        temperature=0.7,
    )
    card = card_of(trainer, model_name="mine", dataset_name="someone/prompts", tags="maths")
    assert "# Model Card for mine" in card.text
    assert (
        "This model is a fine-tuned version of [Qwen/Qwen2.5-0.5B](https://huggingface.co/Qwen/Qwen2.5-0.5B) on the "
        "[someone/prompts](https://huggingface.co/datasets/someone/prompts) dataset."
    ) in card.text
    assert "- Teacher: [Qwen/Qwen2.5-1.5B](https://huggingface.co/Qwen/Qwen2.5-1.5B)\n" in card.text
    assert "- Objective: `ReverseKL()` at temperature 0.7" in card.text
    assert GKD in card.text
    assert OPSD not in card.text
    assert card.data.base_model == "Qwen/Qwen2.5-0.5B"
    assert {"maths", "trl", "opsd"} <= set(card.data.tags)


def test_the_card_names_models_that_are_not_on_the_hub(make_trainer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    card = card_of(make_trainer(model=tiny.llama()))
    assert "a fine-tuned version of an unnamed `LlamaForCausalLM`." in card.text
    assert "- Teacher: an unnamed `Qwen2ForCausalLM`\n" in card.text
    tiny.qwen2(32).save_pretrained(tmp_path / "small")
    tiny.qwen2(48, seed=1).save_pretrained(tmp_path / "large")
    adapter = LoraConfig(r=4, target_modules="all-linear")
    trainer = make_trainer(
        model=str(tmp_path / "small"), teacher_model=str(tmp_path / "large"), peft_config=adapter, output_dir="here"
    )
    card = card_of(trainer)
    assert "# Model Card for here" in card.text
    assert "a fine-tuned version of `small` (a local `Qwen2ForCausalLM`)." in card.text
    assert "- Teacher: `large` (a local `Qwen2ForCausalLM`)\n" in card.text
    assert 'model="here"' in card.text
    assert str(tmp_path) not in str(card), "whose folders these are is nobody's business"
    assert card.data.base_model is None


def test_card_knows_a_model_in_the_hubs_cache(make_trainer):
    path = "/home/me/.cache/huggingface/hub/models--Qwen--Qwen2.5-0.5B/snapshots/0123abcd"
    card = card_of(make_trainer(model=named(tiny.qwen2(32), path)))
    assert "of [Qwen/Qwen2.5-0.5B](https://huggingface.co/Qwen/Qwen2.5-0.5B)." in card.text
    assert card.data.base_model == "Qwen/Qwen2.5-0.5B"


def test_card_names_version_seed_and_papers_of_what_was_used(make_trainer):
    trainer = make_trainer(
        divergence="skewed_reverse_kl",
        token_selection="student_entropy",
        token_fraction=0.5,
        teacher_context="group_success",
        num_generations=2,
        reward_funcs=lambda completions, **_: [1.0] * len(completions),
        seed=7,
    )
    text = card_of(trainer).text
    assert f"- Made with: trl_opsd {trl_opsd.__version__}, torch {torch.__version__.partition('+')[0]}" in text
    assert ", seed 7\n" in text
    [line] = [line for line in text.splitlines() if line.startswith("- Objective and methods follow: ")]
    named = re.findall(r"\[arXiv ([\d.]+)\]\(https://arxiv.org/abs/\1\)", line)
    assert sorted(named) == ["2402.03898", "2601.20802"]  # DistiLLM, SDPO


def test_papers_of_divergences_are_those_of_their_page():
    page = (Path(trl_opsd.__file__).parents[1] / "docs" / "objectives.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r'^\| `"(\w+)"`.* arXiv ([\d.]+) \|$', page, re.MULTILINE))
    rows = {name: rows[name] for name in DIVERGENCES if name in rows}
    assert len(rows) > 8
    for name, paper in rows.items():
        assert paper in re.findall(r"arXiv\s+([\d.]+\d)", type(DIVERGENCES[name](Settings())).__doc__), name


@pytest.mark.parametrize(
    ("kind", "lora", "said"),
    [
        ("base", True, "the model itself before training, without its adapter"),
        ("base", False, "the model itself before training"),
        ("ema", True, "an exponential moving average of the model itself (`teacher_update_rate=0.05`)"),
        ("live", False, "the current model itself"),
    ],
)
def test_the_card_of_a_student_that_teaches_itself_cites_opsd(make_trainer, kind, lora, said):
    trainer = make_trainer(
        teacher_model=None,
        teacher_model_kind=kind,
        train_dataset=tiny.rows().add_column("privileged_context", ["a hint"] * 8),
        peft_config=LoraConfig(r=4, target_modules="all-linear") if lora else None,
    )
    card = card_of(trainer)
    assert f"- Teacher: {said}, given context that the student did not see\n" in card.text
    assert OPSD in card.text
    assert "Zhao" in card.text
    assert "Agarwal" not in card.text


class Own(Teacher):
    """Another teacher behind an interface."""

    def __init__(self, inner: FrozenTeacher) -> None:
        self._inner = inner

    head = property(lambda self: self._inner.head)
    context = None
    reading = property(lambda self: self._inner.reading)

    def targets(self, rollout):
        return self._inner.targets(rollout)


def test_the_card_lists_several_teachers(make_trainer):
    inner = make_trainer().teacher
    trainer = make_trainer(
        teacher_model={"maths": tiny.qwen2(48, seed=1), "prose": Own(inner)},
        train_dataset=tiny.rows().add_column("teacher", ["maths", "prose"] * 4),
    )
    card = card_of(trainer)
    assert "- Teacher `maths`: an unnamed `Qwen2ForCausalLM`\n- Teacher `prose`: a `Own`\n" in card.text


def test_saving_a_checkpoint_writes_the_card_beside_it(make_trainer, tmp_path):
    make_trainer(divergence="jsd", save_strategy="steps", save_steps=1, max_steps=1).train()
    card = ModelCard.load(tmp_path / "README.md")
    assert f"# Model Card for {tmp_path.name}\n" in card.text
    assert "- Objective: `GeneralizedJSD(beta=0.5)` at temperature 1," in card.text
    assert "- Steps: 1 of 2 prompts each: 2 per device x 1 processes x 1 accumulation steps; 1 done" in card.text


def brief(completions, **_):
    return [float(len(one) < 5) for one in completions]


def test_the_card_has_settings_and_the_first_and_last_figures(make_trainer):
    trainer = make_trainer(
        max_steps=3, logging_steps=1, learning_rate=1e-3, reward_funcs=brief, rollout=HFRollout(),
        eval_dataset={"sums": tiny.rows(2), "a|b": tiny.rows(2)}, eval_strategy="steps", eval_steps=1,
    )  # fmt: skip
    assert "| first | last |" not in card_of(trainer).text, "there is nothing to show yet"
    trainer.train()
    card = card_of(trainer)
    assert "- Completions: by transformers, at most " in card.text
    assert "- Optimizer: AdamW, learning rate 0.001\n" in card.text
    assert "- Rewards: brief, logged only\n" in card.text
    logs = tiny.logged(trainer, "divergence/mean")
    rewards = [log["eval_sums_rewards/brief/mean"] for log in trainer.state.log_history if "eval_sums_reward" in log]
    assert f"| `divergence/mean` | {logs[0]:.4g} (step 1) | {logs[-1]:.4g} (step 3) |" in card.text
    assert f"| `eval_sums_rewards/brief/mean` | {rewards[0]:.4g} (step 1) | {rewards[-1]:.4g} (step 3) |" in card.text
    assert "| `eval_a/b_divergence/mean` |" in card.text


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
    assert "# Model Card for mine" in card.text
    assert 'model="me/mine"' in card.text
    assert "| `divergence/mean` |" in card.text
    assert {"trl", "opsd"} <= set(card.data.tags)
    assert (tmp_path / "run/checkpoint-1").exists()
    uploaded = {path.name for path in (hub.folder / "me/mine").iterdir()}
    assert {"README.md", "model.safetensors", "tokenizer.json", "completions"} <= uploaded
    assert "checkpoint-1" not in uploaded
