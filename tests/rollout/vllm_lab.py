"""Students saved as checkpoints, trainers that generate with vLLM, and engines that are started once and shared."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import gc
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from support import fsdp_on_cpu, tiny
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    PhimoeConfig,
    PreTrainedModel,
    Starcoder2Config,
)

from trl_opsd import HFRollout, OPSDTrainer
from trl_opsd._compat.vllm import engine
from trl_opsd._compat.vllm.engine import VLLMEngine
from trl_opsd.rollout import vllm as backend
from trl_opsd.types.rollout import Author, cut_after_end

# Compiling takes eight times as long as all else that an engine does here; `make real` starts one that does. A cache of
# a GiB, the least that can be asked for, takes half of a start to fill with zeros.
engine.LLM = partial(engine.LLM, enforce_eager=True, num_gpu_blocks_override=256)

_AT_ONCE = 8
"""Maximum number of running engines."""


def _sized(config: type, width: int, seed: int, **overrides: Any) -> PreTrainedModel:
    return tiny.model(config(**{**tiny.sizes(width), **overrides}), seed)


SHAPES = {
    "qwen2": tiny.qwen2,
    "llama": tiny.llama,
    "gemma2": partial(tiny.gemma2, head_dim=32),
    "mixtral": partial(_sized, MixtralConfig, num_local_experts=4),
    "starcoder2": partial(_sized, Starcoder2Config),
    "phimoe": partial(_sized, PhimoeConfig, num_local_experts=4),
}


def student(folder: Path, shape: str = "qwen2", tied: bool = False, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random student that was saved and loaded again, so that its `name_or_path` is a checkpoint.

    It is 64 wide: vLLM's attention on the CPU takes heads of at least 32.
    """
    made = SHAPES[shape](64, seed=seed, tie_word_embeddings=tied, **overrides)
    made.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


def lora(**overrides: Any) -> LoraConfig:
    """An adapter that changes the student's outputs from the start, with a scale that is no power of two."""
    options = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "init_lora_weights": False}
    return LoraConfig(**{**options, **overrides})


class _Engines:
    """Starts an engine once for each kind. A trainer sends all of its weights anyway, so trainers can share one."""

    def __init__(self) -> None:
        self._running: dict[Any, VLLMEngine] = {}

    def __call__(self, **options: Any) -> VLLMEngine:
        shape = (Path(options["model"]) / "config.json").read_text()
        key = shape, repr({**options, "model": "", "tokenizer": ""})
        engine = self._running.pop(key, None)
        if engine is None:
            self.close(all_but=_AT_ONCE - 1)
            engine = VLLMEngine(**options)
        self._running[key] = engine  # the one used last is the last
        return engine

    def close(self, all_but: int = 0) -> None:
        """Closes the least recently used engines."""
        while len(self._running) > all_but:
            self._running.pop(next(iter(self._running))).close()


_ENGINES = _Engines()


@contextmanager
def shared_engines() -> Iterator[None]:
    """Gives trainers a running engine of their kind, if there is one; closes all engines at the end.

    vLLM compiles its sampler, too; nothing is compiled meanwhile. An engine that ends puts all objects back into
    garbage collection, which would walk them in each later training.
    """
    with pytest.MonkeyPatch.context() as patch, torch.compiler.set_stance("force_eager"):
        patch.setattr(backend, "VLLMEngine", _ENGINES)
        yield
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda: 0)  # once for all
        _ENGINES.close()
    gc.collect()
    gc.freeze()


def trainer(
    folder: Path, shape: str = "qwen2", tied: bool = False, cls: type[OPSDTrainer] = OPSDTrainer, **given: Any
) -> OPSDTrainer:
    """A trainer of a saved student that generates with vLLM. Unknown keyword arguments go to its config."""
    names = set(inspect.signature(OPSDTrainer.__init__).parameters) & set(given)
    arguments = {name: given.pop(name) for name in names}
    model = arguments.pop("model", None) or student(folder / "student", shape, tied)
    options = {"use_vllm": True, "learning_rate": 1e-2, "max_completion_length": 16, **given}
    args = tiny.config(folder / "out", **options)
    fsdp_on_cpu.allow()
    return cls(
        model=model,
        args=args,
        processing_class=arguments.pop("processing_class", None) or tiny.tokenizer(),
        teacher_model=arguments.pop("teacher_model", None) or tiny.qwen2(48, seed=1),
        **{"train_dataset": tiny.rows(), **arguments},
    )


def check_goes_on(trainer: OPSDTrainer) -> None:
    """Rows go on after their beginnings as `generate` does after both in one, greedily; others are plain."""
    words, begun = trainer.processing_class, [" so", None] * 4
    rows = [{"prompt": one, "completion_prefix": text} for one, text in zip(tiny.PROMPTS, begun, strict=True)]
    rollout = trainer.score(rows).rollout
    prompts, given = trainer.tokenize(tiny.PROMPTS), [words(text or "")["input_ids"] for text in begun]
    expected = by_hf(trainer, [prompt + ids for prompt, ids in zip(prompts, given, strict=True)])
    assert rollout.prompt_lists() == prompts
    assert rollout.completion_lists() == [ids + own for ids, own in zip(given, expected, strict=True)]
    for ids, own, authors in zip(given, expected, rollout.authors.tolist(), strict=True):
        assert authors[: len(ids) + len(own)] == [Author.DATASET] * len(ids) + [Author.STUDENT] * len(own)
    if rollout.logprobs is not None:
        assert (
            rollout.logprobs.isnan() == ((rollout.authors != Author.STUDENT) | (rollout.completion_mask == 0))
        ).all()


@torch.no_grad()
def move(trainer: OPSDTrainer, factor: float = 1.3) -> None:
    """Changes all weights that are trained."""
    for part in trainer.model.parameters():
        part.mul_(factor) if part.requires_grad else None


def two_end_tokens(model: Any, unended: list[list[int]]) -> tuple[Any, set[int]]:
    """Makes two tokens that so far end no completion the end tokens of a student, the first also the padding.

    They stand in the middle of different completions. Returns the tokenizer, and both ids.
    """
    first, second = unended[0][3], next(ids[5] for ids in unended[1:] if ids[5] != unended[0][3])
    words = tiny.tokenizer()
    words.eos_token = words.convert_ids_to_tokens(first)
    words.pad_token = words.eos_token
    model.generation_config.eos_token_id = [first, second]
    return words, {first, second}


def by_hf(trainer: OPSDTrainer, prompt_ids: list[list[int]]) -> list[list[int]]:
    """Completions of plain `generate` for the same trainer, with its options."""
    rollout = HFRollout()
    rollout.bind(trainer)
    return [cut_after_end(ids, trainer.eos_token_ids) for ids in rollout.complete(prompt_ids, 0)]


@torch.no_grad()
def gap(trainer: OPSDTrainer) -> float:
    """The largest difference, in nats, between the log-probabilities of engine and student for what the engine wrote.

    Computed independently of the package's own proof: other prompts, each row alone, only the model's logits.
    """
    prompts = trainer.tokenize(tiny.PROMPTS)
    options = {"max_tokens": 6, "ignore_eos": True, "logprobs": 0, "seed": 5}
    was_training = trainer.model.training
    trainer.model.eval()
    largest = 0.0
    for row in trainer.rollout.engine.write(prompts, [options] * len(prompts)):
        ids = torch.tensor([row.prompt_ids + row.completion_ids])
        logprobs = trainer.model(ids).logits.double().log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
        largest = max(largest, float((logprobs[-6:] - torch.tensor(row.logprobs)).abs().max()))
    trainer.model.train(was_training)
    return largest


def fails_halfway(sends: Any, reached: int) -> Any:
    """A method in place of that which loads weights, which fails before they have all come."""

    def send(self: VLLMEngine, weights: Any) -> None:
        def some() -> Iterator[Any]:
            for number, pair in enumerate(weights):
                if number == reached:
                    raise RuntimeError("the engine broke")
                yield pair

        sends(self, some())

    return send
