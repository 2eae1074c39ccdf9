"""Checks the options that say what is learned: divergences, their settings, and how many tokens at once."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from trl_opsd._compat.trl import DistillationConfig
from trl_opsd.losses import DIVERGENCES, Divergence, GeneralizedJSD, SampledReverseKL
from trl_opsd.losses.clipping import check_clip
from trl_opsd.losses.divergence import describe
from trl_opsd.losses.registry import BETAS, READ
from trl_opsd.run.overlap_options import check_optimizer
from trl_opsd.run.ranges import above, at_least_one, between, in_range, one_of

_PLAIN: dict[str, tuple[Any, ...]] = {
    "top_p": (1.0, None),
    "top_k": (0, -1, None),
    "min_p": (0.0, None),
    "repetition_penalty": (1.0, None),
    "lmbda": (1.0,),
}
"""Options of sampling, and the values with which tokens are drawn from the student's whole distribution."""

_PLAIN_IN_GENERATE: dict[str, tuple[Any, ...]] = {
    **{name: plain for name, plain in _PLAIN.items() if name != "lmbda"},
    "do_sample": (True, None),
    "typical_p": (1.0, None),
    "epsilon_cutoff": (0.0, None),
    "eta_cutoff": (0.0, None),
    "num_beams": (1, None),
    "frequency_penalty": (0.0, None),
    "presence_penalty": (0.0, None),
}
"""The same, of options that only `generate` or an engine has."""

_CHANGE_NO_CHOICE = (
    *("eos_token_id", "stop_token_ids", "ignore_eos", "stop", "include_stop_str_in_output", "max_new_tokens"),
    *("max_tokens", "max_time", "seed", "use_cache", "max_cache_len", "prefill_chunk_size", "compile_config"),
    *("skip_special_tokens", "spaces_between_special_tokens", "detokenize", "output_kind", "priority", "timeout"),
    *("renormalize_logits", "remove_invalid_values", "length_penalty", "early_stopping"),
)
"""Options of `generate` and of engines that say where a completion ends, or how fast it comes, and not which token is
drawn. Any other may."""

_NOT_DRAWN = (
    "with a divergence of sampled tokens, 'sampled_reverse_kl': they are then not drawn from the student's "
    "distribution in the loss, whose gradient it estimates. Leave the option out, or set `divergence='reverse_kl'`, "
    "which reads the whole vocabulary."
)

__all__ = [
    "check_divergence",
    "check_drawn",
    "check_objective",
    "check_shapes",
    "shape_in_words",
    "temperatures_in_words",
    "unread_objective",
]


def check_objective(args: DistillationConfig) -> None:
    """Refuses an objective that does not exist or contradicts another option, and warns of one that vanishes.

    Args:
        args ([`~trl.DistillationConfig`]):
            The options.

    Raises:
        ValueError: An option is out of range, unknown, or contradicts another.
    """
    check_divergence(args.divergence)
    _check_settings(args)
    one_of("overlong_prompts", args.overlong_prompts, ("error", "drop"))
    if args.loss_chunk_tokens is not None:
        at_least_one("loss_chunk_tokens", args.loss_chunk_tokens)
    if args.max_tokens_per_microbatch is not None:
        at_least_one("max_tokens_per_microbatch", args.max_tokens_per_microbatch)
        check_optimizer(args, "max_tokens_per_microbatch")
    if args.padding_free and args.pad_to_multiple_of is not None:
        raise ValueError(
            f"`padding_free=True` with `pad_to_multiple_of={args.pad_to_multiple_of}`: no row is padded then; set "
            "only one of them."
        )
    ignored = args.divergence not in (None, "jsd") and args.beta != BETAS.get(str(args.divergence), type(args).beta)
    if ignored and args.beta != type(args).beta:
        divergence = describe(args.divergence) if isinstance(args.divergence, Divergence) else repr(args.divergence)
        warnings.warn(
            f"`divergence={divergence}` decides the objective; `beta={args.beta}` is ignored: set only one.",
            stacklevel=4,
        )
    objective = args.build_divergence()
    if isinstance(objective, GeneralizedJSD) and not 0.05 <= objective.beta <= 0.95:
        warnings.warn(
            f"`beta={args.beta}` is close to an end of (0, 1), where the generalised JSD and its gradient vanish; "
            "it does not become a KL there. For a KL set `divergence='forward_kl'` or 'reverse_kl'.",
            stacklevel=4,
        )


def check_divergence(divergence: Any) -> None:
    """Checks that a value is a divergence, the name of one, or `None`.

    Raises:
        ValueError: It is something else; the message lists the names.
    """
    if isinstance(divergence, type) and issubclass(divergence, Divergence):
        raise ValueError(f"`divergence={divergence.__name__}` is a class: pass an object, `{divergence.__name__}()`.")
    own = callable(divergence) or callable(getattr(divergence, "value", None))
    if own and not isinstance(divergence, Divergence):
        raise ValueError(
            f"`divergence` is a {type(divergence).__name__}: expected an object of a class derived from "
            "`trl_opsd.losses.Divergence`, whose method `value` computes it from two log-probabilities, one number for "
            f"each token (docs/extending.md); or a name, one of {', '.join(map(repr, DIVERGENCES))}."
        )
    if not isinstance(divergence, Divergence):
        one_of("divergence", divergence, (None, *DIVERGENCES))


def _check_settings(args: DistillationConfig) -> None:
    """Refuses settings that are out of range, and shapes that a divergence cannot have."""
    for name in ("skew", "alpha"):
        between(name, getattr(args, name), 0.0, 1.0)
    in_range("position_discount", args.position_discount, 0.0, 1.0, open_below=True)
    for name in ("kl_clip", "vllm_importance_sampling_clip_max", "student_temperature", "teacher_temperature"):
        if getattr(args, name) is not None:
            above(name, getattr(args, name), 0.0)
    if args.top_k_teacher is not None:
        at_least_one("top_k_teacher", args.top_k_teacher)


def check_shapes(args: DistillationConfig, divergence: Divergence) -> None:
    """Refuses options that a divergence cannot have.

    A policy gradient is that of the distribution which the tokens were drawn from, and no other token tells of them.

    Raises:
        ValueError: The divergence is one of sampled tokens, and they are not drawn from the student's distribution in
            the loss; or `kl_clip` is set, and its entries are not known.
    """
    check_clip(args.kl_clip, divergence)
    if not isinstance(divergence, SampledReverseKL):
        return
    for name, plain in {**_PLAIN, "student_temperature": (args.temperature, None)}.items():
        if (value := getattr(args, name)) not in plain:
            raise ValueError(f"`{name}={value!r}` {_NOT_DRAWN}")
    check_drawn(args.generation_kwargs or {}, args.temperature, "generation_kwargs={{{name!r}: {value!r}}}")


def check_drawn(options: Mapping[str, Any], temperature: float, shown: str) -> None:
    """Refuses options of `generate` or an engine with which tokens are not drawn from the student's distribution.

    Args:
        options (`Mapping[str, Any]`):
            The options, by their names there.
        temperature (`float`):
            That of the student in the loss.
        shown (`str`):
            How an option is written where it was set; a format of `name` and `value`.

    Raises:
        ValueError: One may change which token is drawn.
    """
    plain = {**_PLAIN_IN_GENERATE, "temperature": (temperature,)}
    for name, value in options.items():
        if name not in _CHANGE_NO_CHOICE and value not in plain.get(name, (None,)):
            raise ValueError(f"`{shown.format(name=name, value=value)}` {_NOT_DRAWN}")


def temperatures_in_words(student: float, teacher: float) -> str:
    """The temperatures of the loss, for a reader."""
    if student == teacher:
        return f"temperature {student:g}"
    return f"temperature {student:g} (student) and {teacher:g} (teacher)"


def shape_in_words(args: DistillationConfig) -> str:
    """What is done to the divergence of tokens, for a reader, with a comma before it."""
    clip = "" if args.kl_clip is None else f", each entry clipped at {args.kl_clip:g} nats"
    discount = args.position_discount
    discounted = "" if discount == 1 else f", each token counted {discount:g} times the one before it"
    rewarded = f", plus {args.reward_weight:g} times the policy gradient of rewards" if args.reward_weight else ""
    given = f", plus {args.sft_weight:g} times -log p of the dataset's completions" if args.sft_weight else ""
    given = given if args.lmbda < 1 else ""
    selection = args.build_selection()
    selected = "" if selection is None else f", {selection}"
    return f"{clip}{discounted}{selected}{rewarded}{given}"


def unread_objective(args: DistillationConfig, divergence: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """Options that the objective does not read, and why; `divergence` overrides that of the options."""
    chosen = args.divergence if divergence is None else divergence
    for name, readers in READ.items():
        if chosen not in readers:
            why = "is an object" if isinstance(chosen, Divergence) else f"is {chosen!r}"
            yield (name,), f"`divergence` {why}"
    if args.token_selection is None:
        yield ("token_fraction",), "`token_selection` is not set"
    elif args.token_fraction == 1:
        yield ("token_selection",), "`token_fraction` is 1"
