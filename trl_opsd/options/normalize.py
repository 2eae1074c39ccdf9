"""Settles options that have several names or stand in `generation_kwargs` too; and makes help of descriptions."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import fields
from inspect import cleandoc, getsource
from itertools import pairwise
from textwrap import dedent
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from transformers import GenerationConfig

from trl_opsd._compat.trl import DistillationConfig
from trl_opsd.losses import SampledReverseKL
from trl_opsd.options.names import did_you_mean
from trl_opsd.options.table import TRLS, checked


def settle_loading(args: DistillationConfig) -> None:
    """Gives the dtype in `*_init_kwargs` its present name, in place: TRL would load a student in float32."""
    for option in ("model_init_kwargs", "teacher_model_init_kwargs"):
        loading = dict(getattr(args, option) or {})
        if (older := loading.pop("torch_dtype", None)) is not None:
            setattr(args, option, {"dtype": older, **loading})


# ---- `generation_kwargs` --------------------------------------------------------------------------------------------

_OPTIONS = {
    "max_new_tokens": "max_completion_length",
    "max_tokens": "max_completion_length",
    **{name: name for name in ("top_p", "top_k", "min_p", "repetition_penalty", "cache_implementation")},
}
"""Keys that are a trainer option under the name of `transformers` or vLLM, with that option."""

_SET_HERE = (
    *("num_return_sequences", "n", "best_of", "return_dict_in_generate", "disable_compile"),
    *("logprobs", "prompt_logprobs", "allowed_token_ids", "output_kind", "detokenize", "max_length", "pad_token_id"),
)
"""Keys that the trainer sets: a prompt has one completion of token ids, and is repeated for several."""

FAIL_IN_GENERATE = {
    "stop_strings": "matches text, but a rollout is token ids",
    "prompt_lookup_num_tokens": "decodes one row at a time",
    "assistant_early_exit": "decodes one row at a time",
    "token_healing": "rewrites the end of a prompt",
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
    """Gives `generation_kwargs` the last word on how completions are generated, as TRL does.

    What is also an option moves to that option, so that everything that depends on it follows: the room for a
    completion, the engine, the fingerprint. The exception is `temperature`, which is an option of the loss as well: in
    `generation_kwargs` it is that of generation alone.
    """
    rest = dict(args.generation_kwargs or {})
    for name, option in _OPTIONS.items():
        if name in rest:
            setattr(args, option, checked(option, TRLS[option], rest.pop(name)))
    args.generation_kwargs = rest or None
    known = vars(GenerationConfig()).keys() | {"eos_token_id", *((*ENDS, "seed") if args.has_engine else ())}
    for name, value in rest.items():
        shown = f"`generation_kwargs={{{name!r}: {value!r}}}`"
        if name in _SET_HERE:
            raise ValueError(f"{shown}: the trainer sets this option: remove it.")
        if args.has_engine and not args.seq_kd:  # an engine knows others, and says so
            continue
        if name in FAIL_IN_GENERATE:
            raise ValueError(f"{shown}: it {FAIL_IN_GENERATE[name]}; remove it.")
        if name not in known:  # which TRL would drop in silence
            hint = did_you_mean(name, known) or "see `transformers.GenerationConfig` for all of them."
            where = "`generate`, with which the teacher completes rows (`seq_kd`)" if args.has_engine else "`generate`"
            raise ValueError(f"{shown} is not an option of {where}: {hint}")
    if not args.has_engine:
        GenerationConfig(**{**rest, "cache_implementation": args.cache_implementation}).validate()


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
    if unknown := [one for one in ends if not (isinstance(one, int) and 0 <= one < rows)]:
        raise ValueError(
            f"`generation_kwargs={args.generation_kwargs}`: no completion could end with {unknown}, because the "
            f"student has {rows} ids: use tokens of its vocabulary."
        )
    return ends


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


# ---- Help of a command line -----------------------------------------------------------------------------------------

_Class = TypeVar("_Class", bound=type[Any])


def with_help(described: _Class) -> _Class:
    """Decorates a dataclass: the text under a field is its `help`, and the docstring lists the fields that are new."""
    try:
        source = ast.parse(dedent(getsource(described)))
    except OSError:  # an installation without sources
        return described
    known, hints, listed = {one.name: one for one in fields(described)}, get_type_hints(described), []
    inherited = {name for base in described.__mro__[1:] for name in getattr(base, "__dataclass_fields__", ())}
    for declared, under in pairwise(source.body[0].body):  # type: ignore[attr-defined]
        match declared, under:
            case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                one, meaning = known[name], " ".join(text.split())
                # `HfArgumentParser` passes it to argparse, which reads `%` as a format.
                one.metadata = MappingProxyType({**one.metadata, "help": meaning.replace("%", "%%")})
                if name not in inherited:
                    default = "" if one.default is None else f", defaults to `{one.default!r}`"
                    listed += [f"    {name} (`{_kind(hints[name])}`, *optional*{default}):", f"        {meaning}"]
    described.__doc__ = "\n".join([cleandoc(described.__doc__ or ""), "", "Parameters:", *listed])
    return described


def _kind(hint: Any) -> str:
    """A type in words, without `None`."""
    if get_origin(hint) is Literal:
        return type(get_args(hint)[0]).__name__
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(_kind(one) for one in get_args(hint) if one is not NoneType)
    return getattr(hint, "__name__", str(hint))
