"""Processes that reach servers of different teachers are told, and agree on what all of them can read."""

from __future__ import annotations

import pytest
import torch
from support import forks, serving, tiny
from support.failing_server import pretended
from transformers import AutoModelForCausalLM

from trl_opsd import OPSDConfig
from trl_opsd.errors import ServerError
from trl_opsd.losses import ForwardKL
from trl_opsd.teacher.build import served


def reach(path: str, case: str) -> str:
    """What a process finds, whose server is on a port of its own."""
    process = torch.distributed.get_rank()
    model = AutoModelForCausalLM.from_pretrained(path)
    if process and case == "another teacher":
        with torch.no_grad():
            model.model.embed_tokens.weight[::2] *= -1  # with the same final norm
    if process and case == "another dtype":
        model = model.bfloat16()
    listed = {"data": [{"id": "a teacher", "root": "untied", "max_model_len": 100 + process}]}
    with pretended(model, models=listed) as server:
        args = OPSDConfig("unused", report_to="none", use_cpu=True, teacher_server_url=server.url)
        try:
            found = f"context {served(path, server.url, args, ForwardKL(), model, tiny.tokenizer()).context}"
        except ServerError as error:
            found = f"{server.url} {error}"
        torch.distributed.barrier()  # the server is there until both have asked
    return found


def reach_each(path: str) -> dict[str, str]:
    """What came of it, by case."""
    OPSDConfig("unused", report_to="none", use_cpu=True)  # which connects the processes
    assert torch.distributed.get_world_size() == 2
    return {case: reach(path, case) for case in ("one teacher", "another teacher", "another dtype")}


@pytest.mark.distributed
@pytest.mark.timeout(forks.SECONDS + 60)
def test_processes_compare_the_answers_of_their_servers(tmp_path):
    path = serving.save_teacher(tmp_path / "untied", seed=1)
    first, second = forks.results("ddp", reach_each, path).values()
    assert first["one teacher"] == second["one teacher"] == "context 101", "the lowest of 101 and 102"
    for case, said in (
        ("another teacher", "256 bytes per token in float32) is"),
        ("another dtype", "128 bytes per token in bfloat16) is different from"),
    ):
        assert f"of process 1 ({second[case].split()[0]}; " in first[case]
        for found in (first, second):
            assert said in found[case]
