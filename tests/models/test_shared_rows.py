"""Students that can read rows by parts of their positions, and those that cannot."""

from __future__ import annotations

import pytest
import torch
from support import tiny
from transformers import Gemma3TextConfig, MistralConfig

from trl_opsd.models.shared_rows import _unpadded, check_shareable
from trl_opsd.types import Rollout, RowTargets, TeacherTargets

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("make", [tiny.qwen2, tiny.llama])
def test_students_with_full_attention_are_accepted(make):
    student = make()
    check_shareable(student, "sdpa")
    check_shareable(student, None)


SIZES = {name: getattr(tiny.qwen2().config, name) for name in ("hidden_size", "num_hidden_layers", "vocab_size")}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: tiny.qwen2(attn_implementation="eager"), "attention is 'eager': load it with .*'sdpa'"),
        (lambda: tiny.model(Gemma3TextConfig(**SIZES)), "layers of the kind 'sliding_attention'"),
        (lambda: tiny.model(MistralConfig(**SIZES, sliding_window=8)), "layers of the kind 'sliding_attention'"),
    ],
)
def test_students_whose_rows_cannot_be_shared_are_refused(make, said):
    with pytest.raises(ValueError, match=said):
        check_shareable(make(), "sdpa")


@pytest.mark.parametrize(
    ("teachers", "dtype"), [((0, 1), torch.float32), ((0, 0), torch.float32), (None, torch.bfloat16)]
)
def test_targets_of_several_teachers_are_sent_in_one_dtype(teachers, dtype):
    """A process whose rows have only the second teacher must expect what the first one's states are sent in."""
    ones = torch.ones(2, 3, dtype=torch.long)
    rollout = Rollout(
        prompt_ids=ones, prompt_mask=ones, completion_ids=ones, completion_mask=ones, weights=ones.float()
    )
    states = [torch.randn(3, 4, dtype=torch.bfloat16), torch.randn(3, 4, dtype=torch.bfloat16)]
    rows = [RowTargets(one, torch.arange(3)) for one in states]
    targets = TeacherTargets.by_row(rows, 3, None if teachers is None else torch.tensor(teachers))
    sent = _unpadded(rollout, targets, torch.device("cpu"))["hidden"]
    assert sent.dtype == dtype
    assert torch.equal(sent[:, 2:].to(torch.bfloat16), torch.stack(states)), "behind the prompt"


def test_pull_log_probabilities_and_authors_are_sent_with_tokens():
    ids = torch.arange(10).view(2, 5)
    rollout = Rollout(
        prompt_ids=ids[:, :2],
        prompt_mask=torch.tensor([[0, 1], [1, 1]]),
        completion_ids=ids[:, 2:],
        completion_mask=torch.tensor([[1, 1, 1], [1, 1, 0]]),
        weights=torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]),
        nll_weight=torch.tensor([0.5, -2.0]),
        logprobs=torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, 0.0]]),
        authors=torch.tensor([[3, 1, 1], [2, 0, 1]]),
    )
    rows = [RowTargets(torch.randn(number, 4), torch.arange(number)) for number in (3, 2)]
    sent = _unpadded(rollout, TeacherTargets.by_row(rows, 3), torch.device("cpu"))
    assert sent["nll_weight"].tolist() == [0.5, -2.0]
    assert sent["tokens"][:, 1:].tolist() == [[2, 3, 4, 0], [6, 7, 8, 9]]
    assert sent["logprobs"].tolist() == [[-1, -2, -3, 0], [0, -4, -5, 0]]
    assert sent["authors"].tolist() == [[3, 1, 1, 0], [0, 2, 0, 1]]
    assert sent["weights"].tolist() == [[1, 1, 1, 0], [0, 1, 1, 0]]
