"""What TRL's documentation and tests promise of its trainer holds for this one; `docs/migration.md` has the table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDatasetDict
from peft import LoraConfig, PrefixTuningConfig
from support import tiny
from trl import DistillationConfig, DistillationTrainer

from trl_opsd import FixedRollout, HFRollout, OPSDConfig, OPSDTrainer


def options(folder: Any, **given: Any) -> dict[str, Any]:
    """One step of two rows with everything else as by default on an accelerator, `bf16` and checkpointing included."""
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "max_steps": 1,
        "max_completion_length": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": True,
        **given,
    }


def logged(trainer: DistillationTrainer, name: str) -> Any:
    return next(entry[name] for entry in trainer.state.log_history if name in entry)


def copies(trainer: DistillationTrainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


class TestTinyModels:
    """151,669 ids and 8 hidden units: an entropy within 1e-4 nats of that of equal logits."""

    @pytest.mark.parametrize("temperature", [1.0, 20.0])
    def test_nearly_uniform_teacher_is_accepted(self, hub, tmp_path, temperature):
        trainer = OPSDTrainer(
            model=hub["wider"],
            teacher_model=hub["tiny"],
            args=OPSDConfig(**options(tmp_path, temperature=temperature)),
            train_dataset=tiny.rows(),
        )
        trainer.train()
        assert logged(trainer, "entropy/teacher") > 11.9294, "as high as that of the one in the next test, to 1e-4"
        assert logged(trainer, "grad_norm") > 0

    @pytest.mark.parametrize("temperature", [1.0, 20.0])
    def test_uniform_teacher_is_refused(self, hub, tmp_path, temperature):
        trainer = OPSDTrainer(
            model=hub["wider"],
            teacher_model=hub["tiny"],
            args=OPSDConfig(**options(tmp_path, temperature=temperature)),
            train_dataset=tiny.rows(),
        )
        with torch.no_grad():
            trainer.teacher.model.lm_head.weight.zero_()
        with pytest.raises(ValueError, match="gives all 151669 tokens the same logit"):
            trainer.train()

    def test_a_loss_is_that_of_trl_on_the_full_logits(self, hub, tmp_path):
        trainers = [
            cls(
                model=hub["tiny"],
                teacher_model=hub["wider"],
                args=config(**options(tmp_path, beta=0.25, bf16=False)),
                train_dataset=tiny.rows(2),
                **more,
            )
            for cls, config, more in (
                (DistillationTrainer, DistillationConfig, {}),
                (OPSDTrainer, OPSDConfig, {"rollout": HFRollout()}),
            )
        ]
        theirs, ours = [(one.train(), logged(one, "loss"))[1] for one in trainers]
        # Of 6e-4 nats between logits that are almost equal, log-probabilities in float32 lose a thousandth part; which
        # way depends on the processor. Ours against float64: `tests/losses`.
        assert ours == pytest.approx(theirs, rel=5e-3)


class TestTeachingItself:
    """Student and teacher of the same weights and dtype agree, also with `bf16=True`, the default on an accelerator."""

    def trained(self, student: Any, teacher: Any, folder: Any, **given: Any) -> OPSDTrainer:
        peft_config = given.pop("peft_config", None)
        rows = tiny.rows()
        if "teacher_model_kind" in given:
            rows = rows.add_column("teacher_prompt", rows["prompt"])
        trainer = OPSDTrainer(
            model=student,
            teacher_model=teacher,
            args=OPSDConfig(**options(folder, **given)),
            train_dataset=rows,
            processing_class=tiny.tokenizer(),
            peft_config=peft_config,
        )
        assert trainer.args.bf16
        trainer.train()
        return trainer

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    @pytest.mark.parametrize("make", [tiny.qwen2, tiny.gemma2], ids=["qwen2", "gemma2"])
    def test_an_equal_teacher_moves_nothing(self, tmp_path, dtype, make):
        trainer = self.trained(make().to(dtype), make().to(dtype), tmp_path)
        assert logged(trainer, "grad_norm") == 0

    @pytest.mark.parametrize("kind", ["base", "ema", "live"])
    @pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
    def test_a_self_teacher_without_privilege_moves_nothing(self, tmp_path, kind, lora):
        peft_config = LoraConfig(r=4, target_modules="all-linear") if lora else None
        trainer = self.trained(tiny.qwen2(), None, tmp_path, teacher_model_kind=kind, peft_config=peft_config)
        assert logged(trainer, "grad_norm") == 0


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
        other, hot = written(temperature=2.0)
        assert hot != greedy
        assert trainer.teaching.fingerprint() != other.teaching.fingerprint(), "a resumed run has to sample alike"

    def test_the_loss_keeps_its_temperature(self, make_trainer):
        losses = []
        for given in ({}, {"generation_kwargs": {"temperature": 0.7}}, {"temperature": 0.7}):
            trainer = make_trainer(max_steps=1, **given)  # the completions are fixed
            trainer.train()
            losses.append(logged(trainer, "loss"))
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
        assert losses[2] != pytest.approx(losses[0], rel=1e-2)

    @pytest.mark.parametrize("ends", [100, [100, 101]])
    def test_end_token_in_generation_kwargs_ends_completions(self, written, ends):
        listed = [ends] if isinstance(ends, int) else ends
        student_ends = {"generation_kwargs": {"eos_token_id": ends}, "max_completion_length": 200}
        trainer, completions = written(**student_ends)
        assert trainer.eos_token_ids == trainer.generation_config.eos_token_id == listed
        assert any(completion[-1] in listed for completion in completions)
        assert all(token not in listed for completion in completions for token in completion[:-1])
        assert any(2 in completion for completion in completions), "the tokenizer's own is a token as any other"

    def test_fewer_new_tokens_allow_longer_prompts(self, make_trainer):
        """The context has 256 tokens."""
        long = Dataset.from_dict({"prompt": ["x" * 240] * 4})
        with pytest.raises(ValueError, match="240 tokens; with a completion of 24"):
            make_trainer(train_dataset=long)
        trainer = make_trainer(train_dataset=long, generation_kwargs={"max_new_tokens": 8})
        assert trainer.limits.completion == 8


class TestDatasets:
    KINDS = ("dataset", "stream", "DatasetDict", "IterableDatasetDict", "dict", "dict of streams")

    def rows_of(self, kind: str) -> Any:
        rows: Any = tiny.rows(4)
        if "tream" in kind or "Iterable" in kind:
            rows = rows.to_iterable_dataset()
        if "ict" in kind:
            wrap = {"DatasetDict": DatasetDict, "IterableDatasetDict": IterableDatasetDict}.get(kind, dict)
            rows = wrap({"one": rows, "two": rows})
        return rows

    @pytest.mark.parametrize("kind", KINDS)
    def test_every_kind_of_dataset_can_be_evaluated(self, make_trainer, kind):
        rows = self.rows_of(kind)
        trainer = make_trainer(eval_dataset=rows)
        assert trainer.eval_dataset is rows or set(trainer.eval_dataset) == {"one", "two"}
        of_its_own, given = trainer.evaluate(), make_trainer().evaluate(eval_dataset=self.rows_of(kind))
        names = ["eval_one_loss", "eval_two_loss"] if "ict" in kind else ["eval_loss"]
        assert [of_its_own[name] for name in names] == pytest.approx([given[name] for name in names], rel=1e-5)
        assert min(given[name] for name in names) > 0

    def test_stream_has_one_worker_and_is_sharded_by_process(self, make_trainer):
        trainer = make_trainer(train_dataset=tiny.rows().to_iterable_dataset(), dataloader_num_workers=2)
        assert trainer.args.dataloader_num_workers == 0
        assert trainer.args.accelerator_config.dispatch_batches is False

    def test_a_stream_to_evaluate_on_leaves_the_workers_of_training(self, make_trainer):
        trainer = make_trainer(eval_dataset=tiny.rows().to_iterable_dataset(), dataloader_num_workers=2)
        workers = trainer.get_train_dataloader().num_workers, trainer.get_eval_dataloader().num_workers
        assert (*workers, trainer.args.dataloader_num_workers) == (2, 0, 2)


class TestAdapters:
    CONFIG = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])

    def test_a_seed_decides_the_adapter(self, make_trainer):
        made = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            trainer = make_trainer(peft_config=self.CONFIG)
            made.append(torch.cat([p.flatten() for name, p in trainer.model.named_parameters() if "lora_A" in name]))
        assert made[0].numel()
        assert made[0].equal(made[1])

    def test_a_head_trained_in_full_is_allowed(self, make_trainer):
        config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
        trainer = make_trainer(peft_config=config, learning_rate=0.1)
        before = copies(trainer)
        trainer.train()
        head = next(name for name in before if "lm_head.modules_to_save" in name)
        assert not dict(trainer.model.named_parameters())[head].equal(before[head])

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            (LoraConfig(r=4, target_modules=["q_proj", "lm_head"]), "lm_head"),
            (PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"), "Prompt-learning"),
        ],
        ids=["head", "prefix"],
    )
    def test_adapters_outside_the_loss_are_refused(self, make_trainer, config, message):
        with pytest.raises(ValueError, match=message):
            make_trainer(peft_config=config)


def test_missing_padding_token_is_the_end_token_everywhere(make_trainer):
    words = tiny.tokenizer()
    words.pad_token = None
    student = tiny.qwen2(pad_token_id=None)
    trainer = make_trainer(model=student, processing_class=words, rollout=FixedRollout(tiny.recorded(tiny.tokenizer())))
    pads = trainer.processing_class.pad_token_id, student.config.pad_token_id, student.generation_config.pad_token_id
    assert pads == (2, 2, 2)


class TestSolutions:
    """`trl.experimental` had a draft of a trainer for self-distillation, whose rows have a `solution`."""

    ROWS = Dataset.from_dict({"prompt": tiny.PROMPTS, "solution": [f"hint {number}" for number in range(8)]})

    @pytest.fixture
    def make(self, make_trainer):
        def make(**given: Any) -> OPSDTrainer:
            given = {"teacher_model": None, "teacher_model_kind": "base", "train_dataset": self.ROWS, **given}
            return make_trainer(max_steps=1, **given)

        return make

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("template", ["{prompt}\n\n{solution}", "{prompt}\n\n{privileged_context}"])
    def test_solution_column_becomes_privileged_context(self, make, stream, template):
        rows, ours = self.ROWS, self.ROWS.rename_column("solution", "privileged_context")
        if stream:
            rows, ours = rows.to_iterable_dataset(), ours.to_iterable_dataset()
        same = make(train_dataset=ours, teacher_prompt_template="{prompt}\n\n{privileged_context}")
        trainer = make(train_dataset=rows, teacher_prompt_template=template, eval_dataset={"some": rows})
        for one in (same, trainer):
            one.train()
        assert logged(trainer, "loss") == pytest.approx(logged(same, "loss"), rel=1e-5)
        assert trainer.teaching.fingerprint() == same.teaching.fingerprint()
        theirs = same.evaluate(eval_dataset=ours)["eval_loss"]
        assert theirs > 0.01
        assert trainer.evaluate(eval_dataset=rows)["eval_loss"] == pytest.approx(theirs, rel=1e-5)
        assert trainer.evaluate()["eval_some_loss"] == pytest.approx(theirs, rel=1e-5)
