"""Run by two processes with a sharded student: both generate with one SGLang server and record the completions."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import fsdp_on_cpu
import tiny
from vllm_lab import by_hf, lora

from trl_opsd import OPSDTrainer
from trl_opsd._compat.sharding import is_split_model


def main(folder: Path, server: dict[str, object]) -> None:
    options = {"top_k": 1, "learning_rate": 2e-3, "max_completion_length": 16}
    teacher = tiny.qwen2(48, seed=1)
    args = tiny.config(folder / "out", per_device_train_batch_size=1, **options, **server)
    fsdp_on_cpu.allow()
    trainer = OPSDTrainer(
        model=str(folder / "student"),
        teacher_model=teacher,
        args=args,
        train_dataset=tiny.rows(),
        processing_class=tiny.tokenizer(),
        peft_config=lora(),
    )
    trainer.train()
    process = trainer.accelerator.process_index
    prompts = trainer.tokenize(tiny.PROMPTS[:3] if process == 0 else tiny.PROMPTS[3:4])
    found = {
        "processes": trainer.accelerator.num_processes,
        "split": is_split_model(trainer.accelerator.unwrap_model(trainer.model_wrapped)),
        "completions": trainer.complete(prompts),
        "expected": by_hf(trainer, prompts),
        "gaps": [row["rollout/logprob_gap"] for row in trainer.state.log_history if "rollout/logprob_gap" in row]
        + [trainer.rollout._proof.check()],
    }
    try:
        trainer.rollout._engine.write([[5, 1000 * process]], [{"max_tokens": 4}])
    except Exception as error:
        found["error"] = str(error)
    (folder / f"{process}.json").write_text(json.dumps(found))
    trainer.rollout.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
