"""The options of transformers that locate a teacher's checkpoint."""

from __future__ import annotations

from typing import Any

from trl_opsd.config import OPSDConfig

LOCATION_OPTIONS = ("revision", "trust_remote_code", "token", "cache_dir", "subfolder", "local_files_only")
"""Options for loading a model that also apply to its config and tokenizer."""


def location(args: OPSDConfig) -> dict[str, Any]:
    """Those of these options that are set for teachers."""
    asked = {
        "revision": args.teacher_model_revision,
        "trust_remote_code": args.teacher_trust_remote_code,
        **(args.teacher_model_init_kwargs or {}),
    }
    return {name: asked[name] for name in LOCATION_OPTIONS if asked.get(name) is not None}
