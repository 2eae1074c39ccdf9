"""The objective in words, for the banner and the model card."""

from __future__ import annotations

from trl_opsd._compat.trl import DistillationConfig


def temperatures_in_words(student: float, teacher: float) -> str:
    """The temperatures of the loss."""
    if student == teacher:
        return f"temperature {student:g}"
    return f"temperature {student:g} (student) and {teacher:g} (teacher)"


def shape_in_words(args: DistillationConfig) -> str:
    """What is done to the divergence of tokens, and what is added to it, with a comma before it."""
    selection = args.build_selection()
    given = args.sft_weight and args.lmbda < 1
    parts = (
        args.kl_clip is not None and f"each entry clipped at {args.kl_clip:g} nats",
        args.position_discount != 1 and f"each token counted {args.position_discount:g} times the one before it",
        selection,
        args.reward_weight and f"plus {args.reward_weight:g} times the policy gradient of rewards",
        given and f"plus {args.sft_weight:g} times -log p of the dataset's completions",
    )
    return "".join(f", {part}" for part in parts if part)
