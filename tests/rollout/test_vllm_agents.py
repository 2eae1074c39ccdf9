"""Agents that vLLM writes for, in the process or a server, act and learn as those that `generate` writes for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny

pytest.importorskip("vllm")

import server_lab
import tcp_transfer

from trl_opsd import OPSDTrainer

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def walker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student that calls doors, with heads as wide as vLLM needs on a CPU; those of the examples are narrower."""
    import agents
    from fitting import fit
    from transformers import Olmo2ForCausalLM

    folder, task = tmp_path_factory.mktemp("walker"), agents.TASKS["doors"]
    words = task.tokenizer()
    config = agents.make_model(words).config
    config.num_attention_heads = config.num_key_value_heads = 2
    torch.manual_seed(0)
    model = Olmo2ForCausalLM(config)
    fit(model, agents.batches(task, words, agents.LESSONS["student"], size=16, seed=0), steps=150)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def examples() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("agents", "doors", "house", "sql")]:
        del sys.modules[name]


def trained(walker: Path, folder: Path, **options: Any) -> OPSDTrainer:
    from doors import DOORS, world

    args = tiny.config(
        folder,
        max_completion_length=world.MOST_TOKENS,
        max_tool_calling_iterations=8,
        per_device_train_batch_size=8,
        max_steps=3,
        learning_rate=1e-3,
        logging_steps=1,
        top_k=1,
        **{"vllm_max_model_length": 400, **options},
    )
    trainer = OPSDTrainer(
        model=str(walker),
        teacher_model=str(DOORS / "teacher"),
        args=args,
        train_dataset=world.rows(24),
        environment_factory=world.Doors,
    )
    trainer.train()
    trainer.rollout.close()
    return trainer


@pytest.fixture(scope="module")
def by_generate(walker: Path, tmp_path_factory: pytest.TempPathFactory) -> OPSDTrainer:
    return trained(walker, tmp_path_factory.mktemp("generate"))


@pytest.mark.parametrize(("where", "overlap"), [("colocate", None), ("server", None), ("server", "step")])
def test_agents_are_those_that_generate_writes_for(walker, by_generate, tmp_path, monkeypatch, where, overlap):
    if where == "colocate":
        trainer = trained(walker, tmp_path / "out", use_vllm=True)
    else:
        tcp_transfer.use(monkeypatch)
        with server_lab.running(tmp_path, str(walker), 400) as options:
            trainer = trained(walker, tmp_path / "out", use_vllm=True, overlap=overlap, **options)
    assert trainer.turns.are_apart == (where == "server")
    logs = [[log for log in one.state.log_history if "loss" in log] for one in (by_generate, trainer)]
    assert logs[0][0]["tools/call_frequency"] > 1
    for name in ("loss", "num_tokens", "turns/mean", "tools/call_frequency", "completions/mean_length"):
        assert [log[name] for log in logs[1]] == pytest.approx([log[name] for log in logs[0]], rel=1e-4), name
    torch.testing.assert_close(tiny.weights(by_generate), tiny.weights(trainer), rtol=1e-3, atol=1e-4)
