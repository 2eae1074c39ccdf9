"""What a trainer says when it is built, about options without effect and teachers that teach nothing."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from support import tiny, vision_language

from trl_opsd import HFRollout
from trl_opsd.models.checks import same_weights
from trl_opsd.options.rules import AFTER, refuse

SAME = "are the same model"
NOTHING = "The first divergence is 0"


def saved(folder, seed=0):
    """A student and its tokenizer, on disk."""
    tiny.qwen2(32, seed).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


# ---- Options without effect -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("tools", "pass the functions as the trainer's argument `tools` for all rows"),
        ("chat_template_kwargs", "set the option `chat_template_kwargs`, which applies to all rows; or remove"),
        ("completion", "with `lmbda=1` the student generates every completion; set `lmbda` below 1"),
    ],
)
def test_unread_column_of_other_trainers_warns(make_trainer, caplog, name, instead):
    rows = tiny.rows().add_column(name, ["{}"] * 8)
    make_trainer(train_dataset=rows)
    make_trainer(train_dataset=None, eval_dataset={"some": rows})
    for where in ("train_dataset", "eval_dataset['some']"):
        assert caplog.text.count(f"The column {name!r} of {where} is not used: {instead}") == 1
    caplog.clear()
    if name == "completion":  # which each of these may read
        make_trainer(train_dataset=rows, lmbda=0.5)
        make_trainer(train_dataset=rows, reward_funcs=lambda completions, **_: [1.0] * len(completions))
    make_trainer(train_dataset=rows.rename_column(name, "mine"))
    conversation = [{"role": role, "content": "hi"} for role in ("user", "assistant")]
    make_trainer(train_dataset=Dataset.from_list([{"messages": conversation}] * 8))
    assert "is not used" not in caplog.text


def test_images_that_nothing_reads_warn(make_trainer, caplog):
    photos = vision_language.rows([1, 1]).rename_column("images", "photos")
    one = Dataset.from_list([{"prompt": row["prompt"], "scan": row["photos"][0]} for row in photos])
    for name, rows in {"photos": photos, "scan": one}.items():
        seeing = {"train_dataset": rows, "rollout": HFRollout(), **vision_language.arguments()}
        make_trainer(**seeing)
        said = f"The column '{name}' of train_dataset has images, but nothing reads it: call it 'images' to show them"
        assert caplog.text.count(said) == 1
        caplog.clear()
        make_trainer(**seeing, reward_funcs=lambda completions, **_: [1.0] * len(completions))
        make_trainer(train_dataset=rows)  # a student that cannot see
        make_trainer(**{**seeing, "train_dataset": vision_language.rows([1, 1])})
        assert "has images" not in caplog.text


def test_overridden_sampling_settings_of_the_checkpoint_warn_once(make_trainer, caplog):
    student = tiny.qwen2()
    student.generation_config.update(do_sample=True, temperature=0.7, top_p=0.8, repetition_penalty=1.1, min_p=0.1)
    trainer = make_trainer(model=student, top_p=0.8)
    trainer.rollout = HFRollout()
    theirs, ours = "temperature=0.7, repetition_penalty=1.1", "temperature=1.0, repetition_penalty=1.0"
    assert caplog.text.count(f"generation config has {theirs}, but the trainer's options take precedence: {ours}.") == 1
    assert caplog.text.count("generation config has") == 1
    make_trainer()
    assert caplog.text.count("generation config has") == 1


@pytest.mark.parametrize(
    ("metric", "several", "close"),
    [
        ("accuracy", False, "eval_loss"),
        ("divergence", False, "eval_divergence/mean"),
        ("loss", True, "eval_hard_loss"),
        ("loss", False, None),
        ("eval_entropy/student", False, None),
        ("completions/mean_length", False, None),
        ("easy_loss", True, None),
    ],
)
def test_unlogged_metric_for_best_model_warns(make_trainer, caplog, metric, several, close):
    rows = {"easy": tiny.rows(2), "hard": tiny.rows(2)} if several else tiny.rows(2)
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "best", "max_steps": 1}
    trainer = make_trainer(metric_for_best_model=metric, eval_dataset=rows, **options)
    assert (f"Did you mean '{close}" in caplog.text) if close else ("evaluations do not log" not in caplog.text)
    if close:
        with pytest.raises(KeyError, match="not found in the evaluation metrics"):
            trainer.train()
    else:
        trainer.train()
        assert trainer.state.best_global_step == 1


# ---- A teacher that is the student ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["the same", "relative", "through a link", "another dtype", "an adapter on top"])
def test_teacher_at_the_path_of_the_student_warns(make_trainer, caplog, tmp_path, monkeypatch, form):
    student = teacher = saved(tmp_path / "student")
    options = {}
    if form == "relative":
        monkeypatch.chdir(tmp_path)
        teacher = "./student"
    elif form == "through a link":
        (tmp_path / "link").symlink_to(student)
        teacher = str(tmp_path / "link")
    elif form == "another dtype":
        options = {"teacher_model_init_kwargs": {"dtype": "bfloat16"}}
    elif form == "an adapter on top":
        options = {"peft_config": LoraConfig(target_modules=["q_proj"])}
    make_trainer(model=student, teacher_model=teacher, **options)
    assert SAME in caplog.text


@pytest.mark.parametrize(
    "form", ["a copy of other weights", "a column", "a function", "another revision's folder", "a quantised student"]
)
def test_other_weights_or_prompts_of_the_teacher_do_not_warn(make_trainer, caplog, tmp_path, form):
    student = teacher = saved(tmp_path / "student")
    options = {}
    if form == "a column":
        options = {"train_dataset": tiny.rows().add_column("privileged_context", ["a hint"] * 8)}
    elif form == "a function":
        options = {"teacher_prompt_fn": lambda row, completion: f"Hint: 4. {row['prompt']}"}
    elif form == "another revision's folder":
        teacher = saved(tmp_path / "student" / "refs", seed=1)
    elif form == "a quantised student":
        options = {"student_quantization": "int4"}
    else:
        teacher = saved(tmp_path / "teacher", seed=1)
    make_trainer(model=student, teacher_model=teacher, **options)
    assert SAME not in caplog.text


@pytest.mark.quick
def test_an_id_and_its_snapshots_folder_are_same_weights(tmp_path, monkeypatch):
    snapshot = tmp_path / "models--some--model" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    tiny.qwen2().config.save_pretrained(snapshot)
    other = tmp_path / "models--some--model" / "snapshots" / "4567"
    other.mkdir()
    (other / "config.json").symlink_to(snapshot / "config.json")  # as the cache does with equal files
    refs = tmp_path / "models--some--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0123")
    (refs / "new").write_text("4567")
    place = {"cache_dir": str(tmp_path)}
    assert same_weights("some/model", place, str(snapshot), {})
    assert same_weights("some/model", place, "some/model", {**place, "revision": "main"})
    assert not same_weights("some/model", place, "some/model", {**place, "revision": "new"})
    assert not same_weights("some/model", place, str(snapshot), {"quantization_config": {"load_in_4bit": True}})


def test_first_divergence_of_zero_warns_once(make_trainer, caplog):
    make_trainer(model=tiny.qwen2(32, 0), teacher_model=tiny.qwen2(32, 0), max_steps=2).train()
    assert caplog.text.count(NOTHING) == 1


def test_same_path_warns_once_and_not_of_the_divergence(make_trainer, caplog, tmp_path):
    path = saved(tmp_path / "student")
    make_trainer(model=path, teacher_model=path, max_steps=1).train()
    assert caplog.text.count(SAME) == 1
    assert NOTHING not in caplog.text


def test_first_divergence_above_zero_does_not_warn(make_trainer, caplog):
    make_trainer(max_steps=1).train()
    assert NOTHING not in caplog.text


# ---- What may be trained --------------------------------------------------------------------------------------------


def test_optimizer_of_some_parameters_warns(make_trainer, caplog):
    student = tiny.qwen2()
    before = {name: one.clone() for name, one in student.named_parameters()}
    trainer = make_trainer(
        model=student, optimizers=(torch.optim.AdamW(student.lm_head.parameters(), lr=1e-2), None), max_steps=1
    )
    total = len(before)
    assert (
        f"1 of the student's {total} trainable parameters; the first one it leaves out is 'model.embed" in caplog.text
    )
    trainer.train()
    moved = {name for name, one in trainer.model.named_parameters() if not torch.equal(one, before[name])}
    assert moved == {"lm_head.weight"}


def test_optimizer_of_all_trained_parameters_does_not_warn(make_trainer, caplog):
    student = get_peft_model(tiny.qwen2(), LoraConfig(target_modules=["q_proj"]))
    make_trainer(model=student, optimizers=(torch.optim.AdamW(student.parameters(), lr=1e-2), None))
    assert "leaves out" not in caplog.text


@pytest.mark.parametrize(
    "options",
    [
        {"learning_rate": 0.0},
        {"max_steps": 0},
        {"num_train_epochs": 0, "max_steps": -1},
        {"per_device_train_batch_size": 8},
    ],
)
def test_trainer_that_only_evaluates_may_be_frozen(make_trainer, options):
    trainer = make_trainer(
        model=tiny.qwen2().requires_grad_(False), train_dataset=None, eval_dataset=tiny.rows(), **options
    )
    assert trainer.evaluate()["eval_loss"] > 0


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd"])
def test_a_divergence_may_be_assigned_by_name(make_trainer, name):
    trainer = make_trainer()
    trainer.divergence = name
    assert trainer.divergence == make_trainer(divergence=name).divergence
    assert trainer.train().training_loss == make_trainer(divergence=name).train().training_loss


# ---- Launches and evaluations ---------------------------------------------------------------------------------------


def test_launch_counted_as_one_process_is_refused(tmp_path, monkeypatch):
    args = tiny.config(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"has 2 processes .* set `use_cpu=True`"):
        refuse(AFTER, args)


@pytest.mark.parametrize("option", ["fp16_full_eval", "bf16_full_eval"])
def test_full_eval_casts_are_refused(tmp_path, option):
    with pytest.raises(ValueError, match=f"`{option}=True` would cast the student's weights"):
        tiny.config(tmp_path, **{option: True})


def test_an_evaluation_without_rows_is_refused_before_loading(make_trainer):
    with pytest.raises(ValueError, match="`eval_strategy='steps'` without an `eval_dataset`"):
        make_trainer(eval_strategy="steps", eval_steps=1)


def test_an_evaluation_of_no_rows_is_refused(make_trainer):
    trainer = make_trainer()
    for run in (trainer.evaluate, trainer.predict):
        with pytest.raises(ValueError, match="the dataset is empty: pass one with rows"):
            run(tiny.rows(0))


def test_teacher_text_beside_student_messages_warns(make_trainer, caplog):
    rows = [{"prompt": [{"role": "user", "content": "2+2="}], "teacher_prompt": "The answer is 4. 2+2="}] * 8
    make_trainer(train_dataset=Dataset.from_list(rows), rollout=HFRollout(), max_steps=1).train()
    assert "The prompts are text for the teacher but messages for the student" in caplog.text


@pytest.mark.parametrize(("role", "warns"), [("human", True), ("user", False)])
def test_roles_that_templates_seldom_know_warn(make_trainer, caplog, role, warns):
    rows = Dataset.from_list([{"prompt": [{"role": role, "content": "2+2="}]}] * 4)
    make_trainer(train_dataset=rows)
    assert ("have roles that chat templates seldom know: human. Name them" in caplog.text) == warns
