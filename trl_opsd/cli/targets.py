"""Writes the targets of a dataset's completions to disk."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from tqdm import tqdm

from trl_opsd._compat.sharding import gathered_head, is_split_model
from trl_opsd.cli.options import OptionParser
from trl_opsd.cli.train import build, leave_nothing, read
from trl_opsd.loop import fingerprint
from trl_opsd.loop.fingerprint import check_same, made_for
from trl_opsd.losses.streamed import streamed_known
from trl_opsd.models.backbone import preserved_mode, shape_of
from trl_opsd.options.rules import refuse, shown
from trl_opsd.parallel.precision import autocast
from trl_opsd.teacher.stored import HEADER, Store, keys_of, said_of_head, write_header
from trl_opsd.trainer import OPSDTrainer
from trl_opsd.types import LazyLogits, OutputHead
from trl_opsd.types.known import TokenHead
from trl_opsd.types.rollout import images_of
from trl_opsd.types.targets import kept_by_row

PART_BYTES = 256_000_000
"""Targets that are written at once, and lost where a run is killed."""


def main(arguments: Sequence[str], parser: OptionParser, *, out: str, top_k: int | None = None) -> OPSDTrainer:
    """Writes to a folder what a training on these completions would learn from; returns the trainer that wrote it."""
    folder = Path(out)
    fixed = ["--lmbda", "0", "--seq_kd", "False", "--num_generations", "1", "--use_vllm", "False"]
    given, task = read([*arguments, *fixed], parser)
    given.config.sglang_server_url = None
    with TemporaryDirectory(prefix="trl_opsd-targets-") as nowhere:
        leave_nothing(given.config, nowhere)
        trainer = build(given, task)
        store = write_targets(trainer, folder, top_k)
    if trainer.accelerator.is_main_process:
        gigabytes = sum(path.stat().st_size for path in folder.glob("part-*")) / 1e9
        print(
            f"{len(store.rows)} rows, {gigabytes:.3g} GB. To train on them, set these options, and remove the teacher:"
            f"\n  teacher_targets: {folder}\n  lmbda: 0\n  seq_kd: false"
        )
    return trainer


def write_targets(trainer: OPSDTrainer, folder: Path, top_k: int | None = None) -> Store:
    """Has the teachers score each completion of the training dataset, and writes their targets. Collective.

    Rows are scored in the batches of the first epoch, as they would be in a training, and those that it leaves out at
    the end. A batch that is there already is not scored, so a run that was killed goes on where it ended.

    Args:
        trainer ([`OPSDTrainer`]):
            One with `lmbda=0`.
        folder (`Path`):
            Where they are written.
        top_k (`int`, *optional*):
            Keeps log-probabilities of the token that follows and of so many likeliest ones, at temperature 1, and the
            mass of all others. When `None`, hidden states, for every objective.

    Raises:
        ValueError: The folder has other targets, or the teachers change.
    """
    _wrap(trainer)
    header, heads = _header(trainer, top_k)
    with gathered_head(*heads.values()):  # by all processes together
        if trainer.accelerator.is_main_process and not (folder / HEADER).exists():
            write_header(folder, header, heads)
    with preserved_mode(trainer.model):
        trainer.model.train()
        trainer.methods.begin()
        for batches in (_batches(trainer), _left_over(trainer)):
            trainer.accelerator.wait_for_everyone()
            store = Store(folder)  # with what other processes have written
            check_same(folder, *({**one["made_for"], **one["teachers"]} for one in (store.header, header)))
            for inputs in batches:
                _teach(trainer, store, inputs, top_k)
                store.flush(PART_BYTES)
            store.flush()
    trainer.accelerator.wait_for_everyone()
    store = Store(folder)
    if trainer.accelerator.is_main_process:
        store.end()
    trainer.accelerator.wait_for_everyone()  # a training of the same processes may read them at once
    return store


def _teach(trainer: OPSDTrainer, store: Store, inputs: Sequence[dict[str, Any]], top_k: int | None) -> None:
    """Adds the targets of a batch to the store, unless all processes have theirs. Collective."""
    rollout, rows = trainer.completed(inputs)
    taught = [number for number, row in enumerate(rows) if row.prompt_weight] or [0]
    rows = [rows[number] for number in taught]
    # Every token, so that any choice of tokens finds them.
    rollout = replace(rollout, weights=rollout.completion_mask.float(), lengths=rollout.measured()).select(taught)
    rollout, names = replace(rollout, images=images_of(rows)), [row.request.teacher for row in rows]
    own, beside = trainer.teaching.prompts.read(rollout, rows), trainer.methods.references(rollout, rows)
    beside = {name: one for name, one in beside.items() if name != "origin"}  # which stays with the student
    texts = {  # by what they are read as
        kind: [*zip(names, keys_of(one), one.prompt_lists(), one.completion_lists(), strict=True)]
        for kind, one in {"": own, **beside}.items()
    }
    is_known = all(row[:2] in store.rows or not row[-1] for each in texts.values() for row in each)
    if all(gather_object([is_known])):
        return
    # The whole batch, as in a training: rows that are scored together are rounded alike.
    with autocast(trainer.accelerator):
        found = kept_by_row(trainer.teachers.targets(own, names, beside), own.weights)
    device, vocabulary = trainer.accelerator.device, trainer.teaching.vocabulary
    heads = {name: one.head for name, one in trainer.teachers.items() if top_k and not isinstance(one.head, TokenHead)}
    with gathered_head(*heads.values()):
        for kind, states in {"": found.rows or (), **found.reference_states}.items():
            for (name, key, prompt, completion), row in zip(texts[kind], states, strict=True):
                kept = row.hidden
                if top_k and completion and name in heads:
                    model = LazyLogits(kept.to(device), heads[name].to(device))
                    kept = streamed_known(
                        model, torch.tensor(completion).to(device), top_k, vocabulary=vocabulary
                    ).packed()
                if completion:
                    store.add(name, key, prompt, completion, kept)


def _wrap(trainer: OPSDTrainer) -> None:
    """Has DeepSpeed or FSDP2 wrap a student that they have sharded, as an evaluation does, so that it can run."""
    if is_split_model(trainer.model):
        trainer.predict(trainer.train_dataset.select(range(trainer.accelerator.num_processes)))


# ---- Rows -----------------------------------------------------------------------------------------------------------


def _batches(trainer: OPSDTrainer) -> Iterator[list[dict[str, Any]]]:
    """This process's generation batches of an epoch, as a training reads them; of a stream, `max_steps` of them."""
    loader, calls = trainer.get_train_dataloader(), trainer.args.gradient_accumulation_steps
    steps = len(loader) // calls if isinstance(trainer.train_dataset, Dataset) else trainer.args.max_steps
    rows = iter(loader)
    for _ in tqdm(range(steps), desc="teach", unit="batch", disable=not trainer.show_progress):
        if batch := [row for call in islice(rows, calls) for row in call]:
            yield batch


def _left_over(trainer: OPSDTrainer) -> Iterator[list[dict[str, Any]]]:
    """All rows, as no whole batch of the epoch had the last ones, and a batch that is known is not scored."""
    dataset, accelerator = trainer.train_dataset, trainer.accelerator
    if not isinstance(dataset, Dataset):
        return
    each = trainer.args.per_device_train_batch_size
    starts = range(0, len(dataset), each * accelerator.num_processes)
    for start in tqdm(starts, desc="look up", unit="batch", disable=not trainer.show_progress):
        # As many batches for each process; one that has no rows left gets another's.
        mine = range(len(dataset))[start + accelerator.process_index * each :][:each]
        yield [dataset[number] for number in mine or [0]]


# ---- What is written ------------------------------------------------------------------------------------------------


def _header(trainer: OPSDTrainer, top_k: int | None) -> tuple[dict[str, Any], dict[str, OutputHead]]:
    """What targets are made for and of, and the head of each teacher's; of the likeliest tokens with `top_k`."""
    args, teachers = trainer.args, trainer.teachers
    changes = args.teacher_model_kind in ("ema", "live") or any(
        getattr(one, "student_k", 0) for one in teachers.values()
    )
    what = shown(args, "teacher_model_kind", "teacher_server_targets")
    why = "a folder keeps nothing that a student changes; set 'base' and 'teacher_top_k'"
    is_crossed = trainer.cross is not None, "A teacher with a tokenizer of its own", "a folder keeps shared tokens"
    refuse([(changes, what, why), is_crossed])
    now = fingerprint.of_teachers(teachers, args, trainer.base_samples)
    heads, said = {}, {}
    for name, teacher in teachers.items():
        head, what = teacher.head, now["teachers"][name]
        if top_k and not isinstance(head, TokenHead):
            vocabulary = trainer.teaching.vocabulary or shape_of(head)[0]
            # One more: the token that follows.
            head = TokenHead.sized(vocabulary, min(top_k, vocabulary) + 1, trainer.accelerator.device)
            what = f"{what}, top {top_k}"
        heads[name] = head
        said[name] = {
            "is": what,
            "weights": {part: one for part, one in now["teacher_weights"].items() if part in (name, f"head of {name}")},
            "context": teacher.context,
            "dtype": str(teacher.head.weight.dtype),
            "head": said_of_head(head),
        }
    return json.loads(json.dumps({"made_for": made_for(trainer), "teachers": said})), heads
