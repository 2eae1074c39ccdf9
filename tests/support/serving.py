"""Real servers on loopback, ended with the test that needs them; and one with a tiny teacher, which returns states."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import requests
import torch
from support import tiny
from transformers import PreTrainedModel

SECONDS = 300
VLLM = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TORCHDYNAMO_DISABLE": "1",  # compiling the sampler takes longer than starting
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker in the engine's process, or one more imports everything
}
"""Environment of a vLLM server."""
ROOT = Path(__file__).resolve().parents[2]
NEWER = ROOT / ".vllm"
"""A newer vLLM, which `make test-servers` installs apart."""
SGLANG = ("--dtype", "float32", "--log-level", "warning", "--dist-timeout", "30")
"""Flags of an SGLang server."""
FORKING = """
import multiprocessing, runpy
fork = multiprocessing.get_context("fork")
multiprocessing.get_context = lambda method=None: fork
runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
"""
"""Such a server, whose engine is forked as on a GPU: one that is spawned imports everything again."""

_held: list[socket.socket] = []
"""Sockets that keep the ports of [`free_port`] from all who ask for any free one."""


def free_port() -> int:
    """A port that nothing else on this machine is given while this process lives.

    It is bound but not listened at, so that a server can listen there that sets SO_REUSEADDR, as all do.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _held.append(holder)
    return holder.getsockname()[1]


@contextmanager
def running(command: Sequence[str], port: int, log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """The process of a server that answers at this port, until the context ends."""
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=file, stderr=file, start_new_session=True
        )
    try:
        _wait_for(process, port, log)
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[bytes], seconds: float = 20) -> None:
    """Ends a server with all of its processes, whether or not it has ended by itself; 0 seconds leave it no time."""
    if seconds:
        _signal(process, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    _signal(process, signal.SIGKILL)  # those that it has left behind, too
    process.wait()


def _signal(process: subprocess.Popen[bytes], what: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, what)


def _wait_for(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if requests.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200:
                return
        except requests.RequestException:
            time.sleep(0.2)
    raise AssertionError(f"the server did not start: {log.read_text()[-3000:]}")


def save_teacher(folder: Path, make: Any = tiny.qwen2, dtype: torch.dtype = torch.float32, **given: Any) -> str:
    """The path of a random teacher with its tokenizer. Its norms are far from 1, so that they can be told apart.

    It is 64 wide: vLLM's attention on the CPU takes heads of at least 32.
    """
    model = spread_norms(make(64, **given)).to(dtype)
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


def spread_norms(model: PreTrainedModel, by: float = 0.3) -> PreTrainedModel:
    """The model with the weights of its norms changed in place."""
    for name, weight in model.named_parameters():
        if weight.dim() == 1 and "norm" in name:
            with torch.no_grad():
                weight.add_(torch.rand(len(weight), generator=torch.Generator().manual_seed(len(name))) - by)
    return model


@contextmanager
def pooling(model: str, log: Path, *flags: str) -> Iterator[str]:
    """The address of a vLLM server that returns the states of a model, started as docs/teachers.md says."""
    # Not `vllm serve`: its command line looks for a distribution called vllm, which vllm-cpu is not.
    command = [sys.executable, "-c", FORKING, "--runner", "pooling", "--pooler-config", '{"task": "token_embed"}']
    port = free_port()
    with running([*command, *_options(model, port), *flags], port, log, **VLLM):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def generating(model: str, log: Path, *flags: str, **environment: str) -> Iterator[str]:
    """The address of a server of the newer vLLM, on its second model runner."""
    port = free_port()
    command = [sys.executable, "-m", "support.interpreted", *_options(model, port), "--dtype", "float32", *flags]
    with running(command, port, log, **over(NEWER), **environment):
        yield f"http://127.0.0.1:{port}"


def _options(model: str, port: int) -> list[str]:
    """Of any vLLM server of a tiny model."""
    sizes = ["--max-model-len", "192", "--num-gpu-blocks-override", "256"]
    return ["--model", model, *sizes, "--enforce-eager", "--host", "127.0.0.1", "--port", str(port)]


def over(packages: Path) -> dict[str, str]:
    """The environment of a vLLM server that imports these packages before others."""
    return {**VLLM, "PYTHONPATH": os.pathsep.join(map(str, (packages, ROOT / "tests", ROOT)))}


@contextmanager
def taking_adapters(model: str, log: Path, *flags: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The address and process of a server as anybody starts it, which loads adapters while it runs."""
    port = free_port()
    command = [sys.executable, "-c", FORKING, *_options(model, port), "--dtype", "float32"]
    command += ["--enable-lora", "--max-lora-rank", "16", "--max-loras", "2", *flags]
    with running(command, port, log, **VLLM, VLLM_ALLOW_RUNTIME_LORA_UPDATING="1") as process:
        yield f"http://127.0.0.1:{port}", process


@contextmanager
def sglang(model: str, log: Path, *flags: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The address and the process of an SGLang server, in the environment that `tools/sglang_env.py` builds."""
    tool, port = sglang_tool(), free_port()
    command = tool.command(tool.built(ROOT / ".sglang"), model, "--port", str(port), *SGLANG, *flags)
    with running(command, port, log, **tool.ENVIRONMENT) as process:
        yield f"http://127.0.0.1:{port}", process


def sglang_tool() -> Any:
    """`tools/sglang_env.py`."""
    spec = importlib.util.spec_from_file_location("sglang_env", ROOT / "tools/sglang_env.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
