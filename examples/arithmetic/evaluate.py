"""Generates a model's answers to problems in batches, and measures the share that is exactly right."""

from __future__ import annotations

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from arithmetic.task import Problem, is_right

MAX_COMPLETION = 40
"""Tokens; the longest worked solution for two three-digit numbers has 30."""


def answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[Problem],
    *,
    batch_size: int = 256,
    temperature: float = 0.0,
    show_solution: bool = False,
) -> list[list[int]]:
    """Token ids of one completion for each problem, with its end token; greedy at temperature 0.

    With `show_solution` the prompt contains the worked solution after the question.
    """
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    config = GenerationConfig(
        max_new_tokens=MAX_COMPLETION,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **sampling,
    )
    was_training = model.training
    model.eval()
    written: list[list[int]] = []
    for start in range(0, len(problems), batch_size):
        some = problems[start : start + batch_size]
        batch = [problem.prompt_with_solution if show_solution else problem.prompt for problem in some]
        inputs = tokenizer.apply_chat_template(
            batch, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        ).to(model.device)
        ids = model.generate(**inputs, generation_config=config)
        written += [_without_padding(row, tokenizer) for row in ids[:, inputs["input_ids"].size(1) :].tolist()]
    model.train(was_training)
    return written


def accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[Problem],
    temperature: float = 0.0,
    show_solution: bool = False,
) -> float:
    """The share of problems answered exactly right; see [`answers`]."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        completions = answers(model, tokenizer, problems, temperature=temperature, show_solution=show_solution)
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    return sum(map(is_right, problems, texts)) / len(problems)


def _without_padding(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return ids[: ids.index(tokenizer.eos_token_id) + 1] if tokenizer.eos_token_id in ids else ids
