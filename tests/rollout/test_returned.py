"""Completions of a custom rollout are converted to token ids, or refused by name and row, before a model reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from support import tiny

from trl_opsd import OPSDTrainer, RolloutBackend
from trl_opsd.rollout.returned import checked_stream


class Own(RolloutBackend):
    """Returns what a test sets, or what its function makes of all prompts, and clears its prompts."""

    def __init__(self, written: Any) -> None:
        self.written = written

    def bind(self, trainer: Any) -> None:
        """Needs nothing."""

    def complete(self, prompt_ids: list[list[int]], step: int) -> Any:
        written = self.written(prompt_ids) if callable(self.written) else self.written
        for ids in prompt_ids:
            ids.clear()
        return written


class OwnComplete(OPSDTrainer):
    """Completes without its rollout."""

    def complete(self, prompt_ids: list[list[int]]) -> Any:
        return self.rollout.complete([[*ids] for ids in prompt_ids], 0)


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
    (None, r"returned a NoneType \(None\) for 2 prompts"),
    (torch.zeros(2, 4, dtype=torch.int64), r"returned a Tensor of shape \(2, 4\) for 2 prompts: .*without padding"),
    ({0: [7], 1: [8]}, "returned a dict"),
    ([[7]], "returned 1 completions for 2 prompts"),
    ([[7], [8], [9]], "returned 3 completions for 2 prompts"),
]
WRONG_ROWS: list[tuple[Any, str]] = [
    *(
        (row, " for prompt 1 a .*: expected a list of token ids")
        for row in (
            None, 8, "8", torch.zeros(1, 3, dtype=torch.int64), torch.tensor(3), [8.0], torch.tensor([8.0]),
            np.array([np.nan]), [None], [[8], 9], ["8"], [True, 9], torch.tensor([True]), [torch.tensor(True)], [2**70],
        )
    ),
    ([-1], "contains the token id -1"),
    (torch.tensor([8, -100]), "contains the token id -100"),
    ([259], "contains the token id 259"),
    ([7] * 25, "generated 25 tokens, but `max_completion_length=24`"),
]  # fmt: skip


def test_completions_that_are_no_token_ids_are_refused(make_trainer):
    trainer, subclass = make_trainer(rollout=Own([])), make_trainer(OwnComplete, rollout=Own([]))
    for written, message in [*WRONG, *(([[7], row], message) for row, message in WRONG_ROWS)]:
        trainer.rollout.written = written
        with pytest.raises(ValueError, match=f"Own.*{message}"):
            trainer.complete([[5], [6]])
        subclass.rollout.written = written
        with pytest.raises(ValueError, match=rf"OwnComplete\.complete.*{message}"):
            subclass.train()
    for one in (trainer, subclass):
        one.rollout.written = [torch.tensor([7] * 24), np.array([9])]
        one.train()
        assert one.state.global_step == 3


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


def test_invalid_rows_of_a_stream_are_refused(make_trainer):
    trainer = make_trainer()
    for stream, message in [
        ([(2, [7])], "yielded row 2 for 2 prompts"),
        ([(-1, [7])], "yielded row -1 for 2 prompts"),
        ([(0, [7]), (0, [7])], "yielded row 0 a second time"),
        ([(1, [7])], "yielded 1 completions for 2 prompts, none for row 0"),
        *(([(1, row)], message) for row, message in WRONG_ROWS),
    ]:
        with pytest.raises(ValueError, match=f"Own.*{message}"):
            list(rows_from(trainer, stream))


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


def test_a_rollout_without_streaming_yields_its_completions():
    assert list(Own([[7, 8], [9]]).stream([[5], [6]], 0)) == [(0, [7, 8]), (1, [9])]
    for returned, message in WRONG:
        with pytest.raises(ValueError, match=f"Own {message}"):
            Own(returned).stream([[5], [6]], 0)


# ---- What follows the prompt, and nothing else changed ---------------------------------------------------------------


def whole(prompt_ids: list[list[int]]) -> list[list[int]]:
    """What `generate` returns: prompts, padded on the left, and what follows."""
    longest = max(map(len, prompt_ids))
    return [[0] * (longest - len(ids)) + ids + [7, 8] for ids in prompt_ids]


@pytest.mark.parametrize("end", [2, 0], ids=["padded with another token", "padded with the end token"])
@pytest.mark.parametrize("cls", [OPSDTrainer, OwnComplete])
def test_completions_that_begin_with_their_prompts_warn(make_trainer, caplog, cls, end):
    student = tiny.qwen2()
    student.generation_config.eos_token_id = [2, end]
    make_trainer(cls, model=student, rollout=Own(whole), max_completion_length=48).train()
    name = "OwnComplete.complete" if cls is OwnComplete else "Own"
    assert caplog.text.count(f"Every completion returned by {name} starts with its whole prompt") == 1


def test_completions_that_do_not_repeat_prompts_do_not_warn(make_trainer, caplog):
    for answer, prompts in [
        (lambda prompts: [prompts[0] + [7], *([7, 8] for _ in prompts[1:])], tiny.PROMPTS),  # one of them
        (lambda prompts: [[*ids[:-1], 7] for ids in prompts], tiny.PROMPTS),  # a part of each
        (lambda prompts: [[] for _ in prompts], tiny.PROMPTS),
        (whole, ["a", "xy"] * 2),  # which may be by chance
    ]:
        make_trainer(train_dataset=Dataset.from_dict({"prompt": prompts}), rollout=Own(answer)).train()
        assert "starts with its whole prompt" not in caplog.text


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
