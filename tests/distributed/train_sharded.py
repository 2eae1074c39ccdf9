"""Run by two processes: trains the student in the given folder under ZeRO-3 and writes down what came of it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import tiny
import torch
from accelerate.utils import gather_object
from peft import LoraConfig

from trl_opsd import FixedRollout, HFRollout, OPSDTrainer
from trl_opsd.backbone import is_sharded

LENGTHS = (3, 60)
"""Tokens that each process writes, where one has long finished before the other."""


def written_apart(trainer: OPSDTrainer) -> dict[str, list[list[int]]]:
    """Greedy completions of two prompts for each process: by the rollout, and by each process on a whole student."""
    process = trainer.accelerator.process_index
    prompt_ids = trainer.tokenize(tiny.PROMPTS[2 * process : 2 * process + 2])
    trainer.generation_config.do_sample = False
    trainer.generation_config.min_new_tokens = LENGTHS[process]
    trainer.readers = replace(trainer.readers, student_limits=replace(trainer.limits, completion=LENGTHS[process]))
    written = trainer.complete(prompt_ids)

    trainer.args.ds3_gather_for_generation = True
    how = {"max_new_tokens": LENGTHS[process], "min_new_tokens": LENGTHS[process], "do_sample": False}
    with trainer.student_for_generation() as student:
        alone = [
            student.generate(torch.tensor([ids]), **how, synced_gpus=False)[0, len(ids) :].tolist()
            for ids in prompt_ids
        ]
    return {"written": gather_object(written), "alone": gather_object(alone)}


def main(folder: Path) -> None:
    teacher = tiny.qwen2(48, seed=1)
    words = tiny.tokenizer()
    results = {}
    placements = {"teacher_zero3": "zero3", "teacher_none": "none", "teacher_stream": "stream"}
    for name in ("full", "lora", "generated", "not_gathered", *placements):
        trainer = OPSDTrainer(
            model=str(folder / "student"),
            teacher_model=str(folder / "teacher") if name in placements else teacher,
            args=tiny.config(
                folder / name,
                per_device_train_batch_size=1,
                gradient_accumulation_steps=2,
                ds3_gather_for_generation=name != "not_gathered",
                max_steps=1 if name == "not_gathered" else 3,
                teacher_offload=placements.get(name, "none"),
            ),
            train_dataset=tiny.rows(),
            processing_class=words,
            peft_config=LoraConfig(r=4, target_modules="all-linear") if name == "lora" else None,
            rollout=HFRollout() if name in ("generated", "not_gathered") else FixedRollout(tiny.recorded(words)),
        )
        assert is_sharded(trainer.model)
        assert is_sharded(trainer.teacher.model) == (name == "teacher_zero3")
        trainer.train()
        results[name] = {
            "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
            "processes": trainer.accelerator.num_processes,
        }
        if name == "teacher_zero3":
            results[name] |= sharded_teacher(trainer)
        if isinstance(trainer.rollout, HFRollout):
            results[name] |= written_apart(trainer)
        main_process = trainer.accelerator.is_main_process
    if main_process:
        (folder / "results.json").write_text(json.dumps(results))


def sharded_teacher(trainer: OPSDTrainer) -> dict[str, Any]:
    """What this process keeps of the teacher, and how often it reads when it has fewer rows than the other."""
    shares = [parameter.ds_tensor for parameter in trainer.teacher.model.parameters()]
    gathered = [parameter.numel() for parameter in trainer.teacher.model.parameters() if parameter.dim() > 1]
    return {
        "share": sum(share.numel() for share in shares),
        "devices": sorted({str(share.device) for share in shares}),
        "gathered_between": sum(gathered),
        "agreed": trainer.teacher.placement.agreed(1 + trainer.accelerator.process_index),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
