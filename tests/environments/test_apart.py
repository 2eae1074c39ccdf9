"""Rows of a rollout in another process act without waiting for others, and are learned from as they end."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from environments.worlds import END, Adder, Scripted, call, given, once, rows
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
    )
    trainer.rollout.seconds = 0.3
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["overlap/first_backward"] < log["overlap/last_row"], "it learns while others act"


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


def test_rows_of_a_failed_batch_are_forgotten_and_never_act_again(make_trainer):
    early, going, gone = threading.Event(), threading.Event(), threading.Event()

    class Failing(Server):
        fails = True

        def one_by_one(self, prompt_ids: list[list[int]], step: int) -> Any:
            fails, self.fails = self.fails, False

            def ask(number: int, ids: list[int]) -> list[int]:
                text = f"done{END}"
                if fails and number == 0:
                    assert early.wait(20)
                    raise ConnectionError("gone")
                if fails and number == 1:
                    going.wait(20)
                    gone.set()
                    text = call(number=1000)
                elif fails:
                    text = f"early{END}"
                    threading.Timer(0.3, early.set).start()
                return self.tokenizer(text)["input_ids"]

            return ask

    dataset = rows(3, start=[30, 40, 50])
    trainer = make_trainer(**given(once(END), rollout=Failing(None), train_dataset=dataset))
    with pytest.raises(ConnectionError, match="gone"):
        trainer.score(list(dataset))
    batch = trainer.score(list(dataset)).rollout
    assert list(map(trainer.processing_class.decode, batch.completion_lists())) == [f"done{END}"] * 3
    going.set()
    assert gone.wait(20)
    for thread in threading.enumerate():
        if thread.name == "trl_opsd row":
            thread.join(20)
    assert [one.total for one in trainer.environments] == [30, 40, 50]
