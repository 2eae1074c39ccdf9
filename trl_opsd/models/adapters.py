"""An adapter at a path or model id: the base that its config names, and whether a teacher can use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from trl_opsd._compat.peft import (
    CausalLM,
    read_config,
    reads_prompts,
    rewrites_base,
    with_adapter,
)
from trl_opsd.models.checks import language_config, place_of

CONFIG = "adapter_config.json"
"""File in which PEFT describes an adapter."""
_WEIGHTS = "adapter_model.safetensors"
_QUOTED = 400
"""Characters of an error that are quoted."""
_MERGE = (
    "Merge it (`AutoPeftModelForCausalLM.from_pretrained(path).merge_and_unload().save_pretrained(folder)`), and pass "
    "that folder."
)


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that is not loaded yet."""

    path: str
    config: Any
    """PEFT's config of it."""
    loading: Mapping[str, Any]
    """Options that say where it is."""

    @property
    def base(self) -> str:
        """The path or model id of its base."""
        return str(self.config.base_model_name_or_path)

    @property
    def loading_of_base(self) -> dict[str, Any]:
        """Options that say where its base is: its own, but for those that name a place in its repository."""
        own = {"subfolder": None, "revision": getattr(self.config, "revision", None)}
        return {name: one for name, one in {**self.loading, **own}.items() if one is not None}

    def check(self, called: str) -> None:
        """Refuses an adapter that cannot teach, or whose base cannot be found."""
        config, wrong = self.config, None
        replicates, biases = getattr(config, "layer_replication", None), getattr(config, "bias", "none") != "none"
        if reads_prompts(config):
            wrong = "it acts through prompts, which a teacher computes without: use LoRA."
        elif rewrites_base(config) or replicates or biases:
            wrong = f"it changes its base, which others share. {_MERGE}"
        if wrong is not None:
            raise ValueError(f"`{called}={self.path!r}`: {wrong}")
        language_config(self.base, f"{self.path}/{CONFIG}: base_model_name_or_path", self.loading_of_base)

    def put_on(self, model: CausalLM, name: str) -> CausalLM:
        """Puts it into the layers of its base under a name, beside others, and makes it the active one."""
        try:
            # No pickle, which PEFT would take as well.
            file = cached_file(self.path, _WEIGHTS, **place_of(self.loading))
            return with_adapter(model, self.config, Path(file or ""), name)
        except (OSError, ValueError, LookupError, RuntimeError) as error:  # no file, other layers, shapes or options
            raise ValueError(
                f"The adapter {self.path!r}, on its base {self.base!r}: {' '.join(str(error).split())[:_QUOTED]}. Name "
                f"the right base in its {CONFIG}, or save the adapter again. If both are right, its weights cannot be "
                f"used beside those of others. {_MERGE}"
            ) from error


def adapter_at(path: Any, loading: Mapping[str, Any]) -> Adapter | None:
    """The adapter at a path or model id; `None` if there is none, or if it is no path."""
    if not isinstance(path, str):
        return None
    place = place_of(loading)
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    try:
        found = cached_file(path, CONFIG, **place, **quiet)
    except (OSError, ValueError):  # neither a folder nor the form of a model id
        return None
    if found is None:
        return None
    try:
        config = read_config(Path(found).parent)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{found} cannot be read ({type(error).__name__}: {error}): save the adapter again."
        ) from error
    return Adapter(path, config, dict(loading))
