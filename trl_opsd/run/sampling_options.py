"""Checks how a student is to sample, before anything is loaded: the options of the trainer, and those of `generate`."""

from __future__ import annotations

import difflib

from transformers import GenerationConfig
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS

from trl_opsd._compat.trl import DistillationConfig
from trl_opsd.run.ranges import above, at_least_one, in_range, one_of

_SET_BY_OPTION = {
    "max_new_tokens": "max_completion_length",
    "max_length": "max_completion_length",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "cache_implementation": "cache_implementation",
}
"""Generation options that the trainer's own would silently lose against."""

_CHANGE_THE_RESULT = ("num_return_sequences", "n", "best_of", "return_dict_in_generate", "eos_token_id", "pad_token_id")
"""Generation options after which a completion would no longer be one list of token ids for one prompt."""

_FAIL_IN_GENERATE = {
    "stop_strings": "looks for text, and a rollout is token ids: let completions end with an end token, for instance "
    "with `model.generation_config.eos_token_id`",
    "prompt_lookup_num_tokens": "decodes one row at a time, and a rollout is a batch: remove it",
    "assistant_early_exit": "decodes one row at a time, and a rollout is a batch: remove it",
}
"""Generation options that `generate` refuses in the middle of a run, and why."""


def check_sampling(args: DistillationConfig) -> None:
    """Checks the options of sampling; `args` are the trainer's.

    Raises:
        ValueError: One is out of range.
    """
    at_least_one("max_completion_length", args.max_completion_length)
    above("temperature", args.temperature, 0.0)
    # `generate` takes None for "off".
    if args.top_p is not None:
        in_range("top_p", args.top_p, 0.0, 1.0, open_below=True)
    if args.top_k is not None and (not isinstance(args.top_k, int) or args.top_k < 0):
        raise ValueError(f"`top_k={args.top_k!r}`: expected an integer of at least 0; 0 keeps every token.")
    if args.min_p is not None:
        in_range("min_p", args.min_p, 0.0, 1.0)
    if args.repetition_penalty is not None:
        above("repetition_penalty", args.repetition_penalty, 0.0)
    if args.pad_to_multiple_of is not None:
        at_least_one("pad_to_multiple_of", args.pad_to_multiple_of)
    if args.cache_implementation is not None:
        one_of("cache_implementation", args.cache_implementation, tuple(ALL_CACHE_IMPLEMENTATIONS))


def check_generation_kwargs(args: DistillationConfig) -> None:
    """Checks `generation_kwargs`; `args` are the trainer's.

    Raises:
        ValueError: One is unknown, belongs to another option, or would change what a rollout is.
    """
    known = [name for name in vars(GenerationConfig()) if not name.startswith("_")]
    for name, value in (args.generation_kwargs or {}).items():
        given = f"`generation_kwargs={{{name!r}: {value!r}}}`"
        if name in _SET_BY_OPTION:
            option = _SET_BY_OPTION[name]
            raise ValueError(f"{given} would override `{option}` without a word: set `{option}` itself.")
        if name in _CHANGE_THE_RESULT:
            raise ValueError(
                f"{given} would change what a rollout returns; the trainer needs one completion of token ids for "
                "each prompt, ended by the tokenizer's and the model's own end tokens: remove it."
            )
        if name in _FAIL_IN_GENERATE and not args.use_vllm:
            raise ValueError(f"{given}: it {_FAIL_IN_GENERATE[name]}.")
        if name == "disable_compile":
            raise ValueError(f"{given}: TRL always sets it; remove it.")
        if name not in known and not args.use_vllm:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "see `transformers.GenerationConfig` for those it has."
            raise ValueError(f"{given} is not an option of `generate`: {hint}")
