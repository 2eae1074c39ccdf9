"""On the same completions in the same order, OPSDTrainer gives the numbers of the trainer it extends."""

from __future__ import annotations

from itertools import chain, islice

import pytest
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard
from peft import LoraConfig
from support import tiny
from support.parity import TOLERANCE, Replaying, largest_gaps, losses, made, trained
from torch.utils.data import BatchSampler
from trl import DistillationConfig, DistillationTrainer

from trl_opsd import HFRollout, OPSDConfig, OPSDTrainer


@pytest.mark.parametrize(
    ("beta", "lora"),
    [
        *(pytest.param(beta, lora, marks=pytest.mark.quick) for beta in (0.0, 0.5) for lora in (False, True)),
        *[(0.3, True), (1.0, False)],
        *(pytest.param(*one, marks=pytest.mark.long) for one in ((0.3, False), (1.0, True))),
    ],
)
def test_losses_and_weights_after_three_accumulated_steps_equal_trls(tmp_path, beta, lora):
    options = tiny.options(tmp_path, beta=beta, gradient_accumulation_steps=2)
    adapter = LoraConfig(r=4, target_modules="all-linear") if lora else None
    trls = trained(Replaying, DistillationConfig(**options), peft_config=adapter)
    ours = trained(OPSDTrainer, OPSDConfig(**options), peft_config=adapter)
    loss_gap, weight_gap = largest_gaps(trls, ours)
    assert loss_gap <= TOLERANCE
    assert weight_gap <= TOLERANCE
    assert losses(trls).std() > 0, "the losses must move for the comparison to mean anything"


def test_training_on_sampled_rollouts_equals_trl(tmp_path):
    options = tiny.options(tmp_path, beta=1.0, gradient_accumulation_steps=2, temperature=0.7, top_k=50)
    trls = trained(DistillationTrainer, DistillationConfig(**options))
    ours = trained(OPSDTrainer, OPSDConfig(**options), rollout=HFRollout())
    assert max(largest_gaps(trls, ours)) <= TOLERANCE


@pytest.mark.quick
def test_the_logs_keep_the_names_and_values_of_trl(tmp_path):
    options = tiny.options(tmp_path)
    trls = trained(Replaying, DistillationConfig(**options))
    ours = trained(OPSDTrainer, OPSDConfig(**options))
    assert set(trls.state.log_history[0]) <= set(ours.state.log_history[0])
    for name in ("entropy", "num_tokens", "completions/mean_length", "completions/clipped_ratio"):
        assert ours.state.log_history[0][name] == pytest.approx(trls.state.log_history[0][name], rel=1e-5)


@pytest.mark.parametrize(("processes", "completions"), [(1, 1), (2, 1), (3, 1), (2, 2)])
def test_each_process_gets_the_rows_of_trl_in_each_epoch(make_trainer, monkeypatch, processes, completions):
    each = {"per_device_train_batch_size": completions, "num_generations": completions}
    trainer = make_trainer(gradient_accumulation_steps=2, **each)
    monkeypatch.setattr(Accelerator, "num_processes", processes)
    for process in range(processes):
        monkeypatch.setattr(Accelerator, "process_index", process)
        order = DistillationTrainer._get_train_sampler(trainer)
        order.mini_repeat_count, order.batch_size = completions, order.batch_size // completions
        theirs = BatchSamplerShard(BatchSampler(order, 2 * completions, drop_last=False), processes, process)
        ours = trainer.get_train_dataloader().batch_sampler
        for epoch in range(3):
            ours.set_epoch(epoch)
            once = islice(theirs, 0, None, 2)  # it gives a step's rows to each of the calls
            assert list(chain.from_iterable(ours)) == list(chain.from_iterable(once)) != []


def test_a_checkpoint_of_trl_is_resumed_by_its_path(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1}
    whole = trained(Replaying, DistillationConfig(**tiny.options(tmp_path / "out", **saving)))
    others = {"model": tiny.qwen2(32, seed=5), "teacher_model": tiny.qwen2(48, seed=1)}
    ours = made(OPSDTrainer, OPSDConfig(**tiny.options(tmp_path / "out", **saving)), **others)
    with pytest.raises(ValueError, match=r"no complete checkpoint in .*-3 .*wrote it: pass its path"):
        ours.train(resume_from_checkpoint=True)
    ours.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    assert max(largest_gaps(whole, ours)) <= TOLERANCE
    kept = {path.name for path in (tmp_path / "out").iterdir()}
    assert kept >= {"checkpoint-1", "checkpoint-2", "checkpoint-3"}
    assert [len([*(tmp_path / "out").glob(f"replaced-checkpoint-{step}-*")]) for step in (1, 2, 3)] == [0, 1, 1]
