"""Formats the results of `tools/families.py` as a lab note."""

from __future__ import annotations

from collections import Counter

import transformers

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
    """The lab note.

    Args:
        found (`dict[str, dict[str, str]]`):
            Results by family and role.
        roles (`list[str]`):
            The roles, in the order of the columns.
    """
    built = {family: one for family, one in found.items() if not one["student"].startswith("not built")}
    sound = [family for family, one in built.items() if all(text.startswith("exact") for text in one.values())]
    slow = [family for family in sound if any("without a cache" in text for text in built[family].values())]
    unpadded = [family for family in sound if any("rows of one" in text for text in built[family].values())]
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
        "| family | " + " | ".join(roles) + " |",
        "|---|" + "---|" * len(roles),
        *(
            f"| {family} | {' | '.join(map(_cell, one.values()))} |"
            for family, one in built.items()
            if family not in sound
        ),
        "",
        f"Not built, at this size or because a package is not installed: {', '.join(sorted(set(found) - set(built)))}.",
        "",
    ]
    return "\n".join(lines)


def _cell(text: str) -> str:
    """A result without its figure, and with a short reason."""
    kind = text.split()[0]
    if kind == "exact":
        return "exact, no cache" if "cache" in text else "exact, unpadded" if "(" in text else "exact"
    for reason, short in REASONS.items():
        if reason in text:
            return f"refused: {short}"
    return text.replace("|", "/")[:200]
