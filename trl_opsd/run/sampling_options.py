"""The sampling options of the trainer, and those in `generation_kwargs` that override them; nothing is loaded yet."""

from __future__ import annotations

import math
import warnings
from typing import Any

from transformers import GenerationConfig
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS

from trl_opsd._compat.trl import DistillationConfig
from trl_opsd.run.nearest import nearest
from trl_opsd.run.ranges import above, at_least, at_least_one, in_range, one_of

_OPTIONS = {
    "max_new_tokens": "max_completion_length",
    "max_tokens": "max_completion_length",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "cache_implementation": "cache_implementation",
}
"""`generation_kwargs` that are a trainer option under the name of `transformers` or vLLM, with that option."""

_WITHOUT_EFFECT = {
    "max_length": "`max_completion_length` limits the new tokens, and takes precedence",
    "pad_token_id": "rows are padded with the tokenizer's padding token, and masked",
}
"""`generation_kwargs` that change no completion, and why."""

_FIXED = {
    "num_return_sequences": 1,
    "n": 1,
    "best_of": 1,
    "return_dict_in_generate": False,
    "disable_compile": True,
}
"""`generation_kwargs` that can only have this value."""

_NEEDED = "the trainer needs one completion of token ids for each prompt"
_SEVERAL = f"{_NEEDED}, and asks for each of several (`num_generations`) by itself"

_BREAK_A_ROLLOUT = {
    "num_return_sequences": _SEVERAL,
    "n": _SEVERAL,
    "best_of": _SEVERAL,
    "return_dict_in_generate": _NEEDED,
    "disable_compile": "TRL always sets it to True; decoding is compiled with `rollout=HFRollout(compile=True)`",
}
"""Why, for the values that are refused."""

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Options of which a checkpoint's generation config may have others."""
ENDS = ("eos_token_id", "stop_token_ids", "ignore_eos")
"""`generation_kwargs` that determine the end tokens."""

FAIL_IN_GENERATE = {
    "stop_strings": "looks for text, but a rollout is token ids: let completions end with an end token, for instance "
    "with `model.generation_config.eos_token_id`",
    "prompt_lookup_num_tokens": "decodes one row at a time, but a rollout is a batch: remove it",
    "assistant_early_exit": "decodes one row at a time, but a rollout is a batch: remove it",
    "token_healing": "rewrites the end of a prompt, but a rollout keeps it: remove it",
}
"""Options of `generate` that it refuses only in the middle of a run, and why."""


def settle_sampling(args: DistillationConfig) -> None:
    """Gives `generation_kwargs` the last word on how completions are generated, as TRL does, and checks the result.

    What is also an option moves to that option, so that everything that depends on it follows: the room for a
    completion, the engine, the fingerprint. The exception is `temperature`, which is an option of the loss as well: in
    `generation_kwargs` it is that of generation alone. One warning lists what was overridden.

    Raises:
        ValueError: An option is out of range; or one in `generation_kwargs` is unknown or would break a rollout.
    """
    notes = _override_options(args)
    _check_options(args)
    _check_generation_kwargs(args)
    if notes:
        warnings.warn(f"`generation_kwargs`: {'; '.join(notes)}.", stacklevel=4)


def _override_options(args: DistillationConfig) -> list[str]:
    """Moves what is an option out of `generation_kwargs`, drops what has no effect, and says what was overridden."""
    rest, notes = dict(args.generation_kwargs or {}), []
    for name, value in (args.generation_kwargs or {}).items():
        if name in _FIXED:
            if value is not None and value != _FIXED[name]:
                raise ValueError(f"{_shown(name, value)}: {_BREAK_A_ROLLOUT[name]}: remove it.")
            del rest[name]
        elif name in _WITHOUT_EFFECT:
            notes.append(f"`{name}` has no effect, {_WITHOUT_EFFECT[name]}")
            del rest[name]
        elif option := _OPTIONS.get(name):
            if value != getattr(args, option):
                notes.append(f"`{name}={value!r}` replaces `{option}={getattr(args, option)!r}`")
            setattr(args, option, rest.pop(name))
        elif name == "temperature" and value != args.temperature:
            notes.append(
                f"completions are sampled at temperature {value}, the loss keeps `temperature={args.temperature}`"
            )
    args.generation_kwargs = rest or None
    return notes


def check_eval_temperature(args: DistillationConfig) -> None:
    """Refuses a temperature of evaluations that is out of range, or makes all completions of a prompt the same."""
    if args.eval_temperature is None:
        return
    at_least("eval_temperature", args.eval_temperature, 0.0)
    several = args.num_generations_eval or args.num_generations
    if args.eval_temperature == 0 and several > 1:
        raise ValueError(
            f"`eval_temperature=0` with {several} completions of each prompt of an evaluation, which are then the "
            "same: set `num_generations_eval=1`, or a temperature above 0."
        )


def _check_options(args: DistillationConfig) -> None:
    if args.max_completion_length is None:
        raise ValueError(
            "`max_completion_length=None`: the room for a completion has to be known, so that prompts without it are "
            "found before training; in TRL, `transformers` would write 20 tokens: set a number."
        )
    at_least_one("max_completion_length", args.max_completion_length)
    above("temperature", args.temperature, 0.0)
    check_eval_temperature(args)
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


def _check_generation_kwargs(args: DistillationConfig) -> None:
    if args.has_engine and args.seq_kd:
        _check_read_by_both(args.generation_kwargs or {})
    known = [name for name in vars(GenerationConfig()) if not name.startswith("_")]
    for name, value in (args.generation_kwargs or {}).items():
        given = _shown(name, value)
        if name in FAIL_IN_GENERATE and not args.has_engine:
            raise ValueError(f"{given}: it {FAIL_IN_GENERATE[name]}.")
        if name == "temperature" and not args.has_engine and not (_is_number(value) and 0 < value < math.inf):
            raise ValueError(
                f"{given}: expected a finite number above 0; for greedy decoding set 'do_sample' to False."
            )
        if name in ("eos_token_id", "stop_token_ids") and not all(map(_is_token, _listed(value))):
            raise ValueError(f"{given}: expected a token id, or a list of them, of which each ends a completion.")
        if name not in (*known, "eos_token_id") and not args.has_engine:
            close = nearest(name, known)
            hint = (
                f"did you mean {' or '.join(map(repr, close))}?"
                if close
                else "see `transformers.GenerationConfig` for all of them."
            )
            raise ValueError(f"{given} is not an option of `generate`: {hint}")


def _check_read_by_both(given: dict[str, Any]) -> None:
    """Refuses what is an engine's alone, where a teacher writes too, with `generate` of transformers."""
    known = {*vars(GenerationConfig()), *ENDS, "seed"} - FAIL_IN_GENERATE.keys()
    for name, value in given.items():
        if name not in known or (name == "temperature" and not value):
            raise ValueError(
                f"{_shown(name, value)} with `seq_kd=True`: an engine follows it, and the teacher, which writes with "
                "`generate` of transformers, cannot: remove it, or have the teacher write before, into a column "
                "'completion'."
            )


def end_tokens(args: DistillationConfig, declared: list[int], rows: int) -> list[int]:
    """The tokens that end a completion: those of tokenizer and model, unless `generation_kwargs` names others.

    Args:
        args ([`~trl.DistillationConfig`]):
            In its `generation_kwargs`, `eos_token_id` replaces them, as in `transformers`; vLLM's `ignore_eos` drops
            them, and its `stop_token_ids` come in addition.
        declared (`list[int]`):
            Those of tokenizer and model.
        rows (`int`):
            Vocabulary size of the student.

    Raises:
        ValueError: One that `generation_kwargs` names is outside the vocabulary.
    """
    given = args.generation_kwargs or {}
    ends = _listed(given["eos_token_id"]) if "eos_token_id" in given else declared
    ends = [*([] if given.get("ignore_eos") else ends), *_listed(given.get("stop_token_ids") or [])]
    if unknown := [token for token in ends if token >= rows]:
        raise ValueError(
            f"`generation_kwargs={args.generation_kwargs}`: no completion could end with {unknown}, the student knows "
            f"{rows} ids: name tokens of its vocabulary."
        )
    return ends


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(name: str, value: Any) -> str:
    return f"`generation_kwargs={{{name!r}: {value!r}}}`"
