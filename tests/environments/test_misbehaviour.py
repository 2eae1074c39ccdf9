"""A tool that misbehaves costs its row at most: the student is told, and the run goes on."""

from __future__ import annotations

import math
import time

import pytest
from environments.worlds import END, Adder, call, given, once, rows

TOLD = {
    "raises": (call("misbehave", how="raise"), "{'error': 'no such table'}"),
    "exits": (call("misbehave", how="exit"), "{'error': '3'}"),
    "is unknown": (call("fly", to="the moon"), "Tool fly not found"),
    "is private": (call("__init__"), "Tool __init__ not found"),
    "is no tool": (call("get_reward"), "Tool get_reward not found"),
    "gets too little": (call("add"), "missing 1 required positional argument"),
    "returns a number": (call("misbehave", how="number"), "\n3.5\n"),
    "returns rows": (call("misbehave", how="rows"), "[{'id': 1}, {'id': 2}]"),
    "returns odd text": (call("misbehave", how="odd text"), "\n? odd \n"),
    "returns an image": (call("misbehave", how="image"), "{'error': 'This tool returned an image"),
    "returns an array": (call("misbehave", how="array"), "[0 1]"),
    "awaits in its own way": (call("misbehave", how="await in its own way"), "\nwaited\n"),
    "is awaited": (call("wait", seconds=0.01), "waited 0.01"),
}


@pytest.mark.parametrize("how", TOLD)
def test_the_student_is_told_what_came_of_its_call(trained, how):
    text, told = TOLD[how]
    trainer = trained(**given(once(text)))
    after = trainer.processing_class.decode(trainer.rollout.asked[1][0])
    assert told in after.split("<tool_response>", 1)[1]
    log = trainer.state.log_history[0]
    assert math.isfinite(log["loss"])
    assert log["tools/failure_frequency"] == ("error" in told or "Tool" in told or "missing" in told)


def test_a_tool_cannot_change_the_arguments_it_was_called_with(make_trainer):
    class Taking(Adder):
        def take(self, cells: list[int]) -> str:
            """Takes cells.

            Args:
                cells: Their numbers.
            """
            taken = len(cells)
            cells.clear()
            return str(taken)

    seen = []
    trainer = make_trainer(
        **given(once(call("take", cells=[1, 2])), Taking),
        reward_funcs=[lambda completions, **_: seen.extend(completions) or [0.0] * len(completions)],
        reward_weight=0.1,
        num_generations=2,
    )
    trainer.score(list(trainer.train_dataset))
    assert {str(one[0]["tool_calls"][0]["function"]["arguments"]) for one in seen} == {"{'cells': [1, 2]}"}
    said = [[(message["role"], message.get("content")) for message in one[1:]] for one in seen]
    assert said == [[("tool", "2"), ("assistant", "done")]] * len(seen), "what reward functions are shown of turns"


ENDS = {
    "a giant answer": call("misbehave", how="giant"),
    "an answer without room": call("misbehave", how="long"),
    "no JSON": f'<tool_call>\n{{"name": "add", "arguments"\n</tool_call>{END}',
    "arguments that are none": f'<tool_call>\n{{"name": "add", "arguments": "7"}}\n</tool_call>{END}',
    "no call": f"seven{END}",
}


@pytest.mark.parametrize("how", ENDS)
def test_a_row_that_cannot_go_on_ends_alone(make_trainer, how):
    def turns(prompt: str) -> str:
        return f"done{END}" if "<tool_response>" in prompt else ENDS[how] if "count 0" in prompt else call(number=1)

    trainer = make_trainer(**given(turns, train_dataset=rows(2)))
    rollout = trainer.score(list(trainer.train_dataset)).rollout
    texts = list(map(trainer.processing_class.decode, rollout.completion_lists()))
    assert texts[1].endswith(f"done{END}")
    if how != "arguments that are none":
        assert texts[0] == ENDS[how]
    assert rollout.weights.sum(1).min() > 0


@pytest.mark.parametrize("name", ["sleep", "wait"])
def test_hanging_call_ends_its_row_and_renews_its_environment(make_trainer, name, caplog):
    def turns(prompt: str) -> str:
        if "<tool_response>" in prompt:
            return f"done{END}"
        return call(name, seconds=60) if "count 1<" in prompt or "count 1 " in prompt else call(number=1)

    trainer = make_trainer(**given(turns, eval_dataset=rows(3), environment_timeout=0.5), per_device_eval_batch_size=3)
    start = time.perf_counter()
    found = trainer.evaluate()
    assert time.perf_counter() - start < 20
    assert found["eval_rewards/Adder/mean"] == 1, "the row that hung has no reward"
    before = list(trainer.environments)
    assert "no answer within 0.5 seconds" in caplog.text
    trainer.rollout.turns = once(call(number=5))
    assert trainer.evaluate()["eval_rewards/Adder/mean"] == 5
    assert sum(one not in before for one in trainer.environments) == 1


def test_feedback_that_fails_is_none(trained, caplog):
    class Silent(Adder):
        def get_feedback(self) -> str:
            raise KeyError("nothing to say")

    trainer = trained(**given(once(call(number=1)), Silent))
    assert "`get_feedback` of an environment failed, so teachers get none: KeyError" in caplog.text
    assert math.isfinite(trainer.state.log_history[0]["loss"])


def test_functions_may_be_async_which_trl_refuses(trained):
    trainer = trained(**given(once(call("wait", seconds=0)), None), tools=[Adder().wait])
    assert "\nwaited 0\n" in trainer.processing_class.decode(trainer.rollout.asked[1][0]).split("<tool_response>")[-1]
    assert trainer.state.log_history[0]["tools/failure_frequency"] == 0


@pytest.mark.parametrize("name", ["sleep", "wait"])
def test_rows_do_not_wait_for_each_other(trained, name):
    trainer = trained(
        **given(once(call(name, seconds=0.5)), train_dataset=rows(8)), per_device_train_batch_size=8, logging_steps=1
    )
    assert trainer.state.log_history[0]["time/act"] < 0.7 * 8 * 0.5
