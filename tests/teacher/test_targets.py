"""Targets hold the states of the tokens that may count, and of no other; the numbers are those of a state per token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import tiny

from trl_opsd import FixedRollout, FrozenTeacher, OPSDTrainer
from trl_opsd.models.backbone import completion_hidden
from trl_opsd.teacher import Resident
from trl_opsd.teacher.comparison import tokens_by_teacher
from trl_opsd.teacher.teachers import check_depends_on_input
from trl_opsd.types import Rollout, TeacherTargets
from trl_opsd.types.targets import Keeper, check_targets, kept_by_row

CPU = torch.device("cpu")
LENGTHS = [3, 40, 0, 7, 1, 12]
NAMES = ["math", "prose"] * 4


def ragged() -> Rollout:
    """Completions of many lengths, one of them empty, one with the answer of a tool inside."""
    torch.manual_seed(0)
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()
    weights = mask.float()
    weights[5, 4:9] = 0
    ids = torch.randint(3, tiny.VOCABULARY, (len(LENGTHS), 5 + max(LENGTHS)))
    return replace(tiny.rollout(ids[:, :5], ids[:, 5:], mask), weights=weights)


def frozen(model) -> FrozenTeacher:
    return FrozenTeacher(Resident(model, CPU))


def kept(targets: TeacherTargets) -> torch.Tensor:
    """[N, H], all states that are kept."""
    return torch.cat([row.hidden for row in targets.rows])


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_targets_take_one_state_per_token_that_may_count(dtype):
    rollout, model = ragged(), tiny.qwen2(48, 1).to(dtype)
    targets = frozen(model).targets(rollout)
    tokens = int(rollout.counts.sum())
    assert tokens == sum(LENGTHS) - 5
    assert kept(targets).nbytes == tokens * 48 * dtype.itemsize
    (block,) = {row.hidden.untyped_storage().data_ptr(): row.hidden.untyped_storage() for row in targets.rows}.values()
    assert block.nbytes() == tokens * 48 * dtype.itemsize, "nothing larger is kept alive"
    assert targets.hidden.nbytes == 6 * 40 * 48 * dtype.itemsize, "240 states for 58 tokens"


@pytest.mark.quick
def test_each_state_is_that_of_its_token():
    rollout, model = ragged(), tiny.qwen2(48, 1)
    padded = completion_hidden(model.eval(), rollout).detach()
    targets = frozen(model).targets(rollout)
    # Read in several passes; what a row's neighbours are changes its rounding.
    torch.testing.assert_close(kept(targets), padded[rollout.counts], rtol=0, atol=1e-6)
    assert [row.places.tolist() for row in targets.rows] == [one.nonzero().flatten().tolist() for one in rollout.counts]
    chosen = [3, 0, 5]
    part = targets.select(chosen).cut(12)
    torch.testing.assert_close(targets.hidden, padded * rollout.counts[..., None], rtol=0, atol=1e-6)
    assert torch.equal(part.hidden, targets.hidden[chosen, :12])


def test_a_row_ends_after_its_last_token_that_counts():
    rollout = ragged()
    rollout.weights[1, 20:] = 0
    assert rollout.ended().completion_mask.sum(1).tolist() == [3, 20, 0, 7, 1, 12]


def test_passes_may_have_any_rows_order_and_width():
    rollout = ragged()
    padded = completion_hidden(tiny.qwen2(48, 1).eval(), rollout).detach()
    keeper = Keeper(rollout.weights, "auto")
    for rows, width in (([4, 0], 3), ([2], 1), ([5, 1], 40)):
        keeper.put(rows, padded[rows, :width])
    keeper.put_tokens(3, padded[3, :7])
    assert torch.equal(keeper.targets().hidden, padded * rollout.counts[..., None])


@pytest.mark.quick
def test_changes_of_the_padded_form_are_kept():
    rollout = ragged()
    targets = frozen(tiny.qwen2(48, 1)).targets(rollout)
    expected = kept(targets).clone()
    targets.hidden[1, 2] = 7.0
    expected[3 + 2] = 7.0
    assert targets.rows is None
    again = kept_by_row(targets, rollout.weights).select(range(6))
    assert torch.equal(kept(again), expected)
    assert torch.equal(again.hidden, targets.hidden)


class EveryOther(OPSDTrainer):
    """Takes tokens from the loss after the teacher has read them."""

    def weigh(self, rollout, rows, targets):
        return rollout.weights * (torch.arange(rollout.weights.size(1)) % 2)


class Padded(EveryOther):
    """Its targets have a state for each token, at those that cannot count a wrong one."""

    def teach(self, rollout, rows):
        targets = super().teach(rollout, rows)
        wrong = 1e3 * (~rollout.counts[..., None]).float()
        return replace(targets, hidden=targets.hidden + wrong.to(targets.hidden))


def several(width=48):
    """Two teachers, the second of another width or at least another dtype."""
    return {
        "teacher_model": {"math": tiny.qwen2(48, 1), "prose": tiny.llama(width, 2).bfloat16()},
        "train_dataset": tiny.rows().add_column("teacher", NAMES),
    }


def test_losses_and_weights_equal_padded_targets_to_the_bit(trained):
    """Also of empty completions."""
    answers, found = tiny.recorded(tiny.tokenizer()), []
    some = {prompt: [] if n % 3 == 0 else one for n, (prompt, one) in enumerate(answers.items())}
    for cls in (EveryOther, Padded):
        given = {"gradient_accumulation_steps": 2, "learning_rate": 1e-2, "max_steps": 2, **several()}
        trainer = trained(cls, rollout=FixedRollout(some), **given)
        logs = [{name: row.get(name) for name in ("loss", "grad_norm")} for row in trainer.state.log_history]
        found.append((logs, tiny.weights(trainer)))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_each_row_keeps_the_width_and_dtype_of_its_teacher(make_trainer):
    trainer = make_trainer(**several(64))
    batch = trainer.score(list(trainer.train_dataset))
    targets, kinds = batch.targets, [(48, torch.float32), (64, torch.bfloat16)]
    assert [(row.hidden.size(1), row.hidden.dtype) for row in targets.rows] == kinds * 4
    of_one = TeacherTargets.by_row(targets.rows[::2], targets.tokens)  # which says of no row whose it is
    assert len(tokens_by_teacher(trainer.teachers.heads, of_one, batch.rollout.weights[::2])) == 1
    expected = [torch.cat([row.hidden for row in targets.rows[number::2]]) for number in range(2)]
    for _ in range(2):
        shares = tokens_by_teacher(trainer.teachers.heads, targets, batch.rollout.weights)
        given = [share.of_teacher(CPU) for share in shares]
        assert [(one.size(1), one.dtype) for one in given] == kinds
        assert all(map(torch.equal, given, expected))
        assert (targets.hidden.size(2), targets.hidden.dtype) == (64, torch.float32)
        assert not targets.hidden[::2, :, 48:].any()


@pytest.mark.parametrize("cls", [EveryOther, Padded])
def test_later_weights_of_tokens_without_targets_are_refused(make_trainer, cls):
    class Late(cls):
        def compare(self, student, rollout, targets, num_items):
            weights = self.change(rollout.completion_mask)
            return super().compare(student, replace(rollout, weights=weights), targets, num_items)

    trainer = make_trainer(Late, max_steps=1)
    trainer.change = torch.Tensor.float
    trainer.train()
    trainer = make_trainer(Late, max_steps=1)
    trainer.change = lambda mask: torch.ones_like(mask).float()
    with pytest.raises(ValueError, match=r"^\d+ tokens have a weight in the loss but no target: they are padding"):
        trainer.train()


def test_targets_for_other_rows_are_refused():
    targets = frozen(tiny.qwen2(48, 1)).targets(ragged().select([0, 1]))
    with pytest.raises(ValueError, match=r"^`here` returned `TeacherTargets` of shape \[2, 40, 48\] in torch.float32"):
        check_targets(targets, ragged(), "here", width=48)


def test_states_are_compared_without_the_padded_form():
    targets = frozen(tiny.qwen2(48, 1)).targets(rollout := ragged())
    check_depends_on_input(rollout, targets, "teacher")
    assert targets.rows is not None


def test_states_that_differ_in_the_last_checked_token_pass():
    rollout = ragged()
    hidden = torch.zeros(6, 40, 48).index_fill(2, torch.tensor(1), torch.finfo().min)  # as an excluded known token
    check = lambda: check_depends_on_input(rollout, TeacherTargets(hidden=hidden), "teacher")  # noqa: E731
    hidden[1, 39 - 1, 0] = 1.0
    check()
    hidden[:] = 1 + 1e-7 * torch.rand_like(hidden)  # equal but for rounding
    with pytest.raises(ValueError, match="same hidden state at all 58 tokens"):
        check()
