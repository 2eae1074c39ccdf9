"""Targets on disk, as a trainer sees them: what they were made for, and whether those of all rows are there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object
from datasets import Dataset
from tqdm import tqdm

from trl_opsd.methods.rows import BatchRow
from trl_opsd.parallel.rng import preserved_rng
from trl_opsd.teacher.stored import StoredTeacher
from trl_opsd.teacher.teachers import Teachers
from trl_opsd.types.rollout import images_of

if TYPE_CHECKING:
    from trl_opsd.trainer import OPSDTrainer

_ROWS = 64
"""Rows that are tokenized at a time."""


def made_for(host: OPSDTrainer) -> dict[str, str]:
    """What decides the tokens that teachers read, beside the rows."""
    args, tokenizer = host.args, host.processing_class
    values: dict[str, Any] = {
        "tokenizer": [type(tokenizer).__name__, *sorted(tokenizer.get_vocab().items(), key=lambda one: one[1])],
        "chat_template": tokenizer.chat_template,
        "chat_template_kwargs": args.chat_template_kwargs,
        "teacher_chat_template_kwargs": args.teacher_chat_template_kwargs,
        "teacher_prompt_template": args.teacher_prompt_template,
    }
    return {
        name: "none" if not value else f"sha256 {hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]}"
        for name, value in values.items()
    }


def check_made_for(host: OPSDTrainer, teachers: Teachers) -> None:
    """Refuses targets that were made for another tokenizer or template."""
    described = next((one.described for one in teachers.values() if isinstance(one, StoredTeacher)), None)
    if described is not None and (lines := described.differences(made_for(host))):
        raise ValueError(
            f"`teacher_targets={host.args.teacher_targets!r}` was written for another run:\n"
            + "\n".join(lines)
            + "\nRestore these, or write the targets again, to another folder."
        )


def can_look_up(host: OPSDTrainer) -> bool:
    """Whether it is known before a training what teachers will read: of a stream, or a batch's outcome, it is not."""
    return not host.teaching.readers.intake.rewrites and isinstance(host.train_dataset, Dataset)


def missing_rows(host: OPSDTrainer, dataset: Dataset) -> list[int]:
    """The numbers of rows whose completion in the dataset has no targets in the store of its teacher. Collective."""
    accelerator = host.accelerator
    mine = range(accelerator.process_index, len(dataset), accelerator.num_processes)
    found = []
    with preserved_rng(accelerator.device):
        bar = tqdm(range(0, len(mine), _ROWS), desc="Looking up targets", delay=5, leave=False)
        for start in bar:
            numbers = list(mine[start : start + _ROWS])
            rows = host.teaching.read_rows([dataset[number] for number in numbers])
            found += [numbers[row] for row in _missing(host, rows)]
    return sorted(gather_object(found))


def _missing(host: OPSDTrainer, rows: Sequence[BatchRow]) -> list[int]:
    prompt_ids = host.prompt_ids_of(rows)
    completions = [host.given_completion(row, ids) for row, ids in zip(rows, prompt_ids, strict=True)]
    rollout = replace(host.padded(prompt_ids, completions), images=images_of(rows))
    read = host.teaching.prompts.read(rollout, rows)
    return host.teaching.teachers.missing(read, [row.request.teacher for row in rows])


def check_rows(host: OPSDTrainer) -> None:
    """Refuses a dataset with a completion that has no targets. Collective."""
    if host.args.teacher_targets is None or not can_look_up(host):
        return
    if missing := missing_rows(host, host.train_dataset):
        raise ValueError(
            f"`teacher_targets={host.args.teacher_targets!r}` has no targets for {len(missing)} of "
            f"{len(host.train_dataset)} rows, the first of which is row {missing[0]} of train_dataset: run "
            "`trl-opsd targets` with these rows, which adds what is missing; or is the prompt, the completion or "
            "`max_completion_length` another one than then?"
        )
