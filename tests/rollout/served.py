"""In one of two processes with a sharded student: both generate with one server and return the completions."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import tcp_transfer
import vllm_lab
from support import fsdp_on_cpu, tiny

from trl_opsd._compat.sharding import is_split_model
from trl_opsd.errors import ServerError


def main(folder: Path, server: dict[str, object]) -> dict[str, Any]:
    tcp_transfer.use(pytest.MonkeyPatch())
    teacher = tiny.qwen2(48, seed=1)  # before there is a DeepSpeed config, so that it stays whole
    fsdp_on_cpu.allow()
    options = {"top_k": 1, "learning_rate": 2e-3, "per_device_train_batch_size": 1, **server}
    trainer = vllm_lab.trainer(
        folder, model=str(folder / "student"), teacher_model=teacher, peft_config=vllm_lab.lora(), **options
    )
    trainer.train()
    process = trainer.accelerator.process_index
    prompts = trainer.tokenize(tiny.PROMPTS[:3] if process == 0 else tiny.PROMPTS[3:4])
    found: dict[str, Any] = {
        "processes": trainer.accelerator.num_processes,
        "split": is_split_model(trainer.accelerator.unwrap_model(trainer.model_wrapped)),
        "completions": trainer.complete(prompts),
        "expected": vllm_lab.by_hf(trainer, prompts),
        "beside none": trainer.complete(prompts if process == 1 else []),
        "gaps": [*tiny.logged(trainer, "rollout/logprob_gap"), trainer.rollout._proof.check()],
    }
    rows = trainer.rollout.stream(prompts, 3)
    if process == 0:  # takes none before the other has all: nothing is collective any more
        deadline = time.monotonic() + 60
        while not (folder / "taken").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    found["streamed"] = [ids for _, ids in sorted(rows)]
    (folder / "taken").touch()
    found["seeds"] = trainer.rollout._seeds(4, len(prompts))
    try:
        # Only the other process asks for what is refused; the main one gets the error.
        trainer.rollout.write([[5]], [{"max_tokens": 4, "temperature": -float(process)}])
    except ServerError as error:
        found["error"] = str(error)
    trainer.rollout.close()
    return found
