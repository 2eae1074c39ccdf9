"""Completions of a custom rollout are converted to token ids, or refused by name and row, before a model reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from trl_opsd import RolloutBackend


class Own(RolloutBackend):
    """Returns the completions that a test sets, and clears its prompts."""

    def __init__(self, written: Any) -> None:
        self.written = written

    def bind(self, trainer: Any) -> None:
        """Needs nothing."""

    def complete(self, prompt_ids: list[list[int]], step: int) -> Any:
        for ids in prompt_ids:
            ids.clear()
        return self.written


@pytest.mark.parametrize(
    "row",
    [
        [7, 8], (7, 8), np.array([7, 8]), np.array([7, 8], dtype=np.uint8), [np.int64(7), np.int32(8)],
        torch.tensor([7, 8]), [torch.tensor(7), torch.tensor(8, dtype=torch.int32)],
    ],
    ids=repr,
)  # fmt: skip
def test_ids_of_other_libraries_are_converted_to_int(make_trainer, row):
    trainer = make_trainer(rollout=Own([row, [], np.array([], dtype=np.int64)]))
    prompts = [[5], [6, 7], [8]]
    completions = trainer.complete(prompts)
    assert completions == [[7, 8], [], []]
    assert {type(token) for ids in completions for token in ids} == {int}
    assert prompts == [[5], [6, 7], [8]], "a rollout gets a copy of the prompts"


WRONG: list[tuple[Any, str]] = [
    (None, "Own returned None: `complete` must return a list with one completion for each prompt"),
    (torch.zeros(2, 4, dtype=torch.int64), r"Own returned a Tensor of shape \(2, 4\): .*without padding"),
    (np.zeros((2, 4), dtype=np.int64), r"Own returned a ndarray of shape \(2, 4\)"),
    ({0: [7], 1: [8]}, "Own returned a dict"),
    ((ids for ids in [[7], [8]]), "Own returned a generator"),
    ([[7]], "Own returned 1 completions for 2 prompts"),
    ([[7], [8], [9]], "Own returned 3 completions for 2 prompts"),
    ([[7], None], "Own returned for prompt 1 None: expected a list of token ids"),
    ([[7], 8], r"for prompt 1 a int \(8\): expected a list"),
    ([[7], "8"], r"for prompt 1 a str \('8'\): expected a list"),
    ([[7], torch.zeros(1, 3, dtype=torch.int64)], r"for prompt 1 a Tensor of shape \(1, 3\): expected a list"),
    ([[7], torch.tensor(3)], r"for prompt 1 a Tensor of shape \(\)"),
    ([[7], [8.0]], r"for prompt 1 a float \(8.0\) among the tokens: expected token ids, which are integers"),
    ([[7], torch.tensor([8.0])], r"for prompt 1 a float \(8.0\) among"),
    ([[7], np.array([np.nan])], r"for prompt 1 a float \(nan\) among"),
    ([[7], [None]], "for prompt 1 None among the tokens"),
    ([[7], [[8]]], "for prompt 1 a list among the tokens"),
    ([[7], ["8"]], r"for prompt 1 a str \('8'\) among"),
    ([[7], [True]], r"for prompt 1 a bool \(True\) among"),
    ([[7], torch.tensor([True])], r"for prompt 1 a bool \(True\) among"),
    ([[7], [np.bool_(True)]], r"for prompt 1 a bool.* among"),
    ([[7], [torch.tensor(True)]], r"for prompt 1 a Tensor of shape \(\) among"),
    ([[7], [-1]], "What Own wrote has the token id -1: expected ids from 0 on, and no padding"),
    ([[7], torch.tensor([8, -100])], "What Own wrote has the token id -100"),
    ([[7], [259]], "What Own wrote has the token id 259, but the models know 259 ids"),
    ([[7], [2**70]], "What Own wrote has the token id 1180591620717411303424"),
]


def test_completions_that_are_no_token_ids_are_refused(make_trainer):
    trainer = make_trainer(rollout=Own([]))
    for written, message in WRONG:
        trainer.rollout.written = written
        with pytest.raises(ValueError, match=message):
            trainer.complete([[5], [6]])
    trainer.rollout.written = [torch.tensor([7, 8, 2]), np.array([9])]
    trainer.train()
    assert trainer.state.global_step == 3
