"""Run by two processes: trains under ZeRO-3 with a vLLM engine in each, and writes down how far they were apart.

At last one of them fails while it sends weights.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import tiny
import torch
from peft import LoraConfig

from trl_opsd import OPSDTrainer
from trl_opsd.backbone import is_sharded
from trl_opsd.rollout import weight_sync
from trl_opsd.rollout.sync_proof import SyncError


def main(folder: Path) -> None:
    weight_sync.BUCKET_BYTES = 2**15  # several buckets
    results: dict[str, Any] = {}
    teacher = tiny.qwen2(48, seed=1)  # before there is a DeepSpeed config, so that it stays whole
    for name in ("full", "adapter"):
        trainer = OPSDTrainer(
            model=str(folder / "student"),
            teacher_model=teacher,
            args=tiny.config(folder / name, per_device_train_batch_size=1, use_vllm=True, learning_rate=1e-2),
            train_dataset=tiny.rows(),
            processing_class=tiny.tokenizer(),
            peft_config=None if name == "full" else LoraConfig(r=4, target_modules="all-linear"),
        )
        assert is_sharded(trainer.model)
        trainer.train()
        gaps = [row["rollout/logprob_gap"] for row in trainer.state.log_history if "rollout/logprob_gap" in row]
        results[name] = {"gaps": gaps, "mode": trainer.rollout._mode, "processes": trainer.accelerator.num_processes}
    results["announced"] = announced_as_drawn(trainer)
    results["fault"] = fault_on_one(trainer)
    if trainer.accelerator.is_main_process:
        (folder / "results.json").write_text(json.dumps(results))
    fail_on_one(trainer)
    trainer.train()


def announced_as_drawn(trainer: OPSDTrainer) -> bool:
    """Whether names, dtypes and shapes are known before anything is gathered; a server has to be told them first."""
    stream = weight_sync.Stream(weight_sync.weights_of(trainer.model), torch.bfloat16, trainer.gathered)
    announced = stream.announced()
    with torch.no_grad(), stream as weights:
        drawn = [(name, str(part.dtype).removeprefix("torch."), list(part.shape)) for name, part in weights]
    return announced == drawn and len(drawn) > 0


def fault_on_one(trainer: OPSDTrainer) -> list[str]:
    """One process's engine gets a wrong adapter: all processes have to end with an error, and none may wait."""
    engine = trainer.rollout._engine
    load = engine.load_adapter
    if trainer.accelerator.process_index == 1:
        engine.load_adapter = lambda layers: load({name: (a, b + 1, s) for name, (a, b, s) in layers.items()})
    try:
        trainer.rollout.sync_weights()
        said = "nothing"
    except SyncError:
        said = "an error"
    everyone = [None] * trainer.accelerator.num_processes
    torch.distributed.all_gather_object(everyone, said)
    return everyone


def fail_on_one(trainer: OPSDTrainer) -> None:
    """From now on, one process's engine takes no weights."""

    def fail(layers: Any) -> None:
        print(f"\nRAISES {time.time()}", file=sys.stderr, flush=True)
        raise RuntimeError("injected into sync")

    if trainer.accelerator.process_index == 1:
        trainer.rollout._engine.load_adapter = fail


if __name__ == "__main__":
    main(Path(sys.argv[1]))
