"""Says in a few lines of JSON what a run learns and in which order, so that a resumed run can be held against it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from accelerate.logging import get_logger
from datasets import IterableDataset

from trl_opsd.config import OPSDConfig

logger = get_logger(__name__)

FILE = "opsd_fingerprint.json"
"""Where a checkpoint keeps it."""

OPTIONS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "generation_kwargs",
    "vllm_structured_outputs_regex",
    "max_completion_length",
    "max_tool_calling_iterations",
    "chat_template_kwargs",
    "teacher_model_kind",
    "teacher_prompt_template",
    "teacher_chat_template_kwargs",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "world_size",
    "seed",
    "shuffle_dataset",
)
"""Options that decide what is written, what the teacher reads, and which rows meet in a step."""

OF_AN_AVERAGE = ("teacher_update_rate", "teacher_sync_steps")
"""Options that mean something with `teacher_model_kind="ema"` only."""

Fingerprint: TypeAlias = dict[str, Any]
"""Values that JSON can hold, by the name a message gives them; an option by its own name."""


def fingerprint(args: OPSDConfig, **more: Any) -> Fingerprint:
    """The options that belong to it, and what else the caller knows, as they come back out of a file."""
    names = (*OPTIONS, *(OF_AN_AVERAGE if args.teacher_model_kind == "ema" else ()))
    values = {**more, **{name: getattr(args, name) for name in names}}
    return dict(json.loads(json.dumps(values, default=str)))


def describe_rows(dataset: Any, columns: Collection[str] | None) -> str:
    """The number of rows and a digest of their contents, the same on every machine and in every process.

    Args:
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`], *optional*):
            A stream cannot be read ahead and is only called one.
        columns (`Collection[str]`, *optional*):
            The columns somebody reads. When `None`, or when a transform makes the rows out of others: all of them.
    """
    if dataset is None or isinstance(dataset, IterableDataset):
        return "none" if dataset is None else "a stream"
    made_on_the_fly = dataset.format["type"] == "custom"
    dataset = dataset.with_format("arrow")  # as stored: what a column decodes to may not be the same thing twice
    if columns is not None and not made_on_the_fly:
        dataset = dataset.select_columns([name for name in dataset.column_names if name in columns])
    digest = hashlib.sha256()
    for table in dataset.iter(batch_size=1000):
        for row in table.to_pylist():
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return f"{len(dataset)} rows, sha256 {digest.hexdigest()[:16]}"


def write(folder: str | Path, now: Fingerprint) -> None:
    """Puts a fingerprint into a checkpoint."""
    (Path(folder) / FILE).write_text(json.dumps(now, indent=2) + "\n", encoding="utf-8")


def check(folder: str | Path, now: Fingerprint, accepted: Sequence[str] = ()) -> None:
    """Holds the fingerprint of a checkpoint against that of this run, before anything is loaded.

    Args:
        folder (`str` or `Path`):
            The checkpoint. One that TRL wrote has no fingerprint and is taken with a warning.
        now (`dict`):
            What this run learns.
        accepted (`Sequence[str]`, *optional*):
            Names that may differ; what does is a warning.

    Raises:
        ValueError: There is no such folder, its fingerprint cannot be read, or something else differs; the message
            lists all of it with both values.
    """
    path = Path(folder) / FILE
    if not path.parent.is_dir():
        raise ValueError(
            f"`resume_from_checkpoint={str(folder)!r}`: there is no such folder: pass one of a checkpoint."
        )
    if not path.is_file():
        logger.warning(
            f"{folder} has no {FILE}, because another trainer wrote it, or `save_only_model=True`: whether this run "
            "has the same objective and the same order of rows could not be checked."
        )
        return
    try:
        then = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError) as error:  # no JSON, or JSON of something else
        raise ValueError(f"{path} cannot be read ({error}): the checkpoint is damaged; resume from another.") from error
    differing = _differing(then, now)
    if refused := {name: line for name, line in differing.items() if name not in accepted}:
        raise ValueError(
            f"This run would not continue the one that wrote {folder}, these differ:\n"
            + "\n".join(refused.values())
            + f"\nSet them back, or go on with a changed run: `resume_with_changes={sorted(differing)}`."
        )
    if differing:
        logger.warning("Resuming with changes:\n" + "\n".join(differing.values()))


def _differing(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """A line with both values for each name that differs."""
    missing = "not recorded"
    return {
        name: f"  {name}: {then.get(name, missing)!r} in the checkpoint, {now.get(name, missing)!r} now"
        for name in sorted({*then, *now})
        if name not in then or name not in now or then[name] != now[name]
    }
