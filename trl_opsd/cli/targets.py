"""Writes the targets of a run's completions to disk, and before that the completions, where the dataset has none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from shutil import disk_usage
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset, Features, List, Value, load_dataset
from torch import Tensor
from tqdm import tqdm

from trl_opsd import fingerprint
from trl_opsd._compat.sharding import gathered_head, is_split_model
from trl_opsd.cli.train.options import OptionParser
from trl_opsd.cli.train.script import build, leave_nothing, read
from trl_opsd.data.completions import COMPLETION, TOKENS
from trl_opsd.loop.stored import can_look_up, differences, made_for, missing, missing_rows, read_by_teachers
from trl_opsd.losses.streamed import streamed_known
from trl_opsd.models.backbone import preserved_mode, shape_of
from trl_opsd.options.rules import refuse, shown
from trl_opsd.parallel.precision import autocast
from trl_opsd.teacher.stored import HEADER, Store, keys_of, publish, write_header
from trl_opsd.trainer import OPSDTrainer
from trl_opsd.types import LazyLogits, OutputHead
from trl_opsd.types.known import TokenHead
from trl_opsd.types.rollout import images_of
from trl_opsd.types.targets import kept_by_row

COMPLETIONS = "completions"
"""Folder of generated completions beside their targets: a dataset for `dataset_name`."""
TOP_K = 64
"""Likeliest tokens that are kept of each position, where nothing else is said."""
PART_BYTES = 256_000_000
"""Targets that are written at once, and lost where a run is killed."""


def main(
    arguments: Sequence[str], parser: OptionParser, *, out: str, format: str = "states", top_k: int = TOP_K
) -> OPSDTrainer:
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
        store = write_targets(trainer, folder, format, top_k)
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
    if others := [path for path in _parts(folder) if not path.endswith(f"-of-{accelerator.num_processes}.parquet")]:
        raise ValueError(f"{others[0]} was written by another number of processes: use that, or another folder.")
    _wrap(trainer)
    with preserved_mode(trainer.model):
        trainer.model.train()
        for number, (inputs, count) in enumerate(_rows(trainer)):
            path = _part(trainer, folder, number)
            if all(gather_object([path.exists() or not count])):
                continue
            rows = trainer._batches.begin(inputs)
            written = trainer._generation.write(rows, trainer.prompt_ids_of(rows)).completions
            if count:
                _keep_completions(trainer, path, inputs[:count], written[:count])
    accelerator.wait_for_everyone()
    return load_dataset("parquet", data_files=_parts(folder), split="train")


def write_targets(trainer: OPSDTrainer, folder: Path, format: str = "states", top_k: int = TOP_K) -> Store:
    """Has the teachers score each completion of the training dataset, and writes their targets. Collective.

    Rows are scored in the batches of the first epoch, as they would be in a training, and those that it leaves out at
    the end. A batch that is there already is not scored, so a run that was killed goes on where it ended.

    Args:
        trainer ([`OPSDTrainer`]):
            One with `lmbda=0`.
        folder (`Path`):
            Where they are written.
        format (`str`, *optional*, defaults to `"states"`):
            `"states"`, for every objective; or `"topk"`, the log-probabilities of each token that follows and of the
            likeliest ones, at temperature 1, and the mass of all others.
        top_k (`int`, *optional*, defaults to 64):
            Of the latter, how many.

    Raises:
        ValueError: The folder has other targets, the teachers change, or the disk has no room for them.
    """
    _wrap(trainer)
    header, heads = _header(trainer, {"states": None, "topk": top_k}[format])
    with gathered_head(*heads.values()):  # by all processes together
        if trainer.accelerator.is_main_process and not (folder / HEADER).exists():
            write_header(folder, header, heads)
    store = _written(trainer, folder)
    if lines := differences(*({**one["made_for"], **one["teachers"]} for one in (store.header, header))):
        raise ValueError(f"{folder} has other targets:{lines}\nWrite to another folder.")
    with preserved_mode(trainer.model):
        trainer.model.train()
        trainer.methods.begin()
        for number, inputs in enumerate(_batches(trainer, "teach")):
            _teach(trainer, store, inputs)
            if number == 0:
                _check_room(store, len(inputs), trainer.train_dataset)
            store.flush(PART_BYTES)
        store.flush()
        if can_look_up(trainer):
            store = _written(trainer, folder)
            for inputs in _left_over(trainer, store):
                _teach(trainer, store, inputs)
            store.flush()
    store = _written(trainer, folder)
    if trainer.accelerator.is_main_process:
        store.end()
    return store


def _written(trainer: OPSDTrainer, folder: Path) -> Store:
    """What all processes have written. Collective."""
    trainer.accelerator.wait_for_everyone()
    return Store(folder)


def _teach(trainer: OPSDTrainer, store: Store, inputs: Sequence[dict[str, Any]]) -> None:
    """Adds the targets of a batch to the store, unless all processes have theirs. Collective."""
    rollout, rows = trainer._batches.completed(inputs)
    taught = [number for number, row in enumerate(rows) if row.prompt_weight] or [0]
    rows = [rows[number] for number in taught]
    # Every token, so that any choice of tokens finds them.
    rollout = replace(rollout, weights=rollout.completion_mask.float(), lengths=rollout.measured()).select(taught)
    read = read_by_teachers(trainer, replace(rollout, images=images_of(rows)), rows)
    if not any(gather_object([bool(missing(store, read, rows))])):
        return
    names, own = [row.request.teacher for row in rows], read.pop("")
    # The whole batch, as in a training: rows that are scored together are rounded alike.
    with autocast(trainer.accelerator):
        found = kept_by_row(trainer.teachers.targets(own, names, read), own.weights)
    states = [(own, found.rows or ()), *((one, found.reference_states[name]) for name, one in read.items())]
    said = {name: one["head"] for name, one in store.header["teachers"].items()}
    whole = {name: one.head for name, one in trainer.teachers.items() if not isinstance(one.head, TokenHead)}
    heads = {name: one for name, one in whole.items() if "known" in said[name]}
    with gathered_head(*heads.values()):
        for one, of_rows in states:
            texts = zip(names, keys_of(one), one.prompt_lists(), one.completion_lists(), of_rows, strict=True)
            for name, key, prompt, completion, row in texts:
                kept = row.hidden
                if name in heads:
                    kept = _likeliest(row.hidden, completion, heads[name], trainer.accelerator.device, **said[name])
                if completion:
                    store.add(name, key, prompt, completion, kept)


def _likeliest(
    states_CH: Tensor, ids: list[int], head: OutputHead, device: torch.device, vocabulary: int, known: int
) -> Tensor:
    model = LazyLogits(states_CH.to(device), head.to(device))
    return streamed_known(model, torch.tensor(ids, device=device), known - 1, vocabulary=vocabulary).packed()


def _wrap(trainer: OPSDTrainer) -> None:
    """Has DeepSpeed or FSDP2 wrap a student that they have sharded, as an evaluation does, so that it can run."""
    if is_split_model(trainer.model):
        trainer.predict(trainer.train_dataset.select(range(trainer.accelerator.num_processes)))


def _keep_completions(
    trainer: OPSDTrainer, path: Path, inputs: Sequence[dict[str, Any]], written: Sequence[list[int]]
) -> None:
    """Keeps dataset rows with these completions, token ids, in a file."""
    texts = trainer.processing_class.batch_decode(written, skip_special_tokens=True)
    kept = [_with_completion(*one) for one in zip(inputs, written, texts, strict=True)]
    publish(path, Dataset.from_list(kept, _features(trainer, kept[0])).to_parquet)


def _part(trainer: OPSDTrainer, folder: Path, number: int) -> Path:
    """The file of this process's completions of a batch."""
    accelerator = trainer.accelerator
    return folder / f"batch-{number:06d}-{accelerator.process_index}-of-{accelerator.num_processes}.parquet"


# ---- Rows -----------------------------------------------------------------------------------------------------------


def _batches(trainer: OPSDTrainer, doing: str) -> Iterator[list[dict[str, Any]]]:
    """This process's generation batches of an epoch, as a training reads them; of a stream, `max_steps` of them."""
    loader, calls = trainer.get_train_dataloader(), trainer.args.gradient_accumulation_steps
    steps = len(loader) // calls if isinstance(trainer.train_dataset, Dataset) else trainer.args.max_steps
    rows = iter(loader)
    for _ in tqdm(range(steps), desc=doing, unit="batch", disable=not trainer.show_progress):
        if batch := [row for call in islice(rows, calls) for row in call]:
            yield batch


def _rows(trainer: OPSDTrainer) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """The rows of a dataset in their order, `num_generations` times each, in batches of this process.

    The number is that of the rows to keep: each process gets as many batches, and none is empty.
    """
    args, dataset, accelerator = trainer.args, trainer.train_dataset, trainer.accelerator
    if not isinstance(dataset, Dataset):
        yield from ((rows, len(rows)) for rows in _batches(trainer, "complete"))
        return
    each = args.per_device_train_batch_size * args.gradient_accumulation_steps
    numbers = [number for number in range(len(dataset)) for _ in range(args.num_generations)]
    starts = range(0, len(numbers), each * accelerator.num_processes)
    for start in tqdm(starts, desc="complete", unit="batch", disable=not trainer.show_progress):
        mine = numbers[start + accelerator.process_index * each :][:each]
        yield [dataset[number] for number in mine or numbers[:1]], len(mine)


def _left_over(trainer: OPSDTrainer, store: Store) -> Iterator[list[dict[str, Any]]]:
    """The rows that no whole batch of an epoch had. Collective: each process gets as many."""
    accelerator, found = trainer.accelerator, missing_rows(trainer, store)
    each = trainer.args.per_device_train_batch_size
    for start in range(0, len(found), each * accelerator.num_processes):
        numbers = found[start + accelerator.process_index :: accelerator.num_processes][:each]
        yield [trainer.train_dataset[number] for number in numbers or found[:1]]


def _parts(folder: Path) -> list[str]:
    return sorted(map(str, folder.glob("*.parquet")))


_MESSAGES = List({"role": Value("string"), "content": Value("string")})


def _features(trainer: OPSDTrainer, row: dict[str, Any]) -> Features | None:
    """The types of the columns of rows with a completion; `None` where those of a stream are not known."""
    if not (known := trainer.train_dataset.features):
        return None
    of_text = Value("string") if isinstance(row[COMPLETION], str) else _MESSAGES
    return Features({name: known.get(name) for name in row} | {COMPLETION: of_text, TOKENS: List(Value("int64"))})


def _with_completion(row: dict[str, Any], ids: list[int], text: str) -> dict[str, Any]:
    completion = text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]
    return {**row, COMPLETION: completion, TOKENS: ids}


# ---- What is written ------------------------------------------------------------------------------------------------


def _header(trainer: OPSDTrainer, top_k: int | None) -> tuple[dict[str, Any], dict[str, OutputHead]]:
    """What targets are made for and of, with the head of each teacher's; of the likeliest tokens with `top_k`."""
    args, teachers = trainer.args, trainer.teachers
    known = {name for name, one in teachers.items() if isinstance(one.head, TokenHead)}
    refuse(
        [
            (
                args.teacher_model_kind in ("ema", "live"),
                shown(args, "teacher_model_kind"),
                "this teacher is another one in each step, so nothing of it can be kept; use 'base', or another",
            ),
            (args.cross_tokenizer, shown(args, "cross_tokenizer"), "a folder keeps no targets by byte"),
            (
                any(getattr(one, "student_k", 0) for one in teachers.values()),
                shown(args, "teacher_server_targets"),
                "the student's likeliest tokens change as it learns; set 'teacher_top_k'",
            ),
            (known and not top_k, f"The server of {sorted(known)} tells no hidden states", "write `--format topk`"),
        ]
    )
    now = fingerprint.of_teachers(teachers, args, trainer.base_samples)
    heads, said = {}, {}
    for name, teacher in teachers.items():
        head = teacher.head
        if top_k and name not in known:
            vocabulary = trainer.teaching.vocabulary or shape_of(head)[0]
            # One more: the token that follows.
            head = TokenHead.sized(vocabulary, min(top_k, vocabulary) + 1, trainer.accelerator.device)
        heads[name], (rows, width) = head, shape_of(head)
        said[name] = {
            "is": now["teachers"][name] + f", top {top_k}" * bool(top_k),
            "weights": {part: one for part, one in now["teacher_weights"].items() if part in (name, f"head of {name}")},
            "context": teacher.context,
            "dtype": str(teacher.head.weight.dtype),
            "head": {"vocabulary": rows, "known": width // 2}
            if top_k
            else {"scale": head.scale, "softcap": head.softcap},
        }
    return {"made_for": made_for(trainer), "teachers": said}, heads


def _check_room(store: Store, rows: int, dataset: Any) -> None:
    """Refuses to go on where the targets of all rows will not fit the disk, by those of the first batch."""
    total = len(dataset) if isinstance(dataset, Dataset) else 0
    needed, free = store.added_bytes * total / rows, disk_usage(store.folder).free
    if needed > free:
        raise ValueError(
            f"{store.folder}: the targets of {total} rows need about {needed / 1e9:.3g} GB, but the disk has "
            f"{free / 1e9:.3g}: use another, or `--format topk`."
        )
