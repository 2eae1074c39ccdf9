"""Targets on disk, as a trainer sees them: what they were made for, and whether those of all rows are there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object
from datasets import Dataset
from tqdm import tqdm

from trl_opsd.methods.rows import BatchRow
from trl_opsd.parallel.rng import preserved_rng
from trl_opsd.teacher.stored import Store, StoredTeacher, keys_of
from trl_opsd.teacher.teachers import Teachers
from trl_opsd.types import Rollout
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


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """A line for each thing that is another now than it was."""
    names = sorted({*then, *now})
    pairs = {name: (then.get(name), now.get(name)) for name in names}
    return "".join(
        f"\n  {name}: {there!r} there, {here!r} here" for name, (there, here) in pairs.items() if there != here
    )


def store_of(teachers: Teachers) -> Store | None:
    """The targets on disk that stand for the teachers of a run, if any."""
    return next((one.store for one in teachers.values() if isinstance(one, StoredTeacher)), None)


def check_made_for(host: OPSDTrainer, teachers: Teachers) -> None:
    """Refuses targets that were made for another tokenizer or template."""
    if (store := store_of(teachers)) and (lines := differences(store.header["made_for"], made_for(host))):
        raise ValueError(
            f"`teacher_targets={host.args.teacher_targets!r}` was written for another run:{lines}\nRestore these, or "
            "write the targets again, to another folder."
        )


def can_look_up(host: OPSDTrainer) -> bool:
    """Whether it is known before a training what teachers will read: of a stream, or a batch's outcome, it is not."""
    return not host.teaching.readers.intake.rewrites and isinstance(host.train_dataset, Dataset)


def read_by_teachers(host: OPSDTrainer, rollout: Rollout, rows: Sequence[BatchRow]) -> dict[str, Rollout]:
    """What frozen teachers read: their prompts, under `""`, and what methods have them read beside."""
    beside = {name: one for name, one in host.methods.references(rollout, rows).items() if name != "origin"}
    return {"": host.teaching.prompts.read(rollout, rows), **beside}


def missing(store: Store, read: Mapping[str, Rollout], rows: Sequence[BatchRow]) -> list[int]:
    """The numbers of the rows with a completion that lack targets of something that their teachers read."""
    names = [row.request.teacher for row in rows]
    found = set()
    for one in read.values():
        known = [each in store.rows for each in zip(names, keys_of(one), strict=True)]
        found |= {row for row, ids in enumerate(one.completion_lists()) if ids and not known[row]}
    return sorted(found)


def missing_rows(host: OPSDTrainer, store: Store) -> list[int]:
    """The numbers of rows of the dataset whose completion there lacks targets. Collective."""
    accelerator, dataset = host.accelerator, host.train_dataset
    mine = range(accelerator.process_index, len(dataset), accelerator.num_processes)
    found = []
    with preserved_rng(accelerator.device):
        for start in tqdm(range(0, len(mine), _ROWS), desc="Looking up targets", delay=5, leave=False):
            numbers = list(mine[start : start + _ROWS])
            rows = host.teaching.read_rows([dataset[number] for number in numbers])
            prompt_ids = host.prompt_ids_of(rows)
            completions = [host.given_completion(*one) for one in zip(rows, prompt_ids, strict=True)]
            rollout = replace(host.padded(prompt_ids, completions), images=images_of(rows))
            found += [numbers[row] for row in missing(store, read_by_teachers(host, rollout, rows), rows)]
    return sorted(gather_object(found))


def check_rows(host: OPSDTrainer) -> None:
    """Refuses a dataset with a completion that has no targets. Collective."""
    store = store_of(host.teachers)
    if store is not None and can_look_up(host) and (found := missing_rows(host, store)):
        raise ValueError(
            f"`teacher_targets={host.args.teacher_targets!r}` has no targets for {len(found)} of "
            f"{len(host.train_dataset)} rows, the first of which is row {found[0]} of train_dataset: run "
            "`trl-opsd targets` with these rows, which adds what is missing; or is the prompt, the completion or "
            "`max_completion_length` another one than then?"
        )
