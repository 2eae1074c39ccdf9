"""A run resumed after any of its steps equals an uninterrupted one, bit for bit."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny
from support.witnessed_run import EPOCHS, Watched, Witness, rows, trainer

STEPS = 4
EVERY_STEP = range(1, EPOCHS * STEPS + 1)
VARIANTS = ("full", "lora")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Witness]]:
    """Uninterrupted runs, with a checkpoint after each step."""
    runs = {}
    for variant in VARIANTS:
        folder = tmp_path_factory.mktemp(variant)
        run = trainer(folder, variant, save_strategy="steps", save_steps=1)
        run.train()
        runs[variant] = (folder, run.witness)
    return runs


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_epoch_has_its_own_order_of_all_prompts(whole, variant):
    _, run = whole[variant]
    batches = [run.written[epoch * STEPS : (epoch + 1) * STEPS] for epoch in range(EPOCHS)]
    orders = [[tuple(ids) for prompts, _ in epoch for ids in prompts] for epoch in batches]
    assert len({tuple(order) for order in orders}) == EPOCHS
    assert all(len(set(order)) == 4 * STEPS for order in orders)
    assert len(set(run.weights)) == len(run.weights) == EPOCHS * STEPS


SHORT = {("full", 4): (), ("full", 7): pytest.mark.quick, ("lora", 7): pytest.mark.quick, ("lora", 8): ()}
"""Within an epoch and at the end of one."""


@pytest.mark.parametrize(
    ("variant", "step"),
    [pytest.param(*run, marks=SHORT.get(run, pytest.mark.long)) for run in product(VARIANTS, EVERY_STEP)],
)
def test_a_resumed_run_equals_an_uninterrupted_one(whole, tmp_path, variant, step):
    folder, run = whole[variant]
    torch.manual_seed(12345)  # random numbers drawn before must not matter
    resumed = trainer(tmp_path, variant)
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    assert resumed.witness.written == run.written[step:]
    assert resumed.witness.losses == run.losses[2 * step :]
    assert resumed.witness.weights == run.weights[step:]


@pytest.mark.parametrize(("shards", "steps"), [(3, [2, 3]), pytest.param(1, [1, 2, 3, 4, 5], marks=pytest.mark.long)])
def test_a_resumed_run_continues_a_stream_at_the_same_row(tmp_path, shards, steps):
    stream = rows(10).to_iterable_dataset(num_shards=shards)
    options = {"max_steps": 6, "eval_strategy": "no", "train_dataset": stream}  # two a pass
    run = trainer(tmp_path / "whole", "full", save_strategy="steps", save_steps=1, **options)
    run.train()
    assert len(set(run.witness.weights)) == 6
    passes = [[prompts for prompts, _ in run.witness.written[at : at + 2]] for at in (0, 2, 4)]
    assert passes[0] != passes[1] != passes[2], "each pass has an order of its own"
    for step in steps:
        resumed = trainer(tmp_path / "resumed", "full", **{**options, "max_steps": 6 + step % 2})
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert resumed.witness.written[: 6 - step] == run.witness.written[step:]
        assert resumed.witness.weights[: 6 - step] == run.witness.weights[step:]


def test_persistent_workers_do_not_change_a_resumed_run(tmp_path):
    options = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True, "num_train_epochs": 2}
    run = trainer(tmp_path / "whole", "full", save_strategy="steps", save_steps=3, **options)
    run.train()
    resumed = trainer(tmp_path / "resumed", "full", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert resumed.witness.written == run.witness.written[3:]
    assert resumed.witness.weights == run.witness.weights[3:]


def in_stream(**options: Any) -> dict[str, Any]:
    """Options of a run over ten rows of a stream, two steps a pass."""
    return {"train_dataset": rows(10).to_iterable_dataset(num_shards=2), "eval_strategy": "no", **options}


# A pass over a dataset has four steps.
@pytest.mark.parametrize(
    ("options", "raised"),
    [
        pytest.param(lambda: {"max_steps": 3}, {"max_steps": 5}, id="steps", marks=pytest.mark.quick),
        pytest.param(lambda: {"num_train_epochs": 0.5}, {"num_train_epochs": 1.25}, id="half an epoch"),
        pytest.param(lambda: in_stream(max_steps=3), None, id="stream"),
        pytest.param(
            lambda: {"max_steps": 3, "eval_steps": 1, "load_best_model_at_end": True, "learning_rate": 0.5},
            None,
            id="best model",
        ),
    ],
)
def test_resuming_a_finished_run_trains_no_step(tmp_path, caplog, options, raised):
    def made(folder: Path, **more: Any) -> Watched:
        return trainer(folder, "full", save_strategy="steps", save_steps=1, **options() | more)

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in sorted(tmp_path.rglob("*.json"))}

    run = made(tmp_path)
    run.train()
    done, saved = run.state.global_step, files()
    again = made(tmp_path)
    result = again.train(resume_from_checkpoint=True)
    assert (again.witness.written, again.witness.weights) == ([], [])
    assert result.global_step == again.state.global_step == again.state.max_steps == done
    assert all(map(torch.equal, again.model.parameters(), run.model.parameters())), "also where the best is another"
    assert f"checkpoint-{done} is at step {done} of {done}" in caplog.text
    assert files() == saved
    if raised is not None:
        whole, longer = made(tmp_path / "whole", **raised), made(tmp_path, **raised)
        whole.train()
        longer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{done}"))
        assert longer.witness.written == whole.witness.written[done:] != []
        assert longer.witness.weights == whole.witness.weights[done:]


def test_longer_resumed_run_has_rates_of_its_own_schedule(tmp_path):
    options = {"lr_scheduler_type": "linear", "warmup_steps": 2, "max_steps": 4, "eval_strategy": "no"}
    short = trainer(tmp_path, "full", save_strategy="steps", save_steps=1, **options)
    short.train()
    whole = trainer(tmp_path / "whole", "full", **options | {"max_steps": 6})
    whole.train()
    before, after = (tiny.logged(run, "learning_rate") for run in (short, whole))
    for step in (3, 4):  # in the middle, and finished: a schedule that has ended leaves a rate of 0
        longer = trainer(tmp_path / "longer", "full", **options | {"max_steps": 6})
        longer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert tiny.logged(longer, "learning_rate") == [*before[:step], *after[step:]]
        assert min(after[step:]) > 0
    resumed = trainer(tmp_path / "resumed", "full", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.witness.weights == short.witness.weights[3:]


@pytest.mark.parametrize(
    ("options", "named"), [({"weight_decay": 0.25}, "weight_decay=0.0 instead of 0.25"), ({"max_grad_norm": 0.5}, None)]
)
def test_settings_that_a_checkpoint_overwrites_are_logged(tmp_path, caplog, whole, options, named):
    run = trainer(tmp_path, "full", max_steps=3, eval_strategy="no", **options)
    run.train(resume_from_checkpoint=str(whole["full"][0] / "checkpoint-1"))
    assert run.optimizer.param_groups[0]["weight_decay"] == 0
    assert ("The optimizer keeps the settings of" in caplog.text) is (named is not None)
    assert (named or "") in caplog.text
