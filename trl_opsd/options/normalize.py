"""Normalizes options as they were given: text becomes numbers, and `*_kwargs` agree with the options beside them."""

from __future__ import annotations

import ast
import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from inspect import cleandoc, getsource
from itertools import pairwise
from numbers import Integral, Real
from textwrap import dedent
from types import MappingProxyType
from typing import Any, TypeVar, get_args, get_type_hints

from transformers import GenerationConfig, TrainingArguments

from trl_opsd._compat.trl import DistillationConfig
from trl_opsd.losses import SampledReverseKL
from trl_opsd.options.names import did_you_mean
from trl_opsd.options.table import above, integer

# ---- Text and JSON --------------------------------------------------------------------------------------------------

_WORDS = {
    **dict.fromkeys(("true", "yes", "on", "t", "y", "1"), True),
    **dict.fromkeys(("false", "no", "off", "f", "n", "0"), False),
}
_EXPECTED = {bool: "True or False", int: "an integer", float: "a number"}

_hints = cache(get_type_hints)


def convert_text(args: TrainingArguments) -> None:
    """Converts options in place, by the types of their fields: `"1e-5"` to a number, `"False"` to a boolean."""
    config: Any = type(args)
    for name, hint in _hints(config).items():
        kinds = set(get_args(hint) or (hint,)) - {type(None)}
        if len(kinds) == 1 and (kind := kinds.pop()) in _EXPECTED and (value := getattr(args, name)) is not None:
            setattr(args, name, _converted(name, value, kind))
    # YAML 1.1, which PyYAML reads, takes `1e-5` for text, since it has no dot, and `no` for False.
    for name in ("logging_strategy", "eval_strategy", "save_strategy"):
        if getattr(args, name) is False:
            setattr(args, name, "no")


def _converted(name: str, value: Any, kind: type) -> Any:
    try:
        if kind is bool:
            return _WORDS[value.strip().lower()] if isinstance(value, str) else value
        if isinstance(value, bool) or not isinstance(value, str | Real):
            raise ValueError("not a number")
        if isinstance(value, Integral):
            return int(value)
        number = float(value)
        if kind is int and number != math.floor(number):  # which raises for infinity and NaN
            raise ValueError("not an integer")
        return kind(number)
    except (KeyError, ValueError, OverflowError) as error:
        raise ValueError(f"`{name}={value!r}`: expected {_EXPECTED[kind]}.") from error


def check_json(args: TrainingArguments) -> None:
    """Checks the options that may be given as JSON; transformers parses them, without saying which one is malformed."""
    for name in args._VALID_DICT_FIELDS:
        value = getattr(args, name)
        if isinstance(value, str) and value.startswith("{"):
            try:
                json.loads(value)
            except ValueError as error:
                raise ValueError(
                    f"`{name}={value!r}` is not JSON ({error}): put names and strings into double quotes, or pass a "
                    "dict."
                ) from None
        elif name.endswith("_kwargs") and not isinstance(value, dict | None):
            raise ValueError(f"`{name}={value!r}`: expected a dict of options, or the JSON of one.")


# ---- Loading --------------------------------------------------------------------------------------------------------


def settle_loading(args: TrainingArguments) -> None:
    """Gives the dtype in `*_init_kwargs` its present name, in place, and refuses two values for one thing."""
    for option in ("model_init_kwargs", "teacher_model_init_kwargs"):
        loading = dict(getattr(args, option) or {})
        # TRL loads a student as `dtype` says, or in float32, and never looks for `torch_dtype`.
        if (older := loading.pop("torch_dtype", None)) is not None:
            check_once("dtype", loading.setdefault("dtype", older), option, "torch_dtype", older)
            setattr(args, option, loading)
    if (revision := args.teacher_model_revision) is not None:
        again = (args.teacher_model_init_kwargs or {}).get("revision", revision)
        check_once("teacher_model_revision", revision, "teacher_model_init_kwargs", "revision", again)


def check_once(name: str, value: Any, option: str, key: str, again: Any) -> None:
    """Raises `ValueError` if an option and a key of another one are different values for one thing."""
    if value != again:
        raise ValueError(
            f"`{name}={value!r}` and `{option}={{{key!r}: {again!r}}}` set the same option to two values: remove one "
            "of them."
        )


# ---- `generation_kwargs` --------------------------------------------------------------------------------------------

_OPTIONS = {
    "max_new_tokens": "max_completion_length",
    "max_tokens": "max_completion_length",
    **{name: name for name in ("top_p", "top_k", "min_p", "repetition_penalty", "cache_implementation")},
}
"""Keys that are a trainer option under the name of `transformers` or vLLM, with that option."""

_WITHOUT_EFFECT = {
    "max_length": "`max_completion_length` limits the new tokens, and takes precedence",
    "pad_token_id": "rows are padded with the tokenizer's padding token, and masked",
}
"""Keys that change no completion, and why."""

_NEEDED = "the trainer needs one completion of token ids for each prompt"
_SEVERAL = f"{_NEEDED}, and repeats a prompt itself for several (`num_generations`)"
_FIXED = {
    **dict.fromkeys(("num_return_sequences", "n", "best_of"), (1, _SEVERAL)),
    "return_dict_in_generate": (False, _NEEDED),
    "disable_compile": (
        True,
        "TRL always sets it to True; decoding is compiled with `rollout=HFRollout(compile=True)`",
    ),
}
"""Keys that can only have one value, and why."""

_ONE_ROW = "decodes one row at a time, but a rollout is a batch"
FAIL_IN_GENERATE = {
    "stop_strings": "matches text, but a rollout is token ids: end completions with an end token, for instance by "
    "`model.generation_config.eos_token_id`",
    "prompt_lookup_num_tokens": _ONE_ROW,
    "assistant_early_exit": _ONE_ROW,
    "token_healing": "rewrites the end of a prompt, but a rollout keeps it",
}
"""Keys that `generate` refuses only in the middle of a run, and why."""

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Options that a checkpoint's generation config may set otherwise."""
ENDS = ("eos_token_id", "stop_token_ids", "ignore_eos")
"""Keys that determine the end tokens."""

_OFF: dict[str, tuple[Any, ...]] = {
    "top_p": (1.0, None),
    "top_k": (0, -1, None),
    "min_p": (0.0, None),
    "repetition_penalty": (1.0, None),
    "vllm_structured_outputs_regex": (None,),
}
"""Options with the values at which tokens are drawn from the student's whole distribution."""
_OFF_IN_GENERATE: dict[str, tuple[Any, ...]] = {
    **_OFF,
    "do_sample": (True, None),
    "num_beams": (1, None),
    "typical_p": (1.0, None),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "frequency_penalty", "presence_penalty"), (0.0, None)),
}
"""The same, of keys that only `generate` or an engine has."""
_CHANGE_NO_CHOICE = (
    *("eos_token_id", "stop_token_ids", "ignore_eos", "stop", "include_stop_str_in_output", "max_new_tokens"),
    *("max_tokens", "max_time", "seed", "use_cache", "max_cache_len", "prefill_chunk_size", "compile_config"),
    *("skip_special_tokens", "spaces_between_special_tokens", "detokenize", "output_kind", "priority", "timeout"),
    *("renormalize_logits", "remove_invalid_values", "length_penalty", "early_stopping"),
)
"""Keys that say where a completion ends, or how fast it comes, and not which token is drawn. Any other may."""


def settle_sampling(args: DistillationConfig) -> None:
    """Gives `generation_kwargs` the last word on how completions are generated, as TRL does, and warns of it once.

    What is also an option moves to that option, so that everything that depends on it follows: the room for a
    completion, the engine, the fingerprint. The exception is `temperature`, which is an option of the loss as well: in
    `generation_kwargs` it is that of generation alone.
    """
    rest, notes = dict(args.generation_kwargs or {}), []
    for name, value in (args.generation_kwargs or {}).items():
        if name in _FIXED:
            only, why = _FIXED[name]
            if value not in (None, only):
                raise ValueError(f"{_shown(name, value)}: {why}: remove it.")
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
                f"completions are sampled at temperature {value}, while the loss uses `temperature={args.temperature}`"
            )
    args.generation_kwargs = rest or None
    for name, value in rest.items():
        _check_key(args, name, value)
    if notes:
        warnings.warn(f"`generation_kwargs`: {'; '.join(notes)}.", stacklevel=4)  # where the config is made


def _check_key(args: DistillationConfig, name: str, value: Any) -> None:
    given = _shown(name, value)
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")} | {"eos_token_id"}
    of_both = {*known, *ENDS, "seed"} - FAIL_IN_GENERATE.keys()
    if args.has_engine and args.seq_kd and (name not in of_both or (name == "temperature" and not value)):
        raise ValueError(
            f"{given} with `seq_kd=True`: an engine supports it, but the teacher, which uses transformers' `generate`, "
            "does not: remove it, or generate the teacher's completions beforehand, into a column 'completion'."
        )
    if name in ("eos_token_id", "stop_token_ids") and not all(map(integer(0).fits, _listed(value))):
        raise ValueError(f"{given}: expected a token id that ends a completion, or a list of such ids.")
    if args.has_engine:  # which knows others, and says so
        return
    if name in FAIL_IN_GENERATE:
        raise ValueError(f"{given}: it {FAIL_IN_GENERATE[name]}.")
    if name == "temperature" and not above(0).fits(value):
        raise ValueError(f"{given}: expected a finite number above 0; for greedy decoding set 'do_sample' to False.")
    if name not in known:
        hint = did_you_mean(name, known) or "see `transformers.GenerationConfig` for all of them."
        raise ValueError(f"{given} is not an option of `generate`: {hint}")


def check_sampled(args: Any, divergence: Any) -> None:
    """Refuses options with which the policy gradient of sampled tokens would not be that of their distribution."""
    if isinstance(divergence, SampledReverseKL):
        mixed = [] if args.lmbda == 1.0 else [f"lmbda={args.lmbda!r}"]
        _refuse_drawn([*drawn_otherwise(args), *mixed])


def drawn_otherwise(args: Any) -> list[str]:
    """Options with which tokens are not drawn from the student's distribution in the loss, each with its value."""
    off = {**_OFF, "student_temperature": (args.temperature, None)}
    found = [f"{name}={getattr(args, name)!r}" for name, values in off.items() if getattr(args, name) not in values]
    shown = "generation_kwargs={{{name!r}: {value!r}}}"
    return found + _not_drawn(args.generation_kwargs or {}, args.temperature, shown)


def check_drawn(options: Mapping[str, Any], temperature: float, shown: str) -> None:
    """Refuses options of `generate` or an engine with which tokens are not drawn from the student's distribution."""
    _refuse_drawn(_not_drawn(options, temperature, shown))


def _not_drawn(options: Mapping[str, Any], temperature: float, shown: str) -> list[str]:
    off = {**_OFF_IN_GENERATE, "temperature": (temperature,)}
    others = {name: value for name, value in options.items() if name not in _CHANGE_NO_CHOICE}
    return [
        shown.format(name=name, value=value) for name, value in others.items() if value not in off.get(name, (None,))
    ]


def _refuse_drawn(options: list[str]) -> None:
    for shown in options:
        raise ValueError(
            f"`{shown}` with 'sampled_reverse_kl', whose gradient estimate needs tokens sampled from the student's "
            "distribution in the loss: remove the option, or set `divergence='reverse_kl'`, which uses the full "
            "vocabulary."
        )


def end_tokens(args: DistillationConfig, declared: list[int], rows: int) -> list[int]:
    """The tokens that end a completion: those of tokenizer and model, unless `generation_kwargs` names others.

    There, `eos_token_id` replaces them, as in `transformers`; vLLM's `ignore_eos` drops them, and its `stop_token_ids`
    come in addition.
    """
    given = args.generation_kwargs or {}
    ends = _listed(given["eos_token_id"]) if "eos_token_id" in given else declared
    ends = [*([] if given.get("ignore_eos") else ends), *_listed(given.get("stop_token_ids") or [])]
    if unknown := [token for token in ends if token >= rows]:
        raise ValueError(
            f"`generation_kwargs={args.generation_kwargs}`: no completion could end with {unknown}, because the "
            f"student has {rows} ids: use tokens of its vocabulary."
        )
    return ends


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _shown(name: str, value: Any) -> str:
    return f"`generation_kwargs={{{name!r}: {value!r}}}`"


# ---- Help of a command line -----------------------------------------------------------------------------------------

_Class = TypeVar("_Class", bound=type[Any])


def with_help(described: _Class) -> _Class:
    """Decorates a dataclass: the text under a field is its `help`, and the docstring lists the annotated fields."""
    try:
        source = ast.parse(dedent(getsource(described)))
    except OSError:  # an installation without sources
        return described
    known, listed = {one.name: one for one in fields(described)}, []
    for declared, under in pairwise(source.body[0].body):  # type: ignore[attr-defined]
        match declared, under:
            case ast.AnnAssign(ast.Name(name), annotation), ast.Expr(ast.Constant(str(text))):
                one, meaning = known[name], " ".join(text.split())
                # `HfArgumentParser` passes it to argparse, which reads `%` as a format.
                one.metadata = MappingProxyType({**one.metadata, "help": meaning.replace("%", "%%")})
                if isinstance(annotation, ast.Subscript) and isinstance(annotation.slice, ast.Tuple):
                    kind = ast.unparse(annotation.slice.elts[0]).removesuffix(" | None")
                    default = "" if one.default is None else f", defaults to `{one.default!r}`"
                    listed += [f"    {name} (`{kind}`, *optional*{default}):", f"        {meaning}"]
    described.__doc__ = "\n".join([cleandoc(described.__doc__ or ""), "", "Parameters:", *listed])
    return described
