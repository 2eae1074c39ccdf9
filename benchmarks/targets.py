"""What targets on disk cost and save: bytes, tokens per second, and steps with and without the teacher in memory.

    python benchmarks/targets.py                 # Qwen2.5-shaped models with random weights, on any device
    python benchmarks/targets.py --rows 256 --tokens 256

The teacher is in bfloat16, the student in float32. Each way trains on the same rows for as many steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from datasets import Dataset, load_from_disk
from support import tiny
from transformers import AutoModelForCausalLM, Qwen2Config

from trl_opsd import OPSDConfig, OPSDTrainer
from trl_opsd.cli.targets import write_targets

WAYS = {"teacher": 0, "states": None, "top 64": 64, "top 128": 128}
STUDENT, TEACHER = (256, 4), (512, 16)
"""Width and layers."""
VOCABULARY = 32_000


def model(width: int, layers: int, seed: int) -> Any:
    torch.manual_seed(seed)
    config = Qwen2Config(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if layers == TEACHER[1] else torch.float32)


def trainer(rows: Dataset, folder: Path, tokens: int, **given: Any) -> OPSDTrainer:
    args = OPSDConfig(
        str(folder / "run"),
        lmbda=0.0,
        divergence="forward_kl",
        max_completion_length=tokens,
        per_device_train_batch_size=16,
        max_steps=len(rows) // 16,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        gradient_checkpointing=False,
        logging_steps=1,
        **given,
    )
    teacher = None if args.teacher_targets else model(*TEACHER, 1)
    words = tiny.tokenizer()
    return OPSDTrainer(model(*STUDENT, 0), teacher, args, train_dataset=rows, processing_class=words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=128)
    given = parser.parse_args()
    texts = [f"row {number}: " + "word " * (given.tokens // 5) for number in range(given.rows)]
    rows = Dataset.from_dict({"prompt": [f"prompt {number}" for number in range(given.rows)], "completion": texts})
    for name, way in WAYS.items():
        found: dict[str, Any] = {"way": name}
        with TemporaryDirectory() as nowhere:
            folder, options = Path(nowhere), {}
            if way != 0:
                one = trainer(rows, folder, given.tokens)
                start = perf_counter()
                write_targets(one, folder / "targets", way)
                tokens = sum(map(len, load_from_disk(str(folder / "targets"))["completion_ids"]))
                found["tokens per second, written"] = round(tokens / (perf_counter() - start))
                parts = (folder / "targets").glob("part-*")
                found["bytes per token"] = round(sum(path.stat().st_size for path in parts) / tokens)
                options = {"teacher_targets": str(folder / "targets")}
            one = trainer(rows, folder, given.tokens, **options)
            one.train()
            logs = [log for log in one.state.log_history if "time/teach" in log][1:]
            for phase in ("teach", "compare"):
                found[f"{phase}, seconds of a step"] = round(sum(log[f"time/{phase}"] for log in logs) / len(logs), 4)
            found["loss"] = [round(log["loss"], 5) for log in logs][-1]
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
