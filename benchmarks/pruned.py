"""Drops layers of a model and distils it from itself: which layers, and whose completions it learns from.

    python benchmarks/pruned.py sums --output out/pruned --seeds 0 1 2
    python benchmarks/pruned.py rules --model out/smollm2 --output out/pruned   # examples/real_model/convert.py

`sums` trains a model of twelve layers on `examples/arithmetic` first. `rules` are those of `examples/real_model`, which
teacher and student both read. All ways have the same number of completions, rate and schedule; those that learn from
the teacher's have the same ones. Results are in the output folder and not measured again.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import prune
import torch
from arithmetic import task
from arithmetic.make_models import SIZES, make_model, supervise
from arithmetic.tokenizer import make_tokenizer
from datasets import Dataset, concatenate_datasets
from methods.small_methods import OffPolicyFirst
from real_model import distil
from real_model.questions import questions
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from trl_opsd import FixedRollout, OPSDConfig, OPSDTrainer
from trl_opsd.methods import Rewards

SIZES["deep"] = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 12, "num_attention_heads": 3}
MIXED, SUPERVISED = "off-policy to on-policy", "supervised"
WAYS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "off-policy": ({"lmbda": 0.0}, []),
    MIXED: ({"lmbda": 0.0}, [OffPolicyFirst()]),
    "on-policy": ({}, []),
}
PLAN = {
    "states": ["none", MIXED, "off-policy", "on-policy", SUPERVISED],
    "block": ["none"],
    "last": ["none", MIXED],
    "random": ["none", MIXED],
}
"""What is trained, by how layers are chosen."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "sums": {"drop": 2, "steps": 40, "rows": 32, "rate": 1e-3, "held_out": 300, "tokens": 40, "reward": task.right},
    "rules": {"drop": 5, "steps": 16, "rows": 8, "rate": 2e-4, "held_out": 40, "tokens": 32, "reward": distil.follows},
}
RULES = ("json", "list")


def rows_of(asked: argparse.Namespace, seed: int) -> tuple[Dataset, Dataset]:
    """Prompts to train on, and held out."""
    count = asked.steps * asked.rows
    if asked.task == "sums":
        held = task.draw(asked.held_out, held_out=True)
        return task.prompts_with_answers(task.draw(count, seed=1000 + seed)), task.prompts_with_answers(held)

    def told(held_out: bool, number: int) -> Dataset:
        both = concatenate_datasets([distil.told(rule, questions(held_out=held_out)) for rule in RULES])
        return both.select(random.Random(seed if not held_out else 0).choices(range(len(both)), k=number))

    return told(False, count), told(True, asked.held_out)


def trainer(asked: argparse.Namespace, student: str, rows: Dataset, seed: int, **options: Any) -> OPSDTrainer:
    given = {"max_completion_length": asked.tokens, "divergence": "forward_kl", "per_device_eval_batch_size": 100}
    given |= {"eval_temperature": 0.0, "teacher_model_init_kwargs": {"dtype": "float32"}, **options}
    methods, teacher = given.pop("methods", []), given.pop("teacher_model", asked.model)
    if not isinstance(teacher, str):
        del given["teacher_model_init_kwargs"]
    return OPSDTrainer(
        model=student,
        teacher_model=teacher,
        args=OPSDConfig(**common(asked, seed), **given),
        train_dataset=rows,
        methods=[Rewards(asked.reward), *methods],
    )


def common(asked: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Options of every trainer."""
    return {
        "output_dir": str(asked.output / "scratch"),
        "model_init_kwargs": {"dtype": "float32"},
        "max_steps": asked.steps,
        "per_device_train_batch_size": asked.rows,
        "learning_rate": asked.rate,
        "lr_scheduler_type": "linear",
        "warmup_steps": 0.1,
        "adam_beta2": 0.98,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "logging_steps": 10,
        "report_to": "none",
        "disable_tqdm": True,
        "seed": seed,
    }


def teachers(asked: argparse.Namespace, rows: Dataset, seed: int) -> Dataset:
    """The rows with a completion of the teacher each, sampled; once."""
    file = asked.output / f"{asked.task}-completions-{len(rows)}-{seed}.json"
    if not file.exists():
        one = trainer(asked, asked.model, rows, seed, eval_temperature=1.0)
        with one.generating_with("teacher"):
            file.write_text(json.dumps(one.predict(rows).texts))
    texts = [[{"role": "assistant", "content": text}] for text in json.loads(file.read_text())]
    return rows.add_column("completion", texts)


def student_of(asked: argparse.Namespace, choice: str, rows: Dataset, seed: int) -> str:
    """The folder of a student whose layers are dropped; once."""
    folder = asked.output / f"{asked.task}-{choice}{seed if choice == 'random' else ''}"
    if not folder.exists():
        model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(asked.model)
        texts = prune.tokens_of(list(rows.select(range(32))), tokenizer)
        count = len(prune.layers_of(model)[1])
        if choice in ("states", "block"):
            dropped = prune.chosen(model, texts, asked.drop, choice == "block")
            print("change by layer:", [round(one, 3) for one in prune.changes(model, texts)])
        elif choice == "last":
            dropped = list(range(count))[-asked.drop :]
        else:
            dropped = sorted(random.Random(seed).sample(range(count), asked.drop))
        print(choice, "drops", dropped, flush=True)
        prune.prune(model, dropped, folder, texts[0])
        tokenizer.save_pretrained(folder)
    return str(folder)


def measured(asked: argparse.Namespace, one: OPSDTrainer, held_out: Dataset) -> dict[str, float]:
    """What greedy completions are worth, and the KL from the teacher on them and on the teacher's own, nats."""
    own = one.predict(held_out).metrics
    file, words = asked.output / f"{asked.task}-held-out-{asked.held_out}.json", one.processing_class
    if not file.exists():
        with one.generating_with("teacher"):
            ids = [[each for each in row if each >= 0] for row in one.predict(held_out).predictions.tolist()]
        file.write_text(json.dumps(ids))
    prompts = words.apply_chat_template(list(held_out["prompt"]), add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    one.rollout = FixedRollout(dict(zip(map(tuple, prompts), json.loads(file.read_text()), strict=True)))
    theirs = one.predict(held_out).metrics
    name = next(key for key in own if key.startswith("test_rewards/") and key.endswith("/mean"))
    return {
        "right": own[name],
        "kl": own["test_divergence/mean"],
        "kl_teacher": theirs["test_divergence/mean"],
        "teacher": theirs[name],
    }


def run(asked: argparse.Namespace, choice: str, way: str, seed: int) -> dict[str, float]:
    rows, held_out = rows_of(asked, seed)
    rows = teachers(asked, rows, seed)
    student = student_of(asked, choice, rows, seed)
    start = time.perf_counter()
    if way == SUPERVISED:
        plain = SFTTrainer(
            model=student,
            args=SFTConfig(**common(asked, seed)),
            train_dataset=rows.select_columns(["prompt", "completion"]),
        )
        plain.train()
        one = trainer(asked, student, rows, seed)
        one.model.load_state_dict(plain.model.state_dict())
    else:
        options, methods = WAYS.get(way, ({}, []))
        one = trainer(asked, student, rows, seed, methods=methods, **options)
        if way != "none":
            one.train()
    seconds = time.perf_counter() - start
    return {**measured(asked, one, held_out), "seconds": seconds}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=DEFAULTS)
    parser.add_argument("--model", help="of `rules`: a chat model")
    parser.add_argument("--output", type=Path, default=Path("out/pruned"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--ways", nargs="+", choices=["none", SUPERVISED, *WAYS], default=["none", SUPERVISED, *WAYS])
    for name, value in DEFAULTS["sums"].items():
        if name != "reward":
            parser.add_argument(f"--{name}", type=type(value))
    asked = parser.parse_args(arguments)
    for name, value in DEFAULTS[asked.task].items():
        setattr(asked, name, value if getattr(asked, name, None) is None else getattr(asked, name))
    asked.output.mkdir(parents=True, exist_ok=True)
    if asked.task == "sums" and asked.model is None:
        asked.model = str(asked.output / "deep")
        if not Path(asked.model).exists():
            tokenizer = make_tokenizer()
            model = make_model("deep", tokenizer)
            supervise(model, tokenizer, task.draw(50_000), steps=700)
            model.save_pretrained(asked.model)
            tokenizer.save_pretrained(asked.model)
    every = [(choice, way) for choice, ways in PLAN.items() for way in ways if way in asked.ways]
    for seed in asked.seeds:
        for choice, way in every:
            file = result(asked, choice, way, seed)
            if not file.exists():
                file.write_text(json.dumps(run(asked, choice, way, seed)))
                print(file.name, file.read_text(), flush=True)
    print(f"| {asked.task} | right | KL on its own completions | on the teacher's | seconds |\n|---|---|---|---|---|")
    for choice, way in every:
        found = [json.loads(result(asked, choice, way, seed).read_text()) for seed in asked.seeds]
        cells = [span([one[key] for one in found]) for key in ("right", "kl", "kl_teacher")]
        seconds = statistics.mean(one["seconds"] for one in found)
        print(f"| {choice}, {way} | {' | '.join(cells)} | {seconds:.0f} |")
    print(f"the teacher: {found[0]['teacher']:.3f}")


def result(asked: argparse.Namespace, choice: str, way: str, seed: int) -> Path:
    """The file of one student; those that are not trained are the same for all seeds, unless chance chose them."""
    of = "" if way == "none" and choice != "random" else f"-{seed}"
    return asked.output / f"{asked.task}-{choice}-{way}{of}-{asked.steps}-{asked.rate:g}.json"


def span(values: list[float]) -> str:
    """A mean with its range."""
    mean, least, most = (f"{value:.3f}" for value in (statistics.mean(values), min(values), max(values)))
    return mean if least == most else f"{mean} ({least}–{most})"


if __name__ == "__main__":
    main()
