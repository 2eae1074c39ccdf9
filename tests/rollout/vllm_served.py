"""Run by two processes: both write with one vLLM server, with 3 prompts and 1, and write down what they got."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import tcp_transfer
import tiny
from vllm_lab import by_hf, lora

from trl_opsd import OPSDTrainer
from trl_opsd.rollout.server_client import ServerError


def main(folder: Path, server: dict[str, object]) -> None:
    options = {"use_vllm": True, "top_k": 1, "learning_rate": 1e-2, "max_completion_length": 16}
    trainer = OPSDTrainer(
        model=str(folder / "student"),
        teacher_model=tiny.qwen2(48, seed=1),
        args=tiny.config(folder / "out", per_device_train_batch_size=1, **options, **server),
        train_dataset=tiny.rows(),
        processing_class=tiny.tokenizer(),
        peft_config=lora(),
    )
    process = trainer.accelerator.process_index
    prompts = trainer.tokenize(tiny.PROMPTS[:3] if process == 0 else tiny.PROMPTS[3:4])
    completions = trainer.complete(prompts)
    expected = by_hf(trainer, prompts)
    trainer.train()
    trainer.rollout.sync_weights()
    found = {
        "processes": trainer.accelerator.num_processes,
        "completions": completions,
        "expected": expected,
        "gaps": [row["rollout/logprob_gap"] for row in trainer.state.log_history if "rollout/logprob_gap" in row]
        + [trainer.rollout._proof.check()],
    }
    try:
        # Only the other process asks for too much, so the main one hears of it from the server.
        trainer.rollout._engine.write(prompts, [{"max_tokens": 4 + 1000 * process}] * len(prompts))
    except ServerError as error:
        found["error"] = str(error)
    (folder / f"{process}.json").write_text(json.dumps(found))
    trainer.rollout.close()


if __name__ == "__main__":
    tcp_transfer.use(pytest.MonkeyPatch())
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
