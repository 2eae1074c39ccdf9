"""Writes the targets of a run's completions to disk, and before that the completions, where the dataset has none."""

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
from datasets import Dataset, Features, List, Value, load_dataset
from tqdm import tqdm

from trl_opsd._compat.sharding import gathered_head, is_split_model
from trl_opsd.cli.options import OptionParser
from trl_opsd.cli.train import build, leave_nothing, read
from trl_opsd.data.completions import COMPLETION, TOKENS
from trl_opsd.loop import fingerprint
from trl_opsd.loop.fingerprint import check_same, made_for
from trl_opsd.losses.streamed import streamed_known
from trl_opsd.models.backbone import preserved_mode, shape_of
from trl_opsd.options.rules import refuse, shown
from trl_opsd.parallel.precision import autocast
from trl_opsd.teacher.stored import HEADER, Store, keys_of, publish, said_of_head, write_header
from trl_opsd.trainer import OPSDTrainer
from trl_opsd.types import LazyLogits, OutputHead
from trl_opsd.types.known import TokenHead
from trl_opsd.types.rollout import images_of
from trl_opsd.types.targets import kept_by_row

COMPLETIONS = "completions"
"""Folder of generated completions beside their targets: a dataset for `dataset_name`."""
PART_BYTES = 256_000_000
"""Targets that are written at once, and lost where a run is killed."""


def main(arguments: Sequence[str], parser: OptionParser, *, out: str, top_k: int | None = None) -> OPSDTrainer:
    """Writes to a folder what a training with these arguments would learn from; returns the trainer that wrote it.

    With `lmbda` below 1 that is of the completions of the dataset, else of completions that are generated once.
    """
    folder = Path(out)
    given, task = read(arguments, parser)
    generates = given.config.lmbda == 1 or given.config.seq_kd
    dataset = None
    with TemporaryDirectory(prefix="trl_opsd-targets-") as nowhere:
        if generates:
            leave_nothing(given.config, nowhere)
            generator = build(given, task)
            dataset = write_completions(generator, folder / COMPLETIONS)
            del generator
        fixed = ["--lmbda", "0", "--seq_kd", "False", "--num_generations", "1", "--use_vllm", "False"]
        given, task = read([*arguments, *fixed], parser)
        leave_nothing(given.config, nowhere)
        given.config.sglang_server_url = None
        trainer = build(given, task, dataset)
        store = write_targets(trainer, folder, top_k)
    if trainer.accelerator.is_main_process:
        options: dict[str, Any] = {"teacher_targets": folder, "lmbda": 0, "seq_kd": "false"}
        if generates:
            options = {"dataset_name": folder / COMPLETIONS, "num_generations": 1, **options}
        gigabytes = sum(path.stat().st_size for path in folder.glob("part-*")) / 1e9
        print(
            f"{len(store.rows)} rows, {gigabytes:.3g} GB. To train on them, set these options, and remove the teacher:"
        )
        print("\n".join(f"  {name}: {value}" for name, value in options.items()))
    return trainer


def write_completions(trainer: OPSDTrainer, folder: Path) -> Dataset:
    """Generates a completion for each row of the training dataset, and keeps them as a dataset. Collective.

    A batch is kept when it is whole, so a run that was killed goes on with the next.
    """
    if trainer.tools:
        raise ValueError("Completions with `tools` have several turns, and are not kept: remove `tools`.")
    accelerator = trainer.accelerator
    folder.mkdir(parents=True, exist_ok=True)
    mine = f"{accelerator.process_index}-of-{accelerator.num_processes}.parquet"
    if others := [one for one in folder.glob("*.parquet") if not one.name.endswith(mine.split("-", 1)[1])]:
        raise ValueError(f"{others[0]} was written by another number of processes: use that, or another folder.")
    _wrap(trainer)
    with preserved_mode(trainer.model):
        trainer.model.train()
        for number, (inputs, count) in enumerate(_to_complete(trainer)):
            path = folder / f"batch-{number:06d}-{mine}"
            if all(gather_object([path.exists() or not count])):
                continue
            written = trainer.generated(inputs)
            if count:
                publish(path, _completed(trainer, inputs[:count], written[:count]).to_parquet)
    accelerator.wait_for_everyone()
    return load_dataset("parquet", data_files=sorted(map(str, folder.glob("*.parquet"))), split="train")


def _completed(trainer: OPSDTrainer, rows: list[dict[str, Any]], written: list[list[int]]) -> Dataset:
    """Rows of the dataset with these completions, token ids."""
    known = trainer.train_dataset.features  # of a stream they may be unknown
    kept = Dataset.from_list(rows, known and Features({name: known[name] for name in rows[0]}))
    texts: list[Any] = trainer.processing_class.batch_decode(written, skip_special_tokens=True)
    if not isinstance(rows[0]["prompt"], str):
        texts = [[{"role": "assistant", "content": text}] for text in texts]
    kept = kept.remove_columns([one for one in (COMPLETION, TOKENS) if one in kept.column_names])
    return kept.add_column(COMPLETION, texts).add_column(TOKENS, written, feature=List(Value("int64")))


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
        for batches in (_batches(trainer, "teach"), _left_over(trainer)):
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


def _batches(trainer: OPSDTrainer, doing: str) -> Iterator[list[dict[str, Any]]]:
    """This process's generation batches of an epoch, as a training reads them; of a stream, `max_steps` of them."""
    loader, calls = trainer.get_train_dataloader(), trainer.args.gradient_accumulation_steps
    steps = len(loader) // calls if isinstance(trainer.train_dataset, Dataset) else trainer.args.max_steps
    rows = iter(loader)
    for _ in tqdm(range(steps), desc=doing, unit="batch", disable=not trainer.show_progress):
        if batch := [row for call in islice(rows, calls) for row in call]:
            yield batch


def _to_complete(trainer: OPSDTrainer) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """The rows of a dataset in their order, `num_generations` times each; and of each batch, how many to keep."""
    args, dataset = trainer.args, trainer.train_dataset
    if not isinstance(dataset, Dataset):
        yield from ((rows, len(rows)) for rows in _batches(trainer, "complete"))
        return
    numbers = [number for number in range(len(dataset)) for _ in range(args.num_generations)]
    yield from _in_order(
        trainer, numbers, args.per_device_train_batch_size * args.gradient_accumulation_steps, "complete"
    )


def _in_order(
    trainer: OPSDTrainer, numbers: Sequence[int], each: int, doing: str
) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """These rows of the dataset, `each` at a time, in as many batches for each process.

    The number beside is that of the rows that are this process's; where it has fewer, it gets others' too.
    """
    dataset, accelerator = trainer.train_dataset, trainer.accelerator
    starts = range(0, len(numbers), each * accelerator.num_processes)
    for start in tqdm(starts, desc=doing, unit="batch", disable=not trainer.show_progress):
        mine = numbers[start + accelerator.process_index * each :][:each]
        # As many as the first process has, since numbers of rows are gathered.
        yield [dataset[number] for number in [*mine, *numbers][: min(each, len(numbers) - start)]], len(mine)


def _left_over(trainer: OPSDTrainer) -> Iterator[list[dict[str, Any]]]:
    """All rows, as no whole batch of the epoch had the last ones, and a batch that is known is not scored."""
    if isinstance(trainer.train_dataset, Dataset):
        numbers, each = range(len(trainer.train_dataset)), trainer.args.per_device_train_batch_size
        yield from (rows for rows, _ in _in_order(trainer, numbers, each, "look up"))


# ---- What is written ------------------------------------------------------------------------------------------------


def _header(trainer: OPSDTrainer, top_k: int | None) -> tuple[dict[str, Any], dict[str, OutputHead]]:
    """What targets are made for and of, and the head of each teacher's; of the likeliest tokens with `top_k`."""
    args, teachers = trainer.args, trainer.teachers
    changes = args.teacher_model_kind in ("ema", "live") or any(
        getattr(one, "student_k", 0) for one in teachers.values()
    )
    what = shown(args, "teacher_model_kind", "teacher_server_targets")
    why = "stored targets cannot follow the student; set 'base' and 'teacher_top_k'"
    is_crossed = trainer.cross is not None, "A teacher with a tokenizer of its own", "its targets cannot be stored"
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
