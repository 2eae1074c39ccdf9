"""Tries every causal language model family of the installed transformers as student and teacher; prints a table.

    python tools/families.py                       # all of them, about a quarter of an hour
    python tools/families.py bart mamba phi3

Each is built at toy size with random weights and trained for two optimizer steps in float32: as a student, in full and
with LoRA, as a teacher, and, if it sees, on rows with and without images; and it generates greedily. The oracle is the
model itself in float64 on each row alone, without padding: a dense forward KL, plain autograd and plain SGD; for
rollouts the tokens of largest logit, each from a forward pass on the whole row. Each trial runs in a process of its
own, with limits on time and memory.
"""

from __future__ import annotations

import argparse
import copy
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import toys
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from transformers import GenerationConfig

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from support import tiny, vision_language

import trl_opsd
from trl_opsd import FixedRollout, HFRollout, OPSDTrainer
from trl_opsd.models.backbone import together
from trl_opsd.types.rollout import cut_after_end, images_of

VOCABULARY = 259
PROMPTS = ["2+2=", "The sky is", "a", "Count: one", "red, green,", "x y z"]
ANSWERS = ["4 or so.", " blue today", "bc", " two three", " blue", "!"]
RATE, STEPS, ROWS, TOKENS, SECONDS, BYTES = 1e-2, 2, 3, 12, 120, 6 << 30
IMAGES = (0, 1, 2, 1, 1, 0)
ENDS = list(range(2, VOCABULARY, 12))
EXACT = 1e-3
"""Tolerance for the change of the weights over two steps, relative to the norm of the oracle's."""


def trainer_of(student: Any, teacher: Any, folder: str, rollout: Any, **given: Any) -> OPSDTrainer:
    """A trainer with plain SGD and forward KL, without shuffling."""
    args = tiny.config(
        folder, per_device_train_batch_size=ROWS, max_steps=STEPS, max_completion_length=TOKENS, learning_rate=RATE,
        optim="sgd", max_grad_norm=1e9, divergence="forward_kl", temperature=1.0, shuffle_dataset=False,
        generation_kwargs={"do_sample": False},
    )  # fmt: skip
    given = {"train_dataset": Dataset.from_dict({"prompt": PROMPTS}), "processing_class": tiny.tokenizer(), **given}
    return OPSDTrainer(model=student, teacher_model=teacher, args=args, rollout=rollout, **given)


def in_float64(model: Any) -> Any:
    """A copy in float64, or in float32 if a family cannot compute in float64 (XGLM); with eager experts."""
    copied = copy.deepcopy(model).double().eval()
    bare = copied.get_base_model() if hasattr(copied, "get_base_model") else copied
    bare.set_experts_implementation("eager")
    try:
        with torch.no_grad():
            copied(input_ids=torch.arange(3, 9)[None], use_cache=False)
    except RuntimeError:
        return copied.float()
    return copied


def log_probs(model: Any, prompt: list[int], completion: list[int]) -> Tensor:
    """[C, V], float64, from a forward pass on one row alone, with its images if it has any."""
    ids = torch.tensor([prompt + completion])
    images = together(images_of([prompt]), [0], ids.size(1))
    images = {name: one.double() if one.is_floating_point() else one for name, one in images.items()}
    logits = model(input_ids=ids, use_cache=False, **images).logits
    return logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)


def train_oracle(student: Any, teacher: Any, prompts: list[list[int]], completions: list[list[int]]) -> None:
    """The oracle: two steps of SGD on the mean forward KL over the tokens of each batch, row by row, in place."""
    student.train()  # there is no dropout; Reformer needs this mode
    trained = [one for one in student.parameters() if one.requires_grad]
    for start in (0, ROWS):
        rows = range(start, start + ROWS)
        tokens = sum(len(completions[row]) for row in rows)
        for one in trained:
            one.grad = None
        for row in rows:
            with torch.no_grad():
                target = log_probs(teacher, prompts[row], completions[row])
            found = log_probs(student, prompts[row], completions[row])
            ((target.exp() * (target - found)).sum() / tokens).backward()
        with torch.no_grad():
            for one in trained:
                if one.grad is not None:
                    one.sub_(one.grad, alpha=RATE)


def compare(student: Any, teacher: Any, folder: str, **given: Any) -> tuple[float, str]:
    """The relative distance between the trainer's change of the weights and the oracle's, and how rows are batched."""
    theirs, pairs = in_float64(teacher), {}
    trainer = trainer_of(student, teacher, folder, FixedRollout(pairs), **given)
    prompts = trainer.prompt_ids_of(trainer.teaching.read_rows(list(trainer.train_dataset)))
    completions = tiny.tokenizer()(ANSWERS)["input_ids"]
    pairs.update({tuple(prompt): answer for prompt, answer in zip(prompts, completions, strict=True)})
    before, after = in_float64(trainer.model), in_float64(trainer.model)
    train_oracle(after, theirs, prompts, completions)
    trainer.train()
    gap = size = rounding = 0.0
    start, wanted = dict(before.named_parameters()), dict(after.named_parameters())
    for name, parameter in trainer.model.named_parameters():
        target = wanted[name].detach()
        change = target - start[name].detach()
        gap += float((parameter.detach().double() - target).square().sum())
        size += float(change.square().sum())
        rounding += float(parameter.detach().double().square().sum())
    # Weights stored in float32 cannot change by less than their rounding.
    beyond = max(gap**0.5 - 1e-7 * rounding**0.5, 0.0)
    return beyond / size**0.5 if size else float("inf"), readings(trainer)


def readings(trainer: Any) -> str:
    """How student and teacher batch rows, as the trainer determined; empty if padded."""
    found = {str(getattr(one, "batching", "padded")) for one in (trainer, *trainer.teachers.values())}
    return " ".join(sorted(found - {"padded"}))


def write(student: Any, folder: str) -> tuple[float, str]:
    """Share of rows whose greedy completion differs from [`greedy`], and how rows are batched."""
    # Enough end tokens that rows end one after the other, and none of the family's options (Bart forces its last).
    student.generation_config = GenerationConfig(eos_token_id=ENDS, pad_token_id=0)
    alone = copy.deepcopy(student).eval()
    trainer = trainer_of(student, tiny.qwen2(seed=1), folder, HFRollout())
    prompts = tiny.tokenizer()(PROMPTS)["input_ids"]
    written = trainer.complete(prompts)
    wrong = sum(greedy(alone, prompt) != ids for prompt, ids in zip(prompts, written, strict=True))
    how = str(trainer.rollout.batching)
    return wrong / len(prompts), "" if how == "padded" else how


def greedy(model: Any, prompt: list[int]) -> list[int]:
    """The greedy completion of one row alone, from a full forward pass for each token."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(TOKENS):
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
            ids.append(int(logits[0, -1, :VOCABULARY].argmax()))
    return cut_after_end(ids[len(prompt) :], ENDS)


def see(student: Any, folder: str) -> tuple[float, str]:
    """As [`compare`], for a model that sees, with a teacher of its family, and rows of no, one and two images."""
    family = student.config.model_type
    teacher = vision_language.model(family, 48, 1, sees=True)
    given = {"processing_class": vision_language.processor(family), "train_dataset": vision_language.rows(IMAGES)}
    return compare(student, teacher, folder, **given)


def lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0, init_lora_weights=False)


ROLES: dict[str, Callable[[Any, str], tuple[float, str]]] = {
    "student": lambda model, folder: compare(model, tiny.qwen2(seed=1), folder),
    "LoRA": lambda model, folder: compare(model, tiny.qwen2(seed=1), folder, peft_config=lora()),
    "teacher": lambda model, folder: compare(tiny.qwen2(seed=1), model, folder),
    "rollout": write,
    "images": see,
}


def verdict(role: str, family: str) -> str:
    """The result for a family in a role: `exact ...`, `WRONG ...`, `refused: ...`, `CRASHED ...`, `not built: ...`."""
    try:
        # A random model with a tied head repeats its last token forever.
        untied = {"tie_word_embeddings": False} if role == "rollout" else {}
        if role == "images":
            model = vision_language.model(family, 32, 0, sees=True).eval()
        else:
            model = toys.toy(family, VOCABULARY, sharpness=12.0, **untied).eval()
        with torch.no_grad():
            model(input_ids=torch.arange(3, 9)[None], use_cache=False)
    except Exception as error:
        return f"not built: {type(error).__name__}: {' '.join(str(error).split())[:120]}"
    try:
        with tempfile.TemporaryDirectory() as folder:
            gap, reading = ROLES[role](model, folder)
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        frame = traceback.extract_tb(error.__traceback__)[-1]
        if isinstance(error, ValueError | TypeError) and (frame.line or "").startswith("raise ValueError"):
            if str(Path(trl_opsd.__file__).parent) in frame.filename:
                return f"refused: {text}"
            if "/peft/" in frame.filename:
                return f"refused: by PEFT: {text}"
        return f"CRASHED {text[:300]} ({Path(frame.filename).name}:{frame.lineno})"
    how = f" ({reading})" if reading else ""
    return (f"exact {gap:.0e}" if gap < EXACT else f"WRONG {gap:.2g}") + how


def isolated(role: str, family: str) -> str:
    """The same from a process of its own, with limits on time and memory."""
    with ProcessPoolExecutor(1, get_context("fork"), _limit) as process:
        try:
            return process.submit(verdict, role, family).result()
        except BrokenProcessPool as error:
            return f"CRASHED {error}"


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    signal.alarm(SECONDS)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)


def main() -> int:
    """Prints every result; returns the number of families and roles that are wrong or crash."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="family")
    parser.add_argument("--roles", nargs="+", default=list(ROLES), choices=list(ROLES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| family | role | result |\n|---|---|---|")
    found: list[tuple[str, str]] = []
    for family in options.families or sorted({*toys.families(), *vision_language.SEEING}):
        for role in [one for one in options.roles if one != "images" or family in vision_language.SEEING]:
            found.append((role, isolated(role, family)))
            print(f"| {family} | {role} | {found[-1][1].replace('|', '/')} |", flush=True)
    print(Counter((role, text.partition(" ")[0]) for role, text in found))
    return sum(text.startswith(("WRONG", "CRASHED")) for _, text in found)


if __name__ == "__main__":
    sys.exit(main() > 0)
