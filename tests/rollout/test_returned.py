"""Completions of a custom rollout are converted to token ids, or refused by name and row, before a model reads them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny

from trl_opsd import OPSDTrainer, RolloutBackend
from trl_opsd.rollout.returned import checked_stream


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
    (None, r"Own returned a NoneType \(None\) for 2 prompts: `complete` must return a list"),
    (torch.zeros(2, 4, dtype=torch.int64), r"Own returned a Tensor of shape \(2, 4\) for 2 prompts: .*without padding"),
    (np.zeros((2, 4), dtype=np.int64), r"Own returned a ndarray of shape \(2, 4\)"),
    ({0: [7], 1: [8]}, "Own returned a dict"),
    ((ids for ids in [[7], [8]]), "Own returned a generator"),
    ([[7]], "Own returned 1 completions for 2 prompts"),
    ([[7], [8], [9]], "Own returned 3 completions for 2 prompts"),
    *(
        ([[7], row], f"Own returned for prompt 1 {re.escape(said)}: expected a list of token ids, which are integers")
        for row, said in [
            (None, "a NoneType (None)"),
            (8, "a int (8)"),
            ("8", "a str ('8')"),
            (torch.zeros(1, 3, dtype=torch.int64), "a Tensor of shape (1, 3)"),
            (torch.tensor(3), "a Tensor of shape ()"),
            ([8.0], "a list ([8.0])"),
            (torch.tensor([8.0]), "a Tensor of shape (1,)"),
            (np.array([np.nan]), "a ndarray of shape (1,)"),
            ([None], "a list ([None])"),
            ([[8], 9], "a list ([[8], 9])"),
            (["8"], "a list (['8'])"),
            ([True, 9], "a list ([True, 9])"),
            (torch.tensor([True]), "a Tensor of shape (1,)"),
            (np.array([True]), "a ndarray of shape (1,)"),
            ([torch.tensor(True)], "a list ([tensor(True)])"),
            ([2**70], "a list ([1180591620717411303424])"),
        ]
    ),
    ([[7], [-1]], "A completion of Own contains the token id -1: expected ids of at least 0, without padding"),
    ([[7], torch.tensor([8, -100])], "A completion of Own contains the token id -100"),
    ([[7], [259]], "A completion of Own contains the token id 259, but the models have 259 ids"),
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


# ---- Rows that are yielded as they end -------------------------------------------------------------------------------


def rows_from(trainer: OPSDTrainer, stream: Any, prompts: int = 2) -> Any:
    return checked_stream(stream, trainer, [[5]] * prompts, "Own")


def test_rows_of_a_stream_are_checked_as_they_come(make_trainer):
    trainer = make_trainer()
    taken = rows_from(trainer, iter([(np.int64(1), torch.tensor([7, 2, 9])), [0, (8,)], (2, np.array([], int))]), 3)
    assert next(taken) == (1, [7, 2]), "up to the end token, before another was asked for"
    found = list(taken)
    assert found == [(0, [8]), (2, [])]
    assert {type(value) for row, ids in found for value in (row, *ids)} == {int}


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        ([(2, [7])], "Own yielded row 2 for 2 prompts: expected each row once, starting from 0"),
        ([(-1, [7])], "Own yielded row -1 for 2 prompts"),
        ([(0, [7]), (0, [7])], "Own yielded row 0 a second time"),
        ([(1, [7])], "Own yielded 1 completions for 2 prompts, none for row 0"),
        ([(1, [8.0])], r"Own yielded for prompt 1 a list \(\[8.0\]\): expected a list of token ids"),
        ([(1, [259])], "A completion of Own contains the token id 259"),
        ([(1, [7] * 25)], "Own generated 25 tokens, but `max_completion_length=24`"),
    ],
)
def test_invalid_rows_of_a_stream_are_refused(make_trainer, stream, message):
    with pytest.raises(ValueError, match=message):
        list(rows_from(make_trainer(), stream))


def test_closing_the_checked_stream_closes_the_stream(make_trainer):
    log: list[str] = []

    def rows(ids: list[int]) -> Any:
        try:
            yield 0, ids
            log.append("went on")
            yield 1, [8]
        finally:
            log.append("closed")

    trainer = make_trainer()
    stream = rows([7])  # which is not collected while this refers to it
    taken = rows_from(trainer, stream)
    next(taken)
    taken.close()
    assert log == ["closed"]
    with pytest.raises(ValueError, match="token id 259"):
        next(rows_from(trainer, rows([259])))
    assert log == ["closed"] * 2


def test_a_rollout_without_streaming_yields_its_completions(make_trainer):
    written = [[7, 8], [9]]
    assert list(Own(written).stream([[5], [6]], 0)) == [(0, [7, 8]), (1, [9])]
    for returned, message in [(None, "Own returned a NoneType"), ([[7]], "Own returned 1 completions for 2 prompts")]:
        with pytest.raises(ValueError, match=message):
            Own(returned).stream([[5], [6]], 0)


# ---- What follows the prompt, within the limit; and nothing else changed ---------------------------------------------


class Answering(RolloutBackend):
    """Returns what a function makes of all prompts."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def bind(self, trainer: Any) -> None:
        self.trainer = trainer

    def complete(self, prompt_ids: list[list[int]], step: int) -> Any:
        return self.answer(self, prompt_ids)


class OwnComplete(OPSDTrainer):
    """Completes without its rollout."""

    def complete(self, prompt_ids: list[list[int]]) -> Any:
        return self.rollout.answer(self.rollout, prompt_ids)


REPEATED = "starts with its whole prompt, which would be trained on"


def whole(pad: int) -> Any:
    """What `generate` returns: prompts, padded on the left, and what follows."""

    def rows(_: Any, prompt_ids: list[list[int]]) -> list[list[int]]:
        longest = max(map(len, prompt_ids))
        return [[pad] * (longest - len(ids)) + ids + [7, 8] for ids in prompt_ids]

    return rows


@pytest.mark.parametrize("end", [2, 0], ids=["padded with another token", "padded with the end token"])
@pytest.mark.parametrize("cls", [OPSDTrainer, OwnComplete])
def test_completions_that_begin_with_their_prompts_warn(make_trainer, caplog, cls, end):
    student = tiny.qwen2()
    student.generation_config.eos_token_id = [2, end]
    make_trainer(cls, model=student, rollout=Answering(whole(pad=0)), max_completion_length=48).train()
    name = "OwnComplete.complete" if cls is OwnComplete else "Answering"
    assert caplog.text.count(f"Every completion returned by {name} {REPEATED}") == 1


@pytest.mark.parametrize(
    "answer",
    [
        lambda _, prompts: [[7, 8] for _ in prompts],
        lambda _, prompts: [prompts[0] + [7], *([7, 8] for _ in prompts[1:])],  # one of them
        lambda _, prompts: [[*ids[:-1], 7] for ids in prompts],  # a part of each
        lambda _, prompts: [[] for _ in prompts],
    ],
)
def test_completions_that_do_not_repeat_prompts_do_not_warn(make_trainer, caplog, answer):
    make_trainer(rollout=Answering(answer)).train()
    assert REPEATED not in caplog.text


def test_short_repeated_prompts_do_not_warn(make_trainer, caplog):
    prompts = tiny.rows(1).from_dict({"prompt": ["a", "xy"] * 2})
    make_trainer(train_dataset=prompts, rollout=Answering(whole(pad=0))).train()
    assert REPEATED not in caplog.text


@pytest.mark.parametrize("cls", [OPSDTrainer, OwnComplete])
def test_a_completion_over_the_limit_is_refused(make_trainer, cls):
    make_trainer(cls, rollout=Answering(lambda _, prompts: [[7] * 24 for _ in prompts])).train()
    trainer = make_trainer(cls, rollout=Answering(lambda _, prompts: [[7] * 25 for _ in prompts]))
    with pytest.raises(ValueError, match="generated 25 tokens, but `max_completion_length=24`: limit it to that"):
        trainer.train()


@pytest.mark.parametrize("written", [[[7]], [[7], [8.0]], [[7], [259]], None])
def test_completions_of_a_subclass_are_checked(make_trainer, written):
    with pytest.raises(ValueError, match=r"OwnComplete\.complete (returned|contains)"):
        make_trainer(OwnComplete, rollout=Answering(lambda *_: written)).train()


@pytest.mark.parametrize("verb", ["complete", "teach", "weigh"])
def test_student_left_in_evaluation_mode_trains_in_training_mode(trained, verb):
    class Leaving(OPSDTrainer):
        modes: list[bool] = []  # noqa: RUF012

        def compare(self, student, *args):
            self.modes.append(student.training)
            return super().compare(student, *args)

    def leaves(self, *args):
        self.model.eval()
        return getattr(OPSDTrainer, verb)(self, *args)

    setattr(Leaving, verb, leaves)
    trainer = trained(Leaving)
    assert trainer.modes == [True] * 3
    logged = {name for entry in trainer.state.log_history for name in entry}
    assert "completions/mean_length" in logged
    assert not any(name.startswith("eval_") for name in logged)
