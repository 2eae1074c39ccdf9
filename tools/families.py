"""Tries every causal language model family of the installed transformers as student and teacher; writes a table.

    python tools/families.py                       # all of them, about a quarter of an hour; rewrites its page
    python tools/families.py bart mamba phi3       # some, printed

Each family is built at toy size with random weights and run through the trainer, in float32, for two optimizer steps:
as a student, in full and with LoRA, as a teacher, for greedy rollouts, and, if it sees, as a student and a teacher of
rows with and without images. The oracle is the model itself in float64 on
each row alone, without padding: its logits, a dense forward KL, plain autograd and plain SGD; for rollouts the tokens
of largest logit, each from a forward pass on the whole row alone. Each trial runs in a process of its own, with limits
on time and memory.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import toys
import transformers
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from support import vision_language

import trl_opsd
from trl_opsd import FixedRollout, HFRollout, OPSDConfig, OPSDTrainer
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
TABLE = Path(__file__).resolve().parents[1] / "benchmarks" / "notes" / "families.md"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, and three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def trainer_of(student: Any, teacher: Any, folder: str, rollout: Any, **given: Any) -> OPSDTrainer:
    """A trainer with plain SGD and forward KL, without shuffling."""
    args = OPSDConfig(
        output_dir=folder, per_device_train_batch_size=ROWS, gradient_accumulation_steps=1, max_steps=STEPS,
        max_completion_length=TOKENS, learning_rate=RATE, lr_scheduler_type="constant", optim="sgd", max_grad_norm=1e9,
        divergence="forward_kl", temperature=1.0, shuffle_dataset=False, save_strategy="no", report_to="none",
        disable_tqdm=True, bf16=False, use_cpu=True, gradient_checkpointing=False,
        generation_kwargs={"do_sample": False},
    )  # fmt: skip
    given = {"train_dataset": Dataset.from_dict({"prompt": PROMPTS}), "processing_class": make_tokenizer(), **given}
    return OPSDTrainer(model=student, teacher_model=teacher, args=args, rollout=rollout, **given)


def qwen2(seed: int) -> Any:
    sizes = {name: value for name, value in toys.SIZES.items() if name in Qwen2Config().to_dict()}
    return toys.toy("qwen2", VOCABULARY, seed, sharpness=12.0, **{**sizes, "num_hidden_layers": 2})


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
    completions = make_tokenizer()(ANSWERS)["input_ids"]
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
    trainer = trainer_of(student, qwen2(1), folder, HFRollout())
    prompts = make_tokenizer()(PROMPTS)["input_ids"]
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
    "student": lambda model, folder: compare(model, qwen2(1), folder),
    "LoRA": lambda model, folder: compare(model, qwen2(1), folder, peft_config=lora()),
    "teacher": lambda model, folder: compare(qwen2(1), model, folder),
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
        if isinstance(error, ValueError | TypeError) and (frame.line or "").startswith("raise ValueError(\n"[:16]):
            if str(Path(trl_opsd.__file__).parent) in frame.filename:
                return f"refused: {text}"
            if "/peft/" in frame.filename:
                return f"refused: by PEFT: {text}"
        return f"CRASHED {text[:300]} ({Path(frame.filename).name}:{frame.lineno})"
    how = f" ({reading})" if reading else ""
    return (f"exact {gap:.0e}" if gap < EXACT else f"WRONG {gap:.2g}") + how


def isolated(call: Callable[[], str]) -> str:
    """Calls a function in a process of its own, with limits on time and memory, and returns its result."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
        signal.alarm(SECONDS)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        try:
            os.write(writer, call().encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    return answer or f"CRASHED the process ended with status {status}"


# ---- The page --------------------------------------------------------------------------------------------------------

REASONS = {
    "in training mode": "in training mode it takes rows of one length only",
    "does not compute its logits as": "its head does more than a product with its weight",
    "if more tokens follow": "a token's state depends on tokens after it",
    "in a second forward pass": "it draws random numbers while it reads",
    "by PEFT": 'PEFT does not allow "all-linear"',
    "cannot run on eight tokens": "its forward fails on text alone",
    "has no output embeddings": "it has no output embeddings",
}
"""Short reasons for the table, by a part of the error message."""

_INTRODUCTION = """\
Every causal language model of transformers {version} that can be built at toy size, tried by
`python tools/families.py`, which writes this page: two optimizer steps as a student, in full and with LoRA on
"all-linear", and as a teacher, against the model itself in float64 on each row alone; greedy rollouts of a ragged batch
against the tokens of largest logit, each from a full forward pass on one row alone. *Exact* is as close as float32
allows; *refused* is an error at construction, before anything is trained, that gives the reason."""


def document(found: dict[str, dict[str, str]], roles: list[str]) -> str:
    """The lab note, from results by family and role; `roles` are the columns, in order."""
    seen = {family: one["images"] for family, one in found.items() if "images" in one}
    roles = [role for role in roles if role != "images"]
    found = {family: {role: one[role] for role in roles} for family, one in found.items()}
    built = {family: one for family, one in found.items() if not one["student"].startswith("not built")}
    sound = [family for family, one in built.items() if all(text.startswith("exact") for text in one.values())]
    slow = [family for family in sound if any("without a cache" in text for text in built[family].values())]
    unpadded = [family for family in sound if any("rows of the same length" in text for text in built[family].values())]
    counts = {role: Counter(one[role].split()[0].strip(":") for one in built.values()) for role in roles}
    kinds = sorted({kind for one in counts.values() for kind in one})
    lines = [
        "# Model families",
        "",
        _INTRODUCTION.format(version=transformers.__version__),
        "",
        f"| | {' | '.join(kinds)} |",
        f"|---|{'---|' * len(kinds)}",
        *(f"| {role} | {' | '.join(str(counts[role][kind]) for kind in kinds)} |" for role in roles),
        "",
        "## Exact in every role",
        "",
        ", ".join(family for family in sound if family not in {*unpadded, *slow}) + ".",
        "",
        "## Exact in every role, without padding",
        "",
        "Padding changes what these compute, in transformers itself; a trial at construction detects it. Only rows of "
        "the same length share a forward pass, which costs speed, not exactness; rollouts are batched in the same way.",
        "",
        ", ".join(unpadded) + ".",
        "",
        "## Exact in every role, generating without a cache",
        "",
        "With a cache their `generate` fails or computes other logits than without one, in transformers itself; a "
        "trial before the first completion detects it. Each token then re-reads its whole row.",
        "",
        ", ".join(slow) + ".",
        "",
        "## The others",
        "",
        *(f"- {', '.join(families)}: {verdicts}." for verdicts, families in _alike(built, sound).items()),
        "",
        "## With images",
        "",
        "Two steps on rows of no, one and two images of several sizes, in one batch, with a teacher of the family.",
        "",
        *(
            f"- {', '.join(families)}: {text}."
            for text, families in _by_text({one: text[:200] for one, text in seen.items()}).items()
        ),
        "",
        f"Not built, at this size or because a package is not installed: {', '.join(sorted(set(found) - set(built)))}.",
        "",
    ]
    return "\n".join(lines)


def _alike(built: dict[str, dict[str, str]], sound: list[str]) -> dict[str, list[str]]:
    """Families that are not exact in every role, by their verdicts."""
    verdicts: dict[str, str] = {}
    for family in built.keys() - sound:
        cells = {role: _cell(text) for role, text in built[family].items()}
        alike = len(set(cells.values())) == 1
        verdicts[family] = cells["student"] if alike else "; ".join(f"{role} {cell}" for role, cell in cells.items())
    return _by_text(dict(sorted(verdicts.items())))


def _by_text(texts: dict[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for family, text in texts.items():
        found.setdefault(text, []).append(family)
    return found


def _cell(text: str) -> str:
    """A result without its figure, and with a short reason."""
    kind = text.split()[0]
    if kind == "exact":
        return "exact, no cache" if "cache" in text else "exact, unpadded" if "(" in text else "exact"
    for reason, short in REASONS.items():
        if reason in text:
            return f"refused: {short}"
    return text.replace("|", "/")[:200]


def main() -> int:
    """Prints every result; returns the number of families and roles that are wrong or crash."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="family")
    parser.add_argument("--roles", nargs="+", default=list(ROLES), choices=list(ROLES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    found: dict[str, dict[str, str]] = {}
    for family in options.families or sorted({*toys.families(), *vision_language.SEEING}):
        found[family] = {}
        for role in [one for one in options.roles if one != "images" or family in vision_language.SEEING]:
            found[family][role] = isolated(lambda role=role, family=family: verdict(role, family))
            print(f"{family:24} {role:8} {found[family][role]}", flush=True)
    for role in options.roles:
        print(role, dict(Counter(one[role].split()[0] for one in found.values() if role in one)))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    if not options.families:
        TABLE.write_text(document(found, list(ROLES)), encoding="utf-8")
    return sum(text.startswith(("WRONG", "CRASHED")) for one in found.values() for text in one.values())


if __name__ == "__main__":
    sys.exit(main() > 0)
