"""Students saved as checkpoints, and vLLM engines that are started once and handed from trainer to trainer."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import dataclasses
from pathlib import Path
from typing import Any

import tiny
from transformers import AutoModelForCausalLM, PreTrainedModel

from trl_opsd._compat.vllm import Engine, EngineOptions

WIDE_ENOUGH = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
"""vLLM's attention on the CPU takes heads of at least 32."""

SHAPES = {"qwen2": tiny.qwen2, "llama": tiny.llama}


def student(folder: Path, shape: str = "qwen2", tied: bool = False, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random student that was saved and loaded again, so that its `name_or_path` is a checkpoint."""
    made = SHAPES[shape](64, seed=seed, tie_word_embeddings=tied, **overrides)
    made.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


class Engines:
    """Builds an engine once for each kind. Every trainer sends all of its weights anyway, so one may follow another."""

    def __init__(self) -> None:
        self._running: dict[Any, Engine] = {}

    def __call__(self, options: EngineOptions) -> Engine:
        shape = (Path(options.model) / "config.json").read_text()
        key = (shape, dataclasses.replace(options, model="", tokenizer="", sequences=0))
        if key not in self._running:
            self._running[key] = Engine(dataclasses.replace(options, sequences=max(8, options.sequences)))
        return self._running[key]
