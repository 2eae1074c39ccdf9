"""The recipe of `docs/agents.md` for OpenEnv, and the example for verifiers, with both libraries and a real server.

Run by `make environments`, which installs them apart; not part of `make test`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from environments.worlds import END, call, given, rows
from support import tiny

from trl_opsd.types import Rollout

pytestmark = pytest.mark.environments

DOCS = Path(__file__).parents[2] / "docs" / "agents.md"


def recipe(needle: str, **names: Any) -> dict[str, Any]:
    """What the block of the page defines that has this text, up to its trainer."""
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.DOTALL)
    (block,) = [block for block in blocks if needle in block]
    exec(block.partition("\n\ntrainer = ")[0], names)  # as a reader would
    return names


@pytest.fixture
def serve() -> Iterator[Callable[..., tuple[str, list[Any]]]]:
    """Serves a game of guessing on loopback; its address, and what was guessed of which number."""
    import openenv.core as core
    import uvicorn

    guesses: list[tuple[int, int]] = []

    class Guess(core.Action):
        number: int

    class Hint(core.Observation):
        text: str

    class Game(core.Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Any:
            self.number = seed
            return Hint(text=" Guess.")

        def step(self, action: Any, timeout_s: float | None = None, **_: Any) -> Any:
            guesses.append((self.number, action.number))
            won = action.number == self.number
            hint = "You win." if won else "Higher." if action.number < self.number else "Lower."
            return Hint(text=hint, done=won, reward=float(won))

        @property
        def state(self) -> Any:
            return core.State(number=self.number)

    running = []

    def start(**options: Any) -> tuple[str, list[Any]]:
        app = core.create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=4)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1, **options))
        thread = threading.Thread(target=server.run)
        thread.start()
        running.append((server, thread))
        while not server.started:
            assert thread.is_alive()
            thread.join(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        return f"http://localhost:{port}", guesses

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join()


def at(address: str, needle: str = "GenericEnvClient") -> Any:
    """The class of the page, with another address."""
    found = recipe(needle)
    client = found["GenericEnvClient"]
    found["GenericEnvClient"] = lambda base_url: client(base_url=address)
    return found["Guess"]


def guesses_of(prompt: str) -> str:
    """The script of an agent that guesses 2, the number itself, and once more; the number is in its prompt."""
    number = int(re.search(r"count (\d)", prompt)[1])
    made = prompt.count("<tool_response>")
    return [call("guess", number=2), call("guess", number=number), call("guess", number=9), f"done{END}"][made]


def test_students_act_in_an_openenv_server_and_its_state_teaches(make_trainer, serve):
    address, guesses = serve()
    dataset = rows(4, seed=[0, 1, 2, 3])
    trainer = make_trainer(
        **given(guesses_of, at(address), train_dataset=dataset, eval_dataset=dataset, max_steps=2),
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=1,
    )
    seen: list[Rollout] = []
    teach = trainer.teaching.teachers.targets
    trainer.teaching.teachers.targets = lambda rollout, *rest: seen.append(rollout) or teach(rollout, *rest)
    trainer.train()
    of_a_step = [(0, 2), (0, 0), (1, 2), (1, 1), (2, 2), (3, 2), (3, 3)]
    assert sorted(guesses) == sorted(2 * of_a_step)
    losses = tiny.logged(trainer, "loss")
    assert losses[0] > 0
    assert losses[0] != losses[1]

    rollout = trainer.score(list(dataset)).rollout
    tokenizer = trainer.processing_class
    for row, (prompt, completion) in enumerate(zip(rollout.prompt_lists(), rollout.completion_lists(), strict=True)):
        assert f"count {row} Guess.<|im_end|>" in tokenizer.decode(prompt)
        assert "The number is" not in tokenizer.decode(prompt)
        assert f"The number is {row}." in tokenizer.decode(seen[-1].prompt_lists()[row])
        assert seen[-1].completion_lists()[row] == completion
        over = "{'error': 'The game is over.'}"
        first = ["Lower.", "Lower.", "You win.", "Higher."][row]
        answers = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", tokenizer.decode(completion))
        assert answers == [first, over if row == 2 else "You win.", over]
        written = [call("guess", number=2), call("guess", number=row), call("guess", number=9), f"done{END}"]
        learned = torch.tensor(completion)[rollout.weights[row][: len(completion)] == 1]
        assert tokenizer.decode(learned) == "".join(written)
    assert trainer.evaluate()["eval_rewards/Guess/mean"] == 1


def test_an_openenv_session_outlives_pings_while_the_student_generates(make_trainer, serve):
    address, guesses = serve(ws_ping_interval=0.2, ws_ping_timeout=0.2)

    def slowly(prompt: str) -> str:
        threading.Event().wait(0.4)
        return guesses_of(prompt)

    trainer = make_trainer(**given(slowly, at(address), eval_dataset=rows(2, seed=[0, 1])))
    assert trainer.evaluate()["eval_rewards/Guess/mean"] == 1
    assert sorted(guesses) == [(0, 0), (0, 2), (1, 1), (1, 2)]


def test_tasks_and_rewards_of_verifiers_are_prompts_and_rewards(make_trainer):
    import verifiers.v1 as vf
    import verifiers_tasks

    class Sum(vf.TaskData):
        total: int

    class Add(vf.Task[Sum, vf.State, vf.TaskConfig]):
        @vf.reward(weight=2.0)
        async def right(self, trace: Any) -> float:
            assert [message.role for message in trace.messages] == ["user", "assistant"]
            return float(trace.last_reply == str(self.data.total))

        @vf.reward
        async def short(self, trace: Any) -> float:
            return float(len(trace.last_reply) < 3)

    class Sums(vf.Taskset[Add, vf.TasksetConfig]):
        def load(self) -> Iterator[Any]:
            for number in range(4):
                yield Add(Sum(prompt=f"{number} + 1 ?", total=number + 1), self.config.task)

    tasks = list(Sums(vf.TasksetConfig()))
    replies = {"0 + 1": "1", "1 + 1": "2", "2 + 1": "nothing", "3 + 1": "5"}
    trainer = make_trainer(
        **given(
            lambda prompt: next(reply for asked, reply in replies.items() if asked in prompt) + END,
            None,
            train_dataset=verifiers_tasks.rows(tasks),
            eval_dataset=verifiers_tasks.rows(tasks),
            reward_funcs=verifiers_tasks.scores(tasks),
            max_steps=4,
        ),
        reward_weight=1.0,
        num_generations=2,
        logging_steps=1,
    )
    assert trainer.evaluate()["eval_rewards/score/mean"] == (3 + 3 + 0 + 1) / 4
    trainer.train()
    logged = [log["rewards/score/mean"] for log in trainer.state.log_history if "loss" in log]
    assert sorted(logged) == [0, 1, 3, 3]
