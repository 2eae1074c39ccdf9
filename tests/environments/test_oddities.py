"""What environments are and say that nobody designed for: each is told, or costs its row."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import pytest
import torch
from datasets import IterableDataset
from environments.test_apart import Server
from environments.worlds import END, Adder, Told, call, given, once, rows


class Saying(Adder):
    """Says something after an episode."""

    says: Any = None

    def get_feedback(self) -> Any:
        return self.says


def weights_of(trainer: Any) -> list[float]:
    return trainer.score(list(trainer.train_dataset)).rollout.weights.sum(1).tolist()


def of_itself(make_trainer, said: Any, **options: Any) -> Any:
    kind = type("Kind", (Saying,), {"says": said})
    return make_trainer(**given(once(call(number=1)), kind, teacher_model=None), teacher_model_kind="ema", **options)


@pytest.mark.parametrize("said", [None, "", " \n", {"not": "text"}, 7, "word " * 3000])
def test_missing_feedback_masks_the_row(make_trainer, said):
    assert weights_of(of_itself(make_trainer, said)) == [0.0] * 4
    gated = of_itself(make_trainer, said, reward_gate=0.5)
    assert weights_of(gated) == [0.0] * 4, "a gate does not bring it back"


def test_an_observation_of_parts_of_text_is_text(make_trainer):
    class Parts(Adder):
        def reset(self, **_: Any) -> Any:
            super().reset()
            return [{"type": "text", "text": " a"}, {"type": "text", "text": " door"}]

    trainer = make_trainer(**given(once(call(number=1)), Parts))
    weights_of(trainer)
    assert "user\ncount 0 a door<" in trainer.processing_class.decode(trainer.rollout.asked[0][0])


def test_a_tool_cannot_change_the_arguments_it_was_called_with(make_trainer):
    class Taking(Adder):
        def take(self, cells: list[int]) -> str:
            """Takes cells.

            Args:
                cells: Their numbers.

            Returns:
                How many.
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
    weights_of(trainer)
    assert {str(one[0]["tool_calls"][0]["function"]["arguments"]) for one in seen} == {"{'cells': [1, 2]}"}


@pytest.mark.parametrize("over", [0, 1])
def test_an_answer_may_fill_a_completion_to_the_end(make_trainer, over):
    whole = make_trainer(**given(once(call(number=1))))
    weights_of(whole)
    turns = [whole.rollout.asked[turn][0] for turn in (0, 1)]
    room = len(turns[1]) - len(turns[0])
    trainer = make_trainer(**given(once(call(number=1)), max_completion_length=room - over))
    rollout = trainer.score(list(trainer.train_dataset)).rollout
    written = len(trainer.processing_class(call(number=1))["input_ids"])
    assert [len(ids) for ids in rollout.completion_lists()] == [written if over else room] * 4
    assert len(trainer.rollout.asked) == 1, "and nothing is asked for where there is no room"
    assert rollout.weights.sum(1).tolist() == [written] * 4


def test_classes_and_functions_of_one_name_have_each_a_reward(make_trainer):
    def world(value: float) -> type:
        return type("World", (Adder,), {"get_reward": lambda self: value})

    def World(completions: Any, **_: Any) -> list[float]:
        return [7.0] * len(completions)

    dataset = rows(4, environment=["a", "b"] * 2)
    both = {"a": world(1.0), "b": world(5.0)}
    trainer = make_trainer(
        **given(once(END), both, train_dataset=dataset, eval_dataset=dataset, reward_funcs=World, reward_weights=[0.5])
    )
    found = trainer.evaluate()
    names = ("World", "World_2", "World_3")
    assert [found[f"eval_rewards/{name}/mean"] for name in names] == [7, 1, 5]
    assert found["eval_reward"] == 3 + 3.5


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
    with pytest.raises(ValueError, match="tell"):
        trainer.evaluate(rows(2, privileged_context=["a", "b"]))


def test_a_teacher_reads_the_tools_of_its_rows_environment(make_trainer):
    class Other:
        def reset(self, **_: Any) -> None: ...

        def shout(self) -> str:
            """Shouts.

            Returns:
                It.
            """
            return "A"

    dataset = rows(4, environment=["a", "b"] * 2)
    trainer = make_trainer(
        **given(once(END), {"a": Adder, "b": Other}, train_dataset=dataset),
        teacher_prompt_fn=lambda row, completion: [*row["prompt"], {"role": "user", "content": "look"}],
    )
    seen = []
    teach = trainer.teaching.teachers.targets
    trainer.teaching.teachers.targets = lambda rollout, *rest: seen.append(rollout) or teach(rollout, *rest)
    weights_of(trainer)
    texts = list(map(trainer.processing_class.decode, seen[0].prompt_lists()))
    assert ["Shouts" in text for text in texts] == [False, True] * 2
    assert ["Adds a number" in text for text in texts] == [True, False] * 2


def test_rows_of_a_failed_batch_never_act_again(make_trainer):
    going, gone = threading.Event(), threading.Event()

    class Failing(Server):
        fails = True

        def one_by_one(self, prompt_ids: list[list[int]], step: int) -> Any:
            fails, self.fails = self.fails, False

            def ask(number: int, ids: list[int]) -> list[int]:
                if fails and number == 0:
                    raise ConnectionError("gone")
                if fails:
                    going.wait(20)
                    gone.set()
                    return self.tokenizer(call(number=1000))["input_ids"]
                return self.tokenizer(f"done{END}")["input_ids"]

            return ask

    trainer = make_trainer(**given(once(END), Adder, rollout=Failing(None), train_dataset=rows(2, start=[30, 40])))
    with pytest.raises(ConnectionError):
        weights_of(trainer)
    batch = trainer.score(list(trainer.train_dataset)).rollout
    going.set()
    assert gone.wait(20)
    for thread in threading.enumerate():
        if thread.name == "trl_opsd row":
            thread.join(20)
    torch.testing.assert_close(batch.weights.sum(1), torch.full((2,), float(batch.weights.sum(1)[0])))
    assert [one.total for one in trainer.environments] == [30, 40]


def test_answers_are_not_tokenized_as_the_teachers_prompts_are(make_trainer):
    trainer = make_trainer(**given(once(call(number=1)), Told), teacher_chat_template_kwargs={"enable_thinking": False})
    entered = threading.Event()
    assert trainer.tokenizing.acquire()
    thread = threading.Thread(target=lambda: (trainer.tokenize([rows(1)[0]["prompt"]]), entered.set()), daemon=True)
    thread.start()
    assert not entered.wait(0.3), "it waits while an answer is tokenized"
    trainer.tokenizing.release()
    assert entered.wait(20)


def test_a_batch_that_failed_in_between_is_generated_again(make_trainer):
    class Once(Server):
        fails = True

        def one_by_one(self, prompt_ids: list[list[int]], step: int) -> Any:
            fails, self.fails, ended = self.fails, False, threading.Event()

            def ask(number: int, ids: list[int]) -> list[int]:
                if fails and number == 0:
                    assert ended.wait(20)
                    raise ConnectionError("gone")
                threading.Timer(0.3, ended.set).start()
                return self.tokenizer(f"{'early' if fails else 'done'}{END}")["input_ids"]

            return ask

    trainer = make_trainer(**given(once(END), Adder, rollout=Once(None), train_dataset=rows(2)))
    with pytest.raises(ConnectionError):
        weights_of(trainer)
    batch = trainer.score(list(trainer.train_dataset)).rollout
    assert list(map(trainer.processing_class.decode, batch.completion_lists())) == [f"done{END}"] * 2
