"""Names that `transformers` changed between the supported versions, as the installed one has them."""

from importlib.metadata import version

from packaging.version import Version

_INSTALLED = Version(version("transformers")).release
_OLDER = "gradient_checkpointing"

CACHE = "cache" if _INSTALLED >= (5, 24) else "past_key_values"
"""The key-value cache: an argument of forward passes and their preparation, and a field of their outputs."""
CHECKPOINTING = "activation_checkpointing" if _INSTALLED >= (5, 23) else _OLDER
"""An option of `TrainingArguments`, with `_kwargs` another; with `_enable` a method of models."""
ALIASES = {
    f"{name}{end}": f"{alias}{end}"
    for end in ("", "_kwargs")
    for name, alias in ((CHECKPOINTING, _OLDER), (_OLDER, CHECKPOINTING))
}
"""The other name of each renamed option, of which `transformers` reads one and TRL the other."""
