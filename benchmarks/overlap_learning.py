"""Trains the student of the quickstart with each `overlap`, and compares what it has learned after equally many steps.

    python benchmarks/overlap_learning.py --steps 120 --seeds 0 1 2

A real vLLM server writes the completions, and takes the weights of each step. Accuracy is that on held-out problems,
greedy, at the end; "staleness" is the share of steps whose rows were written with weights one step older, and
"divergence" how far such a step has moved the student, in nats per token, the mean and the largest. Seconds are those
of the training, with everything on one machine: they say little where server and trainer share its cores.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "rollout"))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import pytest
import server_lab
import tcp_transfer
from arithmetic import STUDENT, TEACHER
from arithmetic.evaluate import accuracy
from arithmetic.task import draw, prompts
from transformers import PrinterCallback, ProgressCallback

from trl_opsd import OPSDConfig, OPSDTrainer

ROWS = 64
"""Completions of a step, as in the quickstart."""
MICRO = 16
OVERLAPS = ("none", "step", "ahead")
PROBLEMS = 200
LINE = "{accuracy:8.3f}  {loss:9.4f}  {seconds:7.0f}  {staleness:9.2f}  {divergence:10.1e}  {largest:7.1e}"


def learned(overlap: str, seed: int, steps: int, folder: Path, server: dict[str, Any]) -> dict[str, float]:
    """Trains once; the accuracy afterwards, and what was logged."""
    args = OPSDConfig(
        output_dir=str(folder / f"{overlap}-{seed}"),
        divergence="forward_kl",
        overlap=None if overlap == "none" else overlap,
        max_steps=steps,
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=ROWS // MICRO,
        max_completion_length=40,
        top_p=0.6,
        learning_rate=1e-3,
        warmup_steps=10,
        adam_beta2=0.98,
        logging_steps=1,
        seed=seed,
        save_strategy="no",
        report_to="none",
        use_vllm=True,
        vllm_sync_check="first",
        disable_tqdm=True,
        **server,
    )
    trainer = OPSDTrainer(
        model=STUDENT, teacher_model=TEACHER, args=args, train_dataset=prompts(draw(ROWS * steps, seed=seed))
    )
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    seconds = trainer.train().metrics["train_runtime"]
    right = accuracy(trainer.model, trainer.processing_class, draw(PROBLEMS, held_out=True))
    trainer.rollout.close()
    log = trainer.state.log_history
    stale = [entry["overlap/staleness"] for entry in log if "overlap/staleness" in entry]
    moved = [entry["overlap/divergence"] for entry in log if "overlap/divergence" in entry]
    return {
        "accuracy": right,
        "loss": next(entry["loss"] for entry in reversed(log) if "loss" in entry),
        "seconds": seconds,
        "staleness": sum(stale) / len(stale) if stale else 0.0,
        "divergence": sum(moved) / len(moved) if moved else 0.0,
        "largest": max(moved, default=0.0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--overlap", nargs="+", choices=OVERLAPS, default=list(OVERLAPS))
    options = parser.parse_args()
    print("overlap  seed  accuracy  last loss  seconds  staleness  divergence  largest")
    with (
        tempfile.TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as patch,
        server_lab.running(Path(folder), str(STUDENT), context=128) as server,
    ):
        tcp_transfer.use(patch)
        for seed in options.seeds:
            for overlap in options.overlap:
                found = learned(overlap, seed, options.steps, Path(folder), server)
                numbers = (
                    "{accuracy:8.3f}  {loss:9.4f}  {seconds:7.0f}  {staleness:9.2f}  {divergence:10.1e}  {largest:7.1e}"
                )
                print(f"{overlap:>7}  {seed:4d}  " + numbers.format(**found), flush=True)


if __name__ == "__main__":
    main()
