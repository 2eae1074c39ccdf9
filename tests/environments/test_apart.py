"""Rows of a rollout in another process act without waiting for others, and are learned from as they end."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from environments.worlds import END, Adder, Scripted, call, given, rows
from support import tiny


class Server(Scripted):
    """A script that takes its time for each turn, whoever asks."""

    generates_out_of_process = True
    seconds = 0.0

    def one_by_one(self, prompt_ids: list[list[int]], step: int) -> Any:
        def ask(number: int, ids: list[int]) -> list[int]:
            assert ids[: len(prompt_ids[number])] == prompt_ids[number]
            time.sleep(self.seconds)
            return self.complete([ids], step)[0]

        return ask


class Afterwards(Adder):
    def get_feedback(self) -> str:
        return f"the total was {self.total}"


def turns(prompt: str) -> str:
    """As many calls as the number in the prompt, so rows have different numbers of turns; the last says nothing."""
    asked = int(prompt.rsplit("count ", 1)[1].split()[0])
    made = prompt.count("<tool_response>")
    return END if asked == 3 and made else call(number=made + 1) if made < asked else f"done{END}"


def trained(make_trainer, rollout: Any, **options: Any) -> Any:
    trainer = make_trainer(
        **given(turns, Afterwards, rollout=rollout, max_steps=2, train_dataset=rows(4)),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        learning_rate=1e-2,
        optim="sgd",  # AdamW would make steps of a rounding error
        **options,
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("overlap", [None, "step"])
def test_rows_apart_are_those_of_rows_together(make_trainer, overlap):
    together = trained(make_trainer, Scripted(turns))
    apart = trained(make_trainer, Server(turns), overlap=overlap)
    assert apart.turns.are_apart
    assert not together.turns.are_apart
    assert max(map(len, apart.rollout.asked)) == 1, "each row was asked for alone"
    logs = [[log for log in one.state.log_history if "loss" in log] for one in (together, apart)]
    for name in ("loss", "num_tokens", "turns/mean", "tools/call_frequency", "completions/mean_length"):
        # With `overlap` micro-batches have other rows.
        expected = [log[name] for log in logs[0]]
        assert [log[name] for log in logs[1]] == (pytest.approx(expected, rel=1e-5) if overlap else expected), name
    torch.testing.assert_close(tiny.weights(together), tiny.weights(apart), rtol=1e-4, atol=1e-5 if overlap else 0)


def test_a_teacher_generates_in_place_of_such_a_rollout(make_trainer):
    trainer = make_trainer(**given(turns, rollout=Server(turns), train_dataset=rows(2)))
    with trainer.generating_with(next(iter(trainer.teachers))):
        assert trainer.predict(trainer.train_dataset).predictions.shape[1] > 0
    assert trainer.rollout.asked == []
    trainer.predict(trainer.train_dataset)
    assert trainer.rollout.asked


def test_no_row_waits_for_another(make_trainer):
    trainer = make_trainer(
        **given(turns, rollout=Server(turns), train_dataset=rows(16)), per_device_train_batch_size=16
    )
    trainer.rollout.seconds = 0.1
    start = time.perf_counter()
    trainer.score(list(trainer.train_dataset))
    # 16 rows of up to 16 turns of 0.1 s each, one after the other, would take 12 s; the longest row takes 1.6 s.
    assert time.perf_counter() - start < 6


def test_a_step_takes_as_long_as_its_longest_row(make_trainer):
    trainer = make_trainer(
        **given(turns, rollout=Server(turns), train_dataset=rows(8)),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=8,
        overlap="step",
        logging_steps=1,
    )
    trainer.rollout.seconds = 0.3
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["overlap/first_backward"] < log["overlap/last_row"], "it learns while others act"


def test_server_error_is_raised_where_rows_are_taken(make_trainer):
    class Down(Server):
        def complete(self, prompt_ids: list[list[int]], step: int) -> list[list[int]]:
            raise ConnectionError("gone")

    trainer = make_trainer(**given(turns, rollout=Down(turns)))
    with pytest.raises(ConnectionError, match="gone"):
        trainer.score(list(trainer.train_dataset))


def test_a_batch_that_failed_leaves_nothing_for_the_next(make_trainer):
    trainer = make_trainer(**given(turns, Afterwards, rollout=Server(turns)))
    teach, trainer.teach = trainer.teach, lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.score(list(trainer.train_dataset))
    trainer.teach = teach
    fewer = list(trainer.train_dataset)[2:]
    batch = trainer.score(fewer)
    assert len(batch.rollout.completion_ids) == len(fewer)
    assert [one.total for one in trainer.environments] == [1 + 2, 1]
