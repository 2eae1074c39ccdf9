"""A chat model that calls tools learns from itself, told in which table to look, to find that out in other databases.

    python examples/sql/train.py --model Qwen/Qwen3-0.6B --output out/sql

The teacher is the model as it was, which reads the entry of the data dictionary, and after a wrong answer the right
query. The student is an adapter. The best checkpoint is that with the most right answers about databases that are held
out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from methods.turns import EqualTurns
from peft import LoraConfig

from sql.world import MOST_CALLS, Database, rows
from trl_opsd import OPSDConfig, OPSDTrainer


def main(arguments: Sequence[str] | None = None, **more: Any) -> OPSDTrainer:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="with a chat template that has tools")
    parser.add_argument("--output", type=Path, default=Path("out/sql"))
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--rows", type=int, default=16, help="databases in a step")
    parser.add_argument("--held-out", type=int, default=64, help="databases to measure with")
    parser.add_argument("--use-vllm", action="store_true", help="generate with a colocated vLLM")
    options = parser.parse_args(arguments)
    trainer = OPSDTrainer(
        model=options.model,
        args=OPSDConfig(
            output_dir=str(options.output),
            teacher_model_kind="base",
            divergence="forward_kl",
            environment_timeout=10.0,
            max_completion_length=768,
            max_tool_calling_iterations=MOST_CALLS,
            max_steps=options.steps,
            per_device_train_batch_size=options.rows,
            learning_rate=1e-4,
            use_vllm=options.use_vllm,
            eval_strategy="steps",
            eval_on_start=True,
            eval_steps=max(options.steps // 4, 1),
            save_strategy="best",
            metric_for_best_model="rewards/Database/mean",
            report_to="none",
        ),
        train_dataset=rows(options.steps * options.rows),
        eval_dataset=rows(options.held_out, held_out=True),
        environment_factory=Database,
        methods=[EqualTurns()],  # a long query counts as much as a short answer
        peft_config=LoraConfig(r=16, target_modules="all-linear"),
        **more,
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
