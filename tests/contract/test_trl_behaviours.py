"""What TRL's documentation and tests promise of its trainer holds for this one; `docs/migration.md` has the table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDatasetDict
from peft import LoraConfig, PrefixTuningConfig
from support import tiny

from trl_opsd import FixedRollout, HFRollout, OPSDTrainer

AS_BY_DEFAULT = {"max_steps": 1, "max_completion_length": 4, "bf16": True, "gradient_checkpointing": True}
"""As by default on an accelerator; student and teacher of the same weights and dtype agree in that, too."""


def logged(trainer: OPSDTrainer, name: str) -> float:
    return tiny.logged(trainer, name)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("make", [tiny.qwen2, tiny.gemma2], ids=["qwen2", "gemma2"])
def test_an_equal_teacher_moves_nothing(trained, dtype, make):
    trainer = trained(model=make().to(dtype), teacher_model=make().to(dtype), rollout=HFRollout(), **AS_BY_DEFAULT)
    assert logged(trainer, "grad_norm") == 0


@pytest.mark.parametrize("kind", ["base", "ema", "live"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_self_teacher_without_privilege_moves_nothing(trained, kind, lora):
    itself = {"teacher_model": None, "teacher_model_kind": kind, "rollout": HFRollout()}
    itself["train_dataset"] = tiny.rows().add_column("teacher_prompt", tiny.PROMPTS)
    adapter = LoraConfig(r=4, target_modules="all-linear") if lora else None
    assert logged(trained(**itself, peft_config=adapter, **AS_BY_DEFAULT), "grad_norm") == 0


class TestGenerationKwargs:
    """They have the last word on generation, and on nothing else."""

    @pytest.fixture
    def written(self, make_trainer):
        def write(**given: Any) -> tuple[OPSDTrainer, list[list[int]]]:
            trainer = make_trainer(model=tiny.qwen2(), rollout=HFRollout(), **given)
            return trainer, trainer.complete(trainer.tokenize(tiny.PROMPTS))

        return write

    @pytest.mark.parametrize(
        ("name", "value", "option"),
        [
            ("top_k", 3, "top_k"),
            ("top_p", 0.2, "top_p"),
            ("min_p", 0.4, "min_p"),
            ("repetition_penalty", 3.0, "repetition_penalty"),
            ("max_new_tokens", 5, "max_completion_length"),
            ("max_tokens", 5, "max_completion_length"),
            ("cache_implementation", "static", "cache_implementation"),
        ],
    )
    def test_generation_kwarg_replaces_the_option(self, written, name, value, option):
        trainer, completions = written(generation_kwargs={name: value})
        expected, theirs = written(**{option: value})
        assert completions == theirs
        assert getattr(trainer.args, option) == value
        assert trainer.args.generation_kwargs is None
        assert trainer.generation_config.to_dict() == expected.generation_config.to_dict()
        assert trainer.limits == expected.limits
        assert trainer.teaching.fingerprint() == expected.teaching.fingerprint(), "the same run in other words"

    def test_temperature_in_generation_kwargs_leaves_the_loss_alone(self, written):
        trainer, cold = written(temperature=2.0, generation_kwargs={"temperature": 1e-5})
        _, greedy = written(generation_kwargs={"do_sample": False})
        assert cold == greedy
        assert trainer.temperature == trainer.args.temperature == 2.0
        assert trainer.current_objective.temperatures == (2.0, 2.0)
        other, hot = written(temperature=2.0)
        assert hot != greedy
        assert trainer.teaching.fingerprint() != other.teaching.fingerprint(), "a resumed run has to sample alike"

    @pytest.mark.parametrize("ends", [100, [100, 101]])
    def test_end_token_in_generation_kwargs_ends_completions(self, written, ends):
        listed = [ends] if isinstance(ends, int) else ends
        student_ends = {"generation_kwargs": {"eos_token_id": ends}, "max_completion_length": 200}
        trainer, completions = written(**student_ends)
        assert trainer.eos_token_ids == trainer.generation_config.eos_token_id == listed
        assert any(completion[-1] in listed for completion in completions)
        assert all(token not in listed for completion in completions for token in completion[:-1])
        assert any(2 in completion for completion in completions), "the tokenizer's own is a token as any other"


class TestDatasets:
    @pytest.mark.parametrize("stream", [False, True], ids=["map", "stream"])
    @pytest.mark.parametrize("wrap", [None, dict, DatasetDict, IterableDatasetDict])
    def test_every_kind_of_dataset_can_be_evaluated(self, make_trainer, wrap, stream):
        rows: Any = tiny.rows(4).to_iterable_dataset() if stream or wrap is IterableDatasetDict else tiny.rows(4)
        rows = wrap({"one": rows, "two": rows}) if wrap else rows
        trainer = make_trainer(eval_dataset=rows)
        assert trainer.eval_dataset is rows or set(trainer.eval_dataset) == {"one", "two"}
        of_its_own, given = trainer.evaluate(), make_trainer().evaluate(eval_dataset=rows)
        for name in ["eval_one_loss", "eval_two_loss"] if wrap else ["eval_loss"]:
            assert of_its_own[name] == pytest.approx(given[name], rel=1e-5) != 0

    def test_stream_has_one_worker_is_sharded_by_process_and_leaves_other_workers(self, make_trainer):
        stream = tiny.rows().to_iterable_dataset()
        trainer = make_trainer(train_dataset=stream, dataloader_num_workers=2)
        assert trainer.args.dataloader_num_workers == 0
        assert trainer.args.accelerator_config.dispatch_batches is False
        trainer = make_trainer(eval_dataset=stream, dataloader_num_workers=2)
        workers = trainer.get_train_dataloader().num_workers, trainer.get_eval_dataloader().num_workers
        assert (*workers, trainer.args.dataloader_num_workers) == (2, 0, 2)


def test_a_head_may_be_trained_in_full_beside_an_adapter(make_trainer):
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    trainer = make_trainer(peft_config=config, learning_rate=0.1)
    head = trainer.model.get_output_embeddings().modules_to_save.default.weight
    before = head.detach().clone()
    trainer.train()
    assert not head.equal(before)


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("named", "config"),
    [
        ("lm_head", LoraConfig(r=4, target_modules=["q_proj", "lm_head"])),
        ("Prompt-learning", PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")),
    ],
)
def test_adapters_outside_the_loss_are_refused(make_trainer, named, config):
    with pytest.raises(ValueError, match=named):
        make_trainer(peft_config=config)


def test_missing_padding_token_is_the_end_token_everywhere(make_trainer):
    words = tiny.tokenizer()
    words.pad_token = None
    student = tiny.qwen2(pad_token_id=None)
    trainer = make_trainer(model=student, processing_class=words, rollout=FixedRollout(tiny.recorded(tiny.tokenizer())))
    pads = trainer.processing_class.pad_token_id, student.config.pad_token_id, student.generation_config.pad_token_id
    assert pads == (2, 2, 2)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("template", ["{prompt}\n\n{solution}", "{prompt}\n\n{privileged_context}"])
def test_solution_column_becomes_privileged_context(make_trainer, stream, template):
    """As in the draft of a trainer for self-distillation that `trl.experimental` had."""
    rows = Dataset.from_dict({"prompt": tiny.PROMPTS, "solution": [f"hint {number}" for number in range(8)]})
    ours = rows.rename_column("solution", "privileged_context")
    if stream:
        rows, ours = rows.to_iterable_dataset(), ours.to_iterable_dataset()
    itself = {"teacher_model": None, "teacher_model_kind": "base", "max_steps": 1}
    same = make_trainer(**itself, train_dataset=ours, teacher_prompt_template="{prompt}\n\n{privileged_context}")
    some = {"train_dataset": rows, "eval_dataset": {"some": rows}}
    trainer = make_trainer(**itself, **some, teacher_prompt_template=template)
    for one in (same, trainer):
        one.train()
    assert logged(trainer, "loss") == pytest.approx(logged(same, "loss"), rel=1e-5)
    assert trainer.teaching.fingerprint() == same.teaching.fingerprint()
    theirs = same.evaluate(eval_dataset=ours)["eval_loss"]
    assert theirs > 0.01
    assert trainer.evaluate()["eval_some_loss"] == pytest.approx(theirs, rel=1e-5)
    assert trainer.evaluate(eval_dataset=rows)["eval_loss"] == pytest.approx(theirs, rel=1e-5)
