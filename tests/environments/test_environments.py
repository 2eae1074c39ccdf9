"""Agents in environments: what they are told, what is learned from, and who is told what afterwards."""

from __future__ import annotations

import asyncio
import random
import re
import threading
import time
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from datasets import IterableDataset
from environments.worlds import END, Adder, Drawn, Told, call, given, once, rows
from small_methods import Discounted
from support import tiny
from turns import EqualTurns

from trl_opsd.types import Rollout


def batch_of(trainer: Any, dataset: Any = None) -> Rollout:
    return trainer.score(list(dataset or trainer.train_dataset)).rollout


@pytest.mark.quick
def test_each_row_has_its_own_environment_which_is_reset_again(trained):
    trainer = trained(
        **given(once(call(number=1)), train_dataset=rows(4, start=[0, 10, 20, 30]), max_steps=2),
        per_device_train_batch_size=4,
    )
    current = trainer.environments
    assert [one.resets for one in current] == [2] * 4 or sorted(one.resets for one in current) == [2, 2, 2, 3]
    assert sorted(one.total for one in current) == [1, 11, 21, 31]
    assert len({id(one) for one in current}) == 4
    log = trainer.state.log_history[0]
    assert log["turns/mean"] == 2
    assert log["tools/call_frequency"] == 1
    assert log["time/act"] > 0


def taught(trainer: Any) -> list[Rollout]:
    """The rollouts that its teachers will see."""
    seen: list[Rollout] = []
    teach = trainer.teaching.teachers.targets
    trainer.teaching.teachers.targets = lambda rollout, *rest: seen.append(rollout) or teach(rollout, *rest)
    return seen


def test_observation_ends_the_prompt_and_context_is_the_teachers(make_trainer):
    trainer = make_trainer(**given(once(call(number=1)), Told, train_dataset=rows(2, start=[5, 6])))
    seen = taught(trainer)
    rollout = batch_of(trainer)
    decode = trainer.processing_class.decode
    assert "count 0 from 5<|im_end|>" in decode(rollout.prompt_lists()[0])
    assert "the total is 6" in decode(seen[0].prompt_lists()[1])
    assert "the total" not in decode(rollout.prompt_lists()[1])
    assert seen[0].completion_lists() == rollout.completion_lists()


def test_feedback_after_the_episode_teaches_as_a_context_known_before(trained):
    class Late(Adder):
        async def get_feedback(self) -> str:
            return f"the total was {self.total}"

    class Early(Adder):
        def get_privileged_context(self) -> str:
            return "Feedback on an earlier attempt:\n\nthe total was 1"

    losses = []
    for kind in (Late, Early):
        trainer = trained(**given(once(call(number=1)), kind, max_steps=3, logging_steps=1))
        losses.append(tiny.logged(trainer, "loss"))
        assert len(trainer.rollout.asked) == 2 * 3, "nothing was generated for the feedback"
    assert losses[0] == losses[1]


@pytest.mark.parametrize("gate", [None, 0.5])
def test_self_teacher_teaches_only_where_environments_tell_it_something(make_trainer, gate):
    said = ["too far", None, "", " \n", {"not": "text"}, 7, "word " * 3000, "too near"]

    class Saying(Adder):
        def get_feedback(self) -> Any:
            return said[self.total - 1]

    trainer = make_trainer(
        **given(once(call(number=1)), Saying, teacher_model=None, train_dataset=rows(8, start=list(range(8)))),
        teacher_model_kind="base",
        reward_gate=gate,
    )
    teaches = batch_of(trainer).weights.sum(1) > 0
    assert teaches.tolist() == [isinstance(one, str) and one.startswith("too") for one in said]


def test_what_an_environment_awaits_goes_on_while_the_student_generates(make_trainer):
    class Alive(Adder):
        async def reset(self, **_: Any) -> None:
            self.total, self.beats = 0, 0
            self.beating = asyncio.create_task(self._beat())

        async def _beat(self) -> None:
            while True:
                self.beats += 1
                await asyncio.sleep(0.01)

        def add(self, number: int) -> str:
            self.total = self.beats
            return str(asyncio.run(asyncio.sleep(0, number)))  # as synchronous clients do

        add.__doc__ = Adder.add.__doc__

    def slowly(prompt: str) -> str:
        time.sleep(0.3)
        return once(call(number=7))(prompt)

    trainer = make_trainer(**given(slowly, Alive, eval_dataset=rows(1)))
    assert trainer.evaluate()["eval_rewards/Alive/mean"] > 5
    assert "<tool_response>\n7\n" in trainer.processing_class.decode(trainer.rollout.asked[-1][0])


def test_rewards_of_environments_stand_beside_those_of_functions(make_trainer):
    def World(environments, completions, start, **_):
        assert len(environments) == len(completions) == len(start)
        return [float(one.total == 11) for one in environments]

    kinds = {name: type("World", (Adder,), {"get_reward": lambda self, by=by: self.total * by})
             for name, by in (("a", 1.0), ("b", 5.0))}  # fmt: skip
    dataset = rows(4, environment=["a", "b"] * 2, start=[10, 20] * 2)
    trainer = make_trainer(
        **given(once(call(number=1)), kinds, train_dataset=dataset, eval_dataset=dataset),
        reward_funcs=World,
        reward_weights=[3.0],
    )
    found = trainer.evaluate()
    names = ("World", "World_2", "World_3")
    assert [found[f"eval_rewards/{name}/mean"] for name in names] == [0.5, 11, 105]
    assert found["eval_reward"] == (11 + 105) / 2 + 3 * 0.5


def test_rows_name_their_environment_and_have_its_tools_alone(make_trainer):
    class Shouter:
        def reset(self, **row: Any) -> None:
            assert "environment" not in row

        def shout(self, text: str) -> str:
            """Shouts.

            Args:
                text: What.
            """
            return text.upper()

    def turns(prompt: str) -> str:
        if "<tool_response>" in prompt:
            return f"done{END}"
        return call("shout", text="a") if "Shouts" in prompt else call(number=4)

    dataset = rows(4, environment=["adder", "shouter"] * 2)
    trainer = make_trainer(
        **given(turns, {"adder": Adder, "shouter": Shouter}, train_dataset=dataset, eval_dataset=dataset),
        teacher_prompt_fn=lambda row, completion: [*row["prompt"], {"role": "user", "content": "look"}],
    )
    seen = taught(trainer)
    rollout = batch_of(trainer)
    for prompts in (rollout.prompt_lists(), seen[0].prompt_lists()):
        texts = list(map(trainer.processing_class.decode, prompts))
        assert ["Adds a number" in text for text in texts] == [True, False] * 2
        assert ["Shouts" in text for text in texts] == [False, True] * 2
    assert "A" in trainer.processing_class.decode(trainer.rollout.asked[1][1]).split("<tool_response>")[1]
    assert [type(one) for one in trainer.environments] == [Adder, Shouter] * 2
    trainer.train()
    assert trainer.evaluate()["eval_rewards/Adder/mean"] == 4


def test_an_environment_may_bring_all_prompts(trained):
    class Asks(Adder):
        def reset(self, **row: Any) -> Any:
            assert row == {}
            super().reset()
            return [{"type": "text", "text": "how "}, {"type": "text", "text": "many"}]

    trainer = trained(**given(once(call(number=1)), Asks, train_dataset=None, max_steps=2))
    assert trainer.state.global_step == 2
    assert "how many<|im_end|>" in trainer.processing_class.decode(trainer.rollout.asked[0][0])


def test_completions_of_a_prompt_and_evaluations_have_the_same_tasks(make_trainer):
    more = {"num_generations": 2, "per_device_train_batch_size": 8, "train_dataset": None, "eval_dataset": rows(2)}
    trainer, found = make_trainer(**given(once(call(number=1)), Drawn, **more)), []
    for act in (trainer.evaluate, trainer.train, trainer.evaluate):
        act()
        found.append([one.task for one in trainer.environments])
    before, drawn, after = found
    assert before == after
    assert drawn[::2] == drawn[1::2]
    assert len(set(drawn)) == 4
    assert not {*before} & {*drawn}, "evaluations have tasks of their own"
    other = make_trainer(**given(once(call(number=1)), Drawn, **more), seed=7)
    other.train()
    assert not {one.task for one in other.environments} & {*drawn}


def test_training_draws_the_same_whatever_environments_draw(make_trainer):
    states = []
    for kind in (Drawn, Adder):
        trainer = make_trainer(**given(once(call(number=1)), kind, train_dataset=None))
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        trainer._batches.begin(list(trainer.train_dataset))
        states.append((random.random(), np.random.rand(), torch.rand(()).item()))
    assert states[0] == states[1]


@pytest.mark.parametrize("dataset", [None, rows(8), rows(8, seed=list(range(8))), rows(8, level=[1] * 8)])
def test_reset_has_its_groups_seed_and_waits_for_none(trained, dataset):
    together = threading.Barrier(8)

    class Seeded(Adder):
        def reset(self, seed: int | None = None, **_: Any) -> None:
            together.wait(30)
            super().reset()
            self.seed = seed

    more = {"num_generations": 2, "per_device_train_batch_size": 8}
    trainer = trained(**given(once(call(number=1)), Seeded, train_dataset=dataset), **more)
    seeds = [one.seed for one in trainer.environments]
    assert seeds[::2] == seeds[1::2]
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert (max(seeds) < 8) == (dataset is not None and "seed" in dataset.column_names)


@pytest.mark.parametrize("hangs", [False, True])
def test_run_ends_with_the_first_reset_that_fails_or_hangs(make_trainer, hangs):
    begun = []

    class Broken(Adder):
        def reset(self, **_: Any) -> None:
            begun.append(self)
            if len(begun) == 2:
                time.sleep(60 * hangs)
                raise OSError("no disk")

    said = "no answer within 0.3 seconds" if hangs else "OSError: no disk"
    trainer = make_trainer(**given(once(END), Broken, environment_timeout=0.3))
    with pytest.raises(RuntimeError, match=rf"row \d of .* could not begin: {said}"):
        batch_of(trainer)


def test_each_turn_weighs_the_same(make_trainer):
    trainer = make_trainer(**given(once(call(number=1)), methods=[Discounted(0.9), EqualTurns()]))
    batch = batch_of(trainer)
    assert batch.weights.sum(1).tolist() == pytest.approx([2.0] * 4)
    generated, weights = batch.authors[0] * batch.completion_mask[0], batch.weights[0]
    (borders,) = (generated.diff() != 0).nonzero(as_tuple=True)
    first = borders[0] + 1
    assert weights[:first].sum() == pytest.approx(1)
    assert weights[1] / weights[0] == pytest.approx(0.9)
    trainer.train()


@pytest.mark.parametrize("over", [0, 1])
def test_an_answer_may_fill_a_completion_to_the_end(make_trainer, over):
    whole = make_trainer(**given(once(call(number=1))))
    batch_of(whole)
    first, second = (whole.rollout.asked[turn][0] for turn in (0, 1))
    room = len(second) - len(first)
    trainer = make_trainer(**given(once(call(number=1)), max_completion_length=room - over))
    rollout = batch_of(trainer)
    written = len(trainer.processing_class(call(number=1))["input_ids"])
    assert [len(ids) for ids in rollout.completion_lists()] == [written if over else room] * 4
    assert len(trainer.rollout.asked) == 1, "and nothing is asked for where there is no room"
    assert rollout.weights.sum(1).tolist() == [written] * 4


def test_stream_passes_prompts_to_reset_or_needs_none(make_trainer):
    class Asked(Adder):
        seen: ClassVar[list[Any]] = []

        def reset(self, start: int, **row: Any) -> str:
            self.seen.append(row.get("prompt"))
            super().reset(start)
            return "go"

    for more in ({"prompt": [{"role": "user", "content": "x"}]}, {}):
        Asked.seen = []
        stream = IterableDataset.from_generator(lambda more=more: ({"start": one, **more} for one in range(8)))
        make_trainer(**given(once(call(number=1)), Asked, train_dataset=stream)).train()
        assert Asked.seen[0] == more.get("prompt")


def test_datasets_that_come_later_are_as_the_first(make_trainer):
    trainer = make_trainer(**given(once(call(number=1)), Told, eval_dataset=rows(2)))
    assert trainer.evaluate(rows(2, start=[3, 4]).remove_columns("prompt"))["eval_rewards/Told/mean"] == 4.5
    with pytest.raises(ValueError, match="as environments do"):
        trainer.evaluate(rows(2, privileged_context=["a", "b"]))


def test_answers_are_not_tokenized_as_the_teachers_prompts_are(make_trainer):
    trainer = make_trainer(**given(once(call(number=1)), Told), teacher_chat_template_kwargs={"enable_thinking": False})
    entered = threading.Event()
    assert trainer.tokenizing.acquire()
    thread = threading.Thread(target=lambda: (trainer.tokenize([rows(1)[0]["prompt"]]), entered.set()), daemon=True)
    thread.start()
    assert not entered.wait(0.3), "it waits while an answer is tokenized"
    trainer.tokenizing.release()
    assert entered.wait(20)


REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    **{
        name: (type("Shop", (Adder,), {name: lambda self: "it"}), {})
        for name in ("get_privileged_contexts", "get_feedbacks")
    },
    "'Adder' object is not callable": (Adder(), {}),
    "could not make an environment: TypeError": (lambda number: Adder(), {}),
    "column 'environment'": ({"a": Adder}, {}),
    "row 2 of train_dataset": ({"a": Adder}, {"train_dataset": rows(4, environment=["a", "a", "b", "a"])}),
    "gives the teacher context": (Told, {"train_dataset": rows(privileged_context=["x"] * 4)}),
    "overlap": (Adder, {"overlap": "ahead"}),
    "2 numbers": (Adder, {"reward_weights": [1.0, 2.0]}),
    "train_dataset": (Adder, {"train_dataset": None, "max_steps": -1}),
    "is text": (Adder, {"train_dataset": tiny.rows()}),
    "{feedback}": (Adder, {"feedback_template": "{said}"}),
    "remove_unused_columns": (Adder, {"remove_unused_columns": True}),
}


@pytest.mark.parametrize("named", REFUSED)
def test_wrong_uses_are_refused_before_a_model_is_loaded(make_trainer, named):
    factory, options = REFUSED[named]
    with pytest.raises((TypeError, ValueError, RuntimeError), match=re.escape(named)):
        make_trainer(**{**given(once(END), factory), **options})
