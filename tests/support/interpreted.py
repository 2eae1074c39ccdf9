"""vLLM's second model runner, which every GPU takes, on a CPU: to be imported before vLLM, or run as a server.

It runs in Triton's interpreter, behind a driver that only says that it is there. A server takes the options of
`vllm serve`.
"""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
os.environ.update(TRITON_INTERPRET="1", VLLM_CPU_KVCACHE_SPACE="1", OMP_NUM_THREADS="1")

import importlib.metadata
from types import SimpleNamespace

import triton.backends

_version = importlib.metadata.version
# vLLM looks for its own wheel to know that this is a CPU, and for one of Triton's drivers to know that it works.
importlib.metadata.version = lambda name: f"{_version('vllm-cpu')}+cpu" if name == "vllm" else _version(name)
triton.backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)

if __name__ == "__main__":
    from support.serving import FORKING

    exec(FORKING)
