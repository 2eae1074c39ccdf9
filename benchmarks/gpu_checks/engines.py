"""A vLLM engine beside the student: built, asleep while the student trains, sent new weights three times."""

from __future__ import annotations

import gc
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from common import qwen2
from peft import LoraConfig
from support import tiny

from gpu_checks.findings import Findings
from trl_opsd import OPSDTrainer

ROUNDS = 3
GAPS = {torch.float32: 1e-3, torch.bfloat16: 1.0}
"""Largest difference of one log-probability in nats. The proof, which raises, judges medians; where a model is
confident, one rounding step of bfloat16 can be large."""


def vllm_full(found: Findings) -> None:
    _check(found, None)


def vllm_adapter(found: Findings) -> None:
    _check(found, LoraConfig(r=16, target_modules="all-linear", init_lora_weights=False))


class Recording(OPSDTrainer):
    """Keeps what the rollout records, and the engine's memory while it is awake."""

    def record(self, name: str, value: float) -> None:
        kept = self.__dict__.setdefault("kept", {})
        kept.setdefault(name, []).append(float(value))
        if name == "rollout/logprob_gap":
            kept.setdefault("awake", []).append(_used(self.accelerator.device))
        super().record(name, value)


def _check(found: Findings, lora: LoraConfig | None) -> None:
    if find_spec("vllm") is None:
        found.skip("all", "vLLM is not installed")
        return
    if not found.on_gpu:  # compiling takes minutes on a CPU
        from functools import partial

        from trl_opsd._compat.vllm import engine

        engine.LLM = partial(engine.LLM, enforce_eager=True)
    device = torch.device(found.device)
    dtype = torch.bfloat16 if found.on_gpu else torch.float32
    with tempfile.TemporaryDirectory() as folder:
        student = _student(found, dtype, folder)
        before, start = _used(device), time.perf_counter()
        trainer = _trainer(found, student, lora, folder)
        found.note("time of building trainer and engine", time.perf_counter() - start, "s")
        found.note("memory added by building them", (_used(device) - before) / 1e9, "GB")
        prompts, asleep = trainer.tokenize(tiny.PROMPTS), []
        changed: list[str] = []
        for _ in range(ROUNDS):
            _move(trainer.model)
            sent = {name: part.detach().clone() for name, part in trainer.model.named_parameters()}
            completions = trainer.complete(prompts)
            now = dict(trainer.model.named_parameters())
            changed += [name for name, part in sent.items() if not torch.equal(part, now[name])]
            sent.clear()
            asleep.append(_used(device) - before)
    found.equal("syncs that were proved", len(trainer.kept["rollout/logprob_gap"]), ROUNDS)
    found.at_most("gap of log-probabilities, largest", max(trainer.kept["rollout/logprob_gap"]), GAPS[dtype], "nats")
    found.equal("weights of the student that drifted", changed, [])
    found.equal("completions written", sum(map(bool, completions)), len(prompts))
    for name in ("sync/bytes", "sync/seconds", "sync/proof_seconds"):
        found.note(f"{name}, second and third", trainer.kept[name][1:])
    if lora is not None:
        first, *others = trainer.kept["sync/bytes"]
        found.at_most("bytes of an adapter's sync over those of the first", max(others) / first, 0.5)
    if not found.on_gpu:
        found.skip("sleep", "vLLM's engine on a CPU cannot release its memory")
        return
    awake = max(trainer.kept["awake"]) - before
    found.note("memory of the engine awake", awake / 1e9, "GB")
    found.at_most("memory of the engine asleep", asleep[-1] / 1e9, 3.0, "GB")
    found.at_most("memory of the engine asleep over awake", asleep[-1] / awake, 0.2)
    found.at_most("memory that each sleep keeps more", (asleep[-1] - asleep[0]) / 1e9 / (ROUNDS - 1), 0.1, "GB")


def _student(found: Findings, dtype: torch.dtype, folder: str) -> Any:
    """Four layers of 1.5B shape, saved as a checkpoint: what an engine is built from."""
    width, inner, layers, heads, vocabulary = (1536, 8960, 4, 12, 151936) if found.on_gpu else (64, 128, 2, 2, 320)
    shape = {"intermediate_size": inner, "num_key_value_heads": 2, "max_position_embeddings": 512}
    shape |= {"tie_word_embeddings": True}
    student = qwen2(width, layers, vocabulary, heads=heads, dtype=dtype, on=found.device, **shape)
    path = Path(folder) / "student"
    student.save_pretrained(path)
    student.name_or_path = str(path)
    return student


def _trainer(found: Findings, student: Any, lora: LoraConfig | None, folder: str) -> Recording:
    options = {"vllm_weight_sync": "full" if lora is None else "adapter", "vllm_sync_check": "every"}
    if found.on_gpu:
        options |= {"use_cpu": False, "vllm_enable_sleep_mode": True, "vllm_gpu_memory_utilization": 0.3}
    return Recording(
        model=student,
        teacher_model=tiny.qwen2(32, vocab_size=student.config.vocab_size),
        args=tiny.config(Path(folder) / "out", use_vllm=True, max_completion_length=16, **options),
        train_dataset=tiny.rows(),
        processing_class=tiny.tokenizer(),
        peft_config=lora,
    )


def _move(model: Any) -> None:
    """Changes the trained weights, as a step does but further."""
    with torch.no_grad():
        for part in model.parameters():
            if part.requires_grad and part.dim() > 1:
                part.add_(0.1 * part.std() * torch.randn_like(part))


def _used(device: torch.device) -> float:
    """Bytes in use on the GPU, whoever has them: torch's own count does not know which of them sleep."""
    if device.type != "cuda":
        return 0.0
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return float(total - free)
