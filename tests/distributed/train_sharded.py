"""Run by two processes: trains the student in the given folder under ZeRO-3 and writes down what came of it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

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
    trainer.limits = replace(trainer.limits, completion=LENGTHS[process])
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
    for name in ("full", "lora", "generated", "not_gathered"):
        trainer = OPSDTrainer(
            model=str(folder / "student"),
            teacher_model=teacher,
            args=tiny.config(
                folder / name,
                per_device_train_batch_size=1,
                gradient_accumulation_steps=2,
                ds3_gather_for_generation=name != "not_gathered",
                max_steps=1 if name == "not_gathered" else 3,
            ),
            train_dataset=tiny.rows(),
            processing_class=words,
            peft_config=LoraConfig(r=4, target_modules="all-linear") if name == "lora" else None,
            rollout=HFRollout() if name in ("generated", "not_gathered") else FixedRollout(tiny.recorded(words)),
        )
        assert is_sharded(trainer.model)
        trainer.train()
        results[name] = {
            "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
            "processes": trainer.accelerator.num_processes,
        }
        if isinstance(trainer.rollout, HFRollout):
            results[name] |= written_apart(trainer)
        main_process = trainer.accelerator.is_main_process
    if main_process:
        (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
