"""A batch that a subclass has changed, or that was built by hand with TRL's keys, has the loss it has in TRL."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset
from support import tiny
from support.parity import TOLERANCE, Replaying, largest_gaps, made, trained
from trl import DistillationConfig

from trl_opsd import OPSDConfig, OPSDTrainer


def hole(batch):
    """Masks the second token, in place."""
    batch["completion_mask"][:, 1] = 0


def truncated(batch):
    """Leaves out each completion without an end token, as GRPO users do, and counts again."""
    ends = (batch["completion_ids"] == tiny.tokenizer().eos_token_id).any(1, keepdim=True)
    batch["completion_mask"] = batch["completion_mask"] * ends
    batch["num_items_in_batch"] = batch["completion_mask"].sum()


def tool(batch):
    """Keeps every other token from the loss, but not from the models."""
    batch["tool_mask"] = torch.arange(batch["completion_ids"].size(1)).expand_as(batch["completion_ids"]) % 2


def longer(batch):
    """Counts one token of padding."""
    batch["completion_mask"][:, -1] = 1


def other_tokens(batch):
    """Writes other tokens."""
    batch["completion_ids"] = (batch["completion_ids"] + 7) % tiny.VOCABULARY


def narrower(batch):
    """Cuts the last column off."""
    for name in ("completion_ids", "completion_mask"):
        batch[name] = batch[name][:, :-1]


def prepended(batch):
    """Writes six tokens before each prompt."""
    for name, value in (("prompt_ids", 77), ("prompt_mask", 1)):
        batch[name] = torch.cat([torch.full((len(batch[name]), 6), value), batch[name]], 1)


def appended(batch):
    """Writes four tokens after each completion, its padding included."""
    for name, value in (("completion_ids", 77), ("completion_mask", 1)):
        batch[name] = torch.cat([batch[name], torch.full((len(batch[name]), 4), value)], 1)


def unmasked(batch):
    """Has the padding read as text."""
    for name in ("prompt_mask", "completion_mask"):
        batch[name] = torch.ones_like(batch[name])


def changing(base: type, change: Any) -> type:
    class Changing(base):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            change(batch)
            return batch

    return Changing


OPTIONS = {"beta": 0.5, "gradient_accumulation_steps": 2}


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory):
    """After the same training."""
    return trained(OPSDTrainer, OPSDConfig(**tiny.options(tmp_path_factory.mktemp("unchanged"), **OPTIONS)))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(hole, marks=pytest.mark.quick),
        *(truncated, other_tokens, narrower, prepended),
        *(pytest.param(one, marks=pytest.mark.long) for one in (tool, longer, appended, unmasked)),
    ],
)
def test_a_batch_changed_in_a_subclass_trains_as_in_trl(tmp_path, unchanged, change):
    options = tiny.options(tmp_path, **OPTIONS)
    options |= {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 8}
    rows = {"eval_dataset": tiny.rows(8)}
    trls = trained(changing(Replaying, change), DistillationConfig(**options), **rows)
    ours = trained(changing(OPSDTrainer, change), OPSDConfig(**options), **rows)
    assert max(largest_gaps(trls, ours)) <= TOLERANCE
    assert max(largest_gaps(unchanged, ours)) > 10 * TOLERANCE, "the change must matter"
    losses = [next(row["eval_loss"] for row in one.state.log_history if "eval_loss" in row) for one in (trls, ours)]
    assert losses[1] == pytest.approx(losses[0], abs=TOLERANCE)


def by_hand() -> dict[str, torch.Tensor]:
    """Two prompts with completions of two lengths, under TRL's keys."""
    return {
        "prompt_ids": torch.tensor([[0, 11, 12], [13, 14, 15]]),
        "prompt_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]),
        "completion_ids": torch.tensor([[21, 22, 2], [23, 2, 0]]),
        "completion_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
    }


@pytest.mark.quick
@pytest.mark.parametrize(
    "more", [{}, {"num_items_in_batch": torch.tensor(3.0)}, {"tool_mask": torch.tensor([[1, 0, 1]] * 2)}]
)
def test_compute_loss_takes_a_batch_with_the_keys_of_trl(tmp_path, more):
    found = []
    for cls, config in ((Replaying, DistillationConfig), (OPSDTrainer, OPSDConfig)):
        trainer = made(cls, config(**tiny.options(tmp_path, beta=0.3)))
        trainer.model.train()
        loss = trainer.compute_loss(trainer.model, {**by_hand(), **more})
        loss.backward()
        found.append((loss, [parameter.grad for parameter in trainer.model.parameters()]))
    (theirs, their_gradient), (ours, our_gradient) = found
    assert ours.item() == pytest.approx(theirs.item(), abs=TOLERANCE) != 0
    torch.testing.assert_close(our_gradient, their_gradient, atol=TOLERANCE, rtol=1e-4)


def test_compute_loss_weighs_a_batch_built_by_hand(make_trainer):
    class Halving(OPSDTrainer):
        def weigh(self, rollout, rows, targets):
            assert [row["prompt"] for row in rows] == [")*", "+,-"]
            return rollout.weights * torch.tensor([1.0, 0.0, 0.0])

    masked = {**by_hand(), "completion_mask": torch.tensor([[1, 0, 0], [1, 0, 0]])}
    weighed, plain = make_trainer(Halving), make_trainer()
    losses = [one.compute_loss(one.model, batch) for one, batch in ((weighed, by_hand()), (plain, masked))]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)


def privileged() -> Dataset:
    return tiny.rows().add_column("privileged_context", ["a hint"] * 8)


def test_batch_by_hand_needs_rows_if_teacher_reads_more(make_trainer):
    trainer = make_trainer(train_dataset=privileged())
    with pytest.raises(
        ValueError, match=r"without its dataset rows, from which the teacher's prompts are made.*rows'\]"
    ):
        trainer.compute_loss(trainer.model, by_hand())
    rows = privileged().to_list()[:2]
    batch = trainer._generate_and_score_completions(rows)
    only_trls = {name: batch[name] for name in by_hand()}
    expected = trainer.compute_loss(trainer.model, batch)
    assert trainer.compute_loss(trainer.model, {**only_trls, "rows": rows}).item() == pytest.approx(expected.item())
    assert make_trainer().compute_loss(trainer.model, only_trls).item() != pytest.approx(expected.item(), rel=1e-3)


def test_the_teacher_reads_again_only_what_has_changed(make_trainer):
    taught = []

    class Teaching(OPSDTrainer):
        def teach(self, rollout, rows):
            taught.append(len(rows))
            return super().teach(rollout, rows)

    def only_first(batch):
        batch["completion_mask"][0] = 0

    given = {"gradient_accumulation_steps": 2, "max_steps": 1}
    make_trainer(Teaching, **given).train()
    make_trainer(changing(Teaching, lambda batch: None), **given).train()
    assert taught == [4, 4]
    make_trainer(changing(Teaching, only_first), **given).train()
    assert taught == [4, 4, 4, 2], "the micro-batch with the changed row"


@pytest.mark.long
def test_loss_of_a_shortened_mask_keeps_its_denominator_unless_recounted(tmp_path):
    """In TRL and here; `weigh` needs no counting (docs/extending.md)."""

    class KeepingFirst(OPSDTrainer):
        def weigh(self, rollout, rows, targets):
            return rollout.weights * (torch.arange(rollout.weights.size(1)) < 1)

    def first_loss(cls, config):
        trainer = made(cls, config(**tiny.options(tmp_path, max_steps=1)))
        trainer.train()
        return trainer.state.log_history[0]["loss"]

    def keep_first(batch):
        batch["completion_mask"][:, 1:] = 0

    def count_again(batch):
        keep_first(batch)
        batch["num_items_in_batch"] = batch["completion_mask"].sum()

    theirs, ours = (changing(one, keep_first) for one in (Replaying, OPSDTrainer))
    diluted = first_loss(ours, OPSDConfig)
    assert diluted == pytest.approx(first_loss(theirs, DistillationConfig), abs=TOLERANCE)
    counted = first_loss(changing(OPSDTrainer, count_again), OPSDConfig)
    assert counted > 1.5 * diluted
    assert counted == pytest.approx(first_loss(KeepingFirst, OPSDConfig), abs=TOLERANCE)
