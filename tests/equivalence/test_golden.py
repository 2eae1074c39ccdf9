"""Short runs of each way through a step give the numbers that they always gave: `golden.json` has them.

`PYTHONPATH=tests python tests/equivalence/test_golden.py FILE` writes those of the package as it is, with a digest of
all weights and logs: on one machine two versions of the package can be compared to the last bit.
"""

from __future__ import annotations

import copy
import hashlib
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from support import tiny
from support.rollouts import Apart

from trl_opsd import OPSDTrainer

GOLDEN = Path(__file__).with_name("golden.json")
HINTS = {"privileged_context": [f"hint {row % 5}" for row in range(16)]}
CONTRASTS = {"contrast_context": [f"no hint {row % 3}" for row in range(16)]}
TEACHERS = {"teacher": [("one", "two", "two")[row % 3] for row in range(16)]}

TOLD = ("loss", "grad_norm", "divergence/mean", "entropy", "num_tokens", "eval_loss", "eval_divergence/mean", "step")

RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "three calls, evaluated": {"gradient_accumulation_steps": 3, "eval_strategy": "steps", "eval_steps": 2},
    "resumed": {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "resumes": 2},
    "packed to a budget": {"gradient_accumulation_steps": 2, "max_tokens_per_microbatch": 60, "padding_free": True},
    "completions of the dataset": {"lmbda": 0.5, "sft_weight": 0.2},
    "completions of the teacher": {"lmbda": 0.5, "seq_kd": True},
    "an adapter": {"peft_config": LoraConfig(r=4, target_modules="all-linear"), "learning_rate": 1e-2},
    "two teachers": {"columns": TEACHERS, "teacher_model": ("one", "two"), "gradient_accumulation_steps": 2},
    "its own average": {"columns": HINTS, "teacher_model": None, "teacher_model_kind": "ema", "teacher_sync_steps": 2},
    "contrast and anchor": {"columns": HINTS | CONTRASTS, "contrast_weight": 0.5, "anchor_weight": 0.1},
    "selected tokens": {"token_selection": "student_entropy", "token_fraction": 0.4, "loss_aggregation": "rows"},
    "sampled": {"divergence": "sampled_reverse_kl", "gradient_accumulation_steps": 2},
    "two completions": {"num_generations": 2, "gradient_accumulation_steps": 2, "eval_strategy": "steps"},
    "rows as they end": {"overlap": "step", "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    "rows ahead": {"overlap": "ahead", "gradient_accumulation_steps": 2, "overlap_max_divergence": 1e-4},
    "a stream": {"is_stream": True, "gradient_accumulation_steps": 2, "max_steps": 6},
    "workers": {"dataloader_num_workers": 1, "dataloader_persistent_workers": True, "max_steps": 6},
    "dropout": {"model": "dropout", "gradient_accumulation_steps": 2, "lr_scheduler_type": "linear"},
}


def rows(number: int, columns: dict[str, list[str]]) -> Dataset:
    """Prompts with completions, of unequal lengths."""
    prompts = [f"{tiny.PROMPTS[row % 8]}{'+' * row}" for row in range(number)]
    found = {"prompt": prompts, "completion": [one.removesuffix("<|im_end|>") for one in tiny.ANSWERS * 2][:number]}
    return Dataset.from_dict(found | {name: one[:number] for name, one in columns.items()})


def measured(name: str, folder: Path) -> dict[str, Any]:
    """What a run logs, predicts and leaves."""
    options = {"max_steps": 4, "seed": 7, "max_completion_length": 16, **RUNS[name]}
    columns, is_stream = options.pop("columns", {}), options.pop("is_stream", False)
    resumes, peft_config = options.pop("resumes", 0), options.pop("peft_config", None)
    student = tiny.gpt2(32, 0, dropout=0.1) if options.pop("model", "") else tiny.qwen2(32, 0)
    asked = options.pop("teacher_model", "")
    teacher: Any = tiny.qwen2(48, 1) if asked == "" else asked and {one: tiny.qwen2(48, len(one)) for one in asked}
    dataset, evaluated = rows(16, columns), rows(5, columns)
    words = tiny.tokenizer()
    prompt_ids, completion_ids = (words(list(dataset[name]))["input_ids"] for name in ("prompt", "completion"))
    answers = dict(zip(map(tuple, prompt_ids), completion_ids, strict=True))

    def run(folder: Path) -> OPSDTrainer:
        torch.manual_seed(3)
        more = {} if peft_config is None else {"peft_config": peft_config}
        return OPSDTrainer(
            model=copy.deepcopy(student),
            teacher_model=teacher,
            args=tiny.config(folder, **options, **({"save_steps": 1, "save_strategy": "steps"} if resumes else {})),
            train_dataset=dataset.to_iterable_dataset(num_shards=3) if is_stream else dataset,
            eval_dataset=evaluated,
            processing_class=words,
            rollout=Apart(answers) if "overlap" in options else None,
            **more,
        )

    trainer = run(folder / "first")
    trainer.train()
    if resumes:
        trainer = run(folder / "second")
        trainer.train(resume_from_checkpoint=str(folder / "first" / f"checkpoint-{resumes}"))
    predicted = trainer.predict(evaluated)
    weights = tiny.weights(trainer)
    logged = [{key: one for key, one in each.items() if is_repeated(key)} for each in trainer.state.log_history]
    return {
        "logged": [{key: each[key] for key in TOLD if key in each} for each in logged],
        "predicted": [[int(token) for token in row if token >= 0] for row in predicted.predictions],
        "loss of predictions": predicted.metrics["test_loss"],
        "weights": [float(weights.double() @ torch.linspace(-1, 1, len(weights), dtype=torch.double).sin())],
        "digest": hashlib.sha256(weights.numpy().tobytes() + repr(logged).encode()).hexdigest()[:16],
    }


def is_repeated(key: str) -> bool:
    """Whether a number of a log is none of time or memory."""
    return not any(part in key for part in ("time", "per_second", "memory", "runtime", "flos", "overlap/"))


def numbers(value: Any) -> Any:
    """All numbers of nested lists and mappings, in order."""
    if isinstance(value, dict):
        return [one for key in sorted(value) for one in numbers(value[key])]
    return [one for each in value for one in numbers(each)] if isinstance(value, list) else [value]


@pytest.mark.parametrize("name", RUNS)
def test_numbers_of_a_run_stay_what_they_were(name, tmp_path):
    now, then = measured(name, tmp_path), json.loads(GOLDEN.read_text())[name]
    assert [one.keys() for one in now["logged"]] == [one.keys() for one in then["logged"]]
    assert now["predicted"] == then["predicted"]
    for part in ("logged", "loss of predictions", "weights"):
        assert numbers(now[part]) == pytest.approx(numbers(then[part]), rel=1e-4, abs=1e-6), part


if __name__ == "__main__":
    found = {}
    for run_name in RUNS:
        with TemporaryDirectory() as made:
            found[run_name] = measured(run_name, Path(made))
    Path(sys.argv[1]).write_text(json.dumps(found))
