"""In one of two processes, each of which reaches a server of its own."""

from __future__ import annotations

from typing import Any

import torch
from support import tiny
from support.failing_server import pretended
from transformers import AutoModelForCausalLM

from trl_opsd import OPSDConfig
from trl_opsd.errors import ServerError
from trl_opsd.losses import ForwardKL
from trl_opsd.teacher.build import served


def lists(context: int) -> dict[str, Any]:
    return {"data": [{"id": "a teacher", "root": "untied", "max_model_len": context}]}


def perturbed(model: Any) -> Any:
    """Another teacher with the same final norm."""
    with torch.no_grad():
        model.model.embed_tokens.weight[::2] *= -1
    return model


def reach(path: str, case: str) -> str:
    """What a process finds, whose server is on a port of its own."""
    process = torch.distributed.get_rank()
    model = AutoModelForCausalLM.from_pretrained(path)
    if process and case == "another teacher":
        model = perturbed(model)
    if process and case == "another dtype":
        model = model.bfloat16()
    with pretended(model, models=lists(100 + process)) as server:
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
