"""Faults of TRL, transformers and accelerate that `loop/upstream_fixes.py` mends, each without its fix.

A test that fails says that upstream is mended: take the fix out, and the test with it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import DistributedType
from datasets import Dataset
from support import tiny
from support.parity import Replaying
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import TrainerCallback
from trl import DistillationConfig


class Noting(Replaying):
    """TRL's trainer, which notes the prompts of each step."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        vars(self).setdefault("read", []).append(prompt_ids)
        return super()._generate_single_turn(prompt_ids, *args, **kwargs)


class At(TrainerCallback):
    """Calls a function at an event."""

    def __init__(self, event: str, call: Any) -> None:
        setattr(self, event, lambda args, state, control, **_: call(control))


@pytest.fixture
def trls(tmp_path):
    """Builds TRL's trainer, of 8 rows, two for a step."""

    def build(rows: Any = None, callbacks: Any = None, model: Any = None, **options: Any) -> Noting:
        return Noting(
            model=model or tiny.qwen2(32, seed=0),
            teacher_model=tiny.qwen2(48, seed=1),
            args=DistillationConfig(**tiny.options(tmp_path, **options)),
            train_dataset=tiny.rows() if rows is None else rows,
            processing_class=tiny.tokenizer(),
            callbacks=callbacks,
        )

    return build


def test_another_config_resets_the_state_that_trainers_share(trls, tmp_path):
    trainer = trls()
    DistillationConfig(**tiny.options(tmp_path))
    with pytest.raises(AttributeError, match="AcceleratorState"):
        _ = trainer.accelerator.mixed_precision


def test_second_training_keeps_optimizer_and_model(trls):
    trainer = trls(max_steps=1)
    trainer.train()
    trainer.args.learning_rate = 0.5
    trainer.model = tiny.qwen2(32, seed=5)
    before = tiny.weights(trainer)
    trainer.train()
    assert {group["lr"] for group in trainer.optimizer.param_groups} == {1e-4}
    assert torch.equal(tiny.weights(trainer), before), "the former one was trained"


def test_interrupted_training_leaves_its_state(trls):
    def interrupt(control):
        raise KeyboardInterrupt

    trainer = trls(callbacks=[At("on_step_begin", interrupt)], neftune_noise_alpha=5.0)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.is_in_train
    assert len(trainer.model.get_input_embeddings()._forward_hooks) == 1


def test_resumed_epoch_has_the_order_of_the_first(trls, tmp_path):
    def run(**given):
        trainer = trls(max_steps=6, save_strategy="steps", save_steps=5)
        trainer.train(**given)
        return trainer

    whole, resumed = run(), run(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert resumed.read == [whole.read[1]] != [whole.read[5]]
    finished = run(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert finished.state.global_step == 7, "one step more than `max_steps`"


def test_resumed_stream_begins_its_pass_again(trls, tmp_path):
    def run(**given):
        rows = tiny.rows().to_iterable_dataset()
        trainer = trls(rows, max_steps=6, save_strategy="steps", save_steps=5, shuffle_dataset=False)
        trainer.train(**given)
        return trainer.read

    whole, resumed = run(), run(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert whole[4:] == whole[:2], "two passes"
    assert resumed == [whole[4]] != [whole[5]]


def test_training_that_changes_nothing_is_not_refused(trls):
    trainer = trls(max_steps=1, warmup_steps=1, lr_scheduler_type="linear")
    before = tiny.weights(trainer)
    trainer.train()
    assert torch.equal(tiny.weights(trainer), before)


def test_evaluated_model_is_not_wrapped_to_train(monkeypatch):
    if is_first := not distributed.is_initialized():  # an engine of an earlier test keeps its group
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        accelerator = Accelerator(cpu=True)
        monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.MULTI_CPU)
        fresh, evaluated = nn.Linear(1, 1), nn.Linear(1, 1)
        accelerator.prepare_model(evaluated, evaluation_mode=True)
        assert isinstance(accelerator.prepare_model(fresh), DistributedDataParallel)
        assert accelerator.prepare_model(evaluated) is evaluated
    finally:
        if is_first:
            distributed.destroy_process_group()


def test_stream_is_divided_by_files_and_of_unknown_length():
    rows = Dataset.from_dict({"prompt": list("abcdef")})

    def read(files):
        stream = DataLoader(rows.to_iterable_dataset(num_shards=files))
        loaders = [prepare_data_loader(stream, num_processes=2, process_index=one) for one in range(2)]
        return ["".join(row["prompt"][0] for row in loader) for loader in loaders], loaders[0].remainder

    assert read(1) == (["ace", "bdf"], -1), "a remainder of 0 would be cut off the last batch"
    assert read(2)[0] == ["abc", "def"]


def test_kept_loader_is_used_for_another_dataset(trls):
    trainer = trls(dataloader_num_workers=1, dataloader_persistent_workers=True)
    assert trainer.get_eval_dataloader(tiny.rows(2)) is trainer.get_eval_dataloader(tiny.rows(4))
