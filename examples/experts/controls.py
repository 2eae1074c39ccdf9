"""Cheaper ways to one model of three experts: TIES of their weights by mergekit, and supervised training."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from experts.make import ADAPTER, batches, fit
from experts.tasks import TASKS, Question, draw


def answers(model: torch.nn.Module, folder: Path, questions: list[Question], temperature: float = 0.0) -> list[str]:
    """One completion of each question; greedy at temperature 0."""
    words = AutoTokenizer.from_pretrained(folder / "base")
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    config = GenerationConfig(
        max_new_tokens=40, eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id, **sampling
    )
    found: list[str] = []
    for start in range(0, len(questions), 200):
        asked = [one.prompt for one in questions[start : start + 200]]
        read = words.apply_chat_template(
            asked, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        written = model.eval().generate(**read, generation_config=config)[:, read["input_ids"].size(1) :]
        found += words.batch_decode(written, skip_special_tokens=True)
    return found


def measured(model: torch.nn.Module, folder: Path, number: int) -> dict[str, float]:
    """The accuracy in each task, of the questions that `experts` ask."""
    found = {}
    for task in TASKS:
        asked = draw(task, number, held_out=True)
        said = answers(model, folder, asked)
        found[task] = sum(one.answer == text for one, text in zip(asked, said, strict=True)) / len(asked)
    return found


def supervised(folder: Path, steps: int, seed: int, number: int) -> dict[str, float]:
    """An adapter of the base, trained on completions that the experts have sampled for the student's prompts."""
    torch.manual_seed(seed)
    seen = []
    for task in TASKS:
        expert = AutoPeftModelForCausalLM.from_pretrained(folder / task)
        asked = draw(task, 16 * steps)
        said = answers(expert, folder, asked, temperature=1.0)
        seen += [Question(task, one.text, text) for one, text in zip(asked, said, strict=True)]
    random.Random(seed).shuffle(seen)
    student = get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "base"), LoraConfig(**ADAPTER))
    fit(student, batches(AutoTokenizer.from_pretrained(folder / "base"), seen, seed, 48), steps=steps)
    return measured(student, folder, number)


def ties(folder: Path, number: int) -> dict[str, float]:
    """TIES of the experts' merged weights, with mergekit's usual density of a half and all weights 1."""
    from mergekit.config import MergeConfiguration
    from mergekit.merge import MergeOptions, run_merge

    for task in TASKS:
        if not (folder / f"{task}-merged").exists():
            merged = AutoPeftModelForCausalLM.from_pretrained(folder / task).merge_and_unload()
            merged.save_pretrained(folder / f"{task}-merged")
            AutoTokenizer.from_pretrained(folder / "base").save_pretrained(folder / f"{task}-merged")
    said = {
        "merge_method": "ties",
        "base_model": str(folder / "base"),
        "models": [
            {"model": str(folder / f"{task}-merged"), "parameters": {"density": 0.5, "weight": 1.0}} for task in TASKS
        ],
        "parameters": {"normalize": True},
        "dtype": "float32",
    }
    run_merge(MergeConfiguration.model_validate(said), str(folder / "ties"), MergeOptions(copy_tokenizer=False))
    return measured(AutoModelForCausalLM.from_pretrained(folder / "ties"), folder, number)
