"""Names that `transformers` has changed between the supported versions, as the installed one has them."""

from importlib.metadata import version

from packaging.version import Version

_INSTALLED = Version(version("transformers")).release
_OLDER = "gradient_checkpointing"

CACHE = "cache" if _INSTALLED >= (5, 24) else "past_key_values"
"""Keys and values: an argument of forward passes and of what prepares them, and a field of their outputs."""
CHECKPOINTING = "activation_checkpointing" if _INSTALLED >= (5, 23) else _OLDER
"""An option of `TrainingArguments`; with `_kwargs` another, and with `_enable` a method of models."""
ALIASES = {
    f"{name}{end}": f"{alias}{end}"
    for end in ("", "_kwargs")
    for name, alias in ((CHECKPOINTING, _OLDER), (_OLDER, CHECKPOINTING))
}
"""The other name of each option that has two, of which `transformers` reads one, and TRL the other."""
