"""Agents that vLLM writes for, in the process or a server, act and learn as those that replay what it has written."""

from __future__ import annotations

import re
from contextlib import nullcontext

import pytest
import torch
from environments.worlds import END, Uneven, call, rows
from support import tiny
from support.tool_calls import words

pytest.importorskip("vllm")

import server_lab
import tcp_transfer
from vllm_lab import student

from trl_opsd import FixedRollout
from trl_opsd._compat.vllm.engine import VLLMEngine
from trl_opsd.rollout.vllm_server import VLLMServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

CONTEXT = 2048
TURNS = "|".join(re.escape(text.removesuffix(END)) for text in (call(number=2), call(number=3), f"done{END}"))


@pytest.mark.usefixtures("engines_are_shared")
@pytest.mark.parametrize(
    ("where", "overlap"),
    [
        ("colocate", None),
        pytest.param("server", None, marks=pytest.mark.long),
        pytest.param("server", "step", marks=pytest.mark.long),
    ],
)
def test_agents_are_those_that_replay_what_was_written(make_trainer, tmp_path, monkeypatch, where, overlap):
    written = {}

    def noted(writes):
        def noting(*given):
            found = writes(*given)
            for row in found if isinstance(found, list) else [found]:
                written[tuple(row.prompt_ids)] = row.completion_ids
            return found

        return noting

    monkeypatch.setattr(VLLMEngine, "write", noted(VLLMEngine.write))
    monkeypatch.setattr(VLLMServer, "read", noted(VLLMServer.read))
    tcp_transfer.use(monkeypatch)
    student(tmp_path / "student", max_position_embeddings=CONTEXT)
    words().save_pretrained(tmp_path / "student")
    path, trainers = str(tmp_path / "student"), []
    with server_lab.running(tmp_path, path, CONTEXT) if where == "server" else nullcontext({}) as options:
        by_vllm = {"use_vllm": True, "vllm_structured_outputs_regex": TURNS, "overlap": overlap, **options}
        for how in (lambda: {"rollout": None, **by_vllm}, lambda: {"rollout": FixedRollout(written)}):
            trainers.append(
                make_trainer(
                    model=path,
                    teacher_model=tiny.qwen2(48, seed=1, max_position_embeddings=CONTEXT),
                    processing_class=words(),
                    train_dataset=rows(12),
                    environment_factory=Uneven,
                    max_completion_length=400,
                    per_device_train_batch_size=4,
                    learning_rate=1e-2,
                    optim="sgd",  # AdamW would make steps of a rounding error
                    **how(),
                )
            )
            trainers[-1].train()
        trainers[0].rollout.close()
    assert [one.turns.are_apart for one in trainers] == [where == "server", False]
    logs = [[log for log in one.state.log_history if "loss" in log] for one in trainers]
    assert logs[0][0]["tools/call_frequency"] > 0
    assert len({log["turns/mean"] for log in logs[0]}) > 1, "rows have different numbers of turns"
    for name in ("loss", "num_tokens", "turns/mean", "tools/call_frequency", "completions/mean_length"):
        assert [log[name] for log in logs[0]] == pytest.approx([log[name] for log in logs[1]], rel=1e-4), name
    torch.testing.assert_close(*map(tiny.weights, trainers), rtol=1e-4, atol=1e-5)
