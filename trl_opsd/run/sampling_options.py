"""Checks the sampling options of the trainer and those in `generation_kwargs`, before anything is loaded."""

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
"""`generation_kwargs` that would silently override a trainer option, with that option."""

_CHANGE_THE_RESULT = ("num_return_sequences", "n", "best_of", "return_dict_in_generate", "eos_token_id", "pad_token_id")
"""`generation_kwargs` with which `generate` would not return one list of token ids for each prompt."""

_FAIL_IN_GENERATE = {
    "stop_strings": "looks for text, but a rollout is token ids: let completions end with an end token, for instance "
    "with `model.generation_config.eos_token_id`",
    "prompt_lookup_num_tokens": "decodes one row at a time, but a rollout is a batch: remove it",
    "assistant_early_exit": "decodes one row at a time, but a rollout is a batch: remove it",
}
"""`generation_kwargs` that `generate` refuses only in the middle of a run, and why."""


def check_sampling(args: DistillationConfig) -> None:
    """Checks the trainer's own sampling options.

    Raises:
        ValueError: An option is out of range.
    """
    at_least_one("max_completion_length", args.max_completion_length)
    above("temperature", args.temperature, 0.0)
    # `None` means "off" to `generate`.
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
    """Checks `generation_kwargs`.

    Raises:
        ValueError: A key is unknown, duplicates a trainer option, or would change the format of a rollout.
    """
    known = [name for name in vars(GenerationConfig()) if not name.startswith("_")]
    for name, value in (args.generation_kwargs or {}).items():
        given = f"`generation_kwargs={{{name!r}: {value!r}}}`"
        if name in _SET_BY_OPTION:
            option = _SET_BY_OPTION[name]
            raise ValueError(f"{given} would silently override `{option}`: set `{option}` itself.")
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
            hint = f"did you mean {close[0]!r}?" if close else "see `transformers.GenerationConfig` for all of them."
            raise ValueError(f"{given} is not an option of `generate`: {hint}")
