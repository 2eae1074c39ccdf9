"""Writes the targets of a run's completions to disk, and before that the completions, where the dataset has none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from shutil import disk_usage
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from accelerate.utils import gather_object
from datasets import Dataset, Features, List, Value, load_dataset
from tqdm import tqdm

from trl_opsd import fingerprint
from trl_opsd._compat.sharding import gathered_head, is_split_model
from trl_opsd.cli.train.options import OptionParser
from trl_opsd.cli.train.script import build, leave_nothing, read
from trl_opsd.data.completions import COMPLETION, TOKENS
from trl_opsd.loop.stored import can_look_up, made_for, missing_rows
from trl_opsd.models.backbone import preserved_mode, shape_of
from trl_opsd.teacher.base import Teacher
from trl_opsd.teacher.store import HEADER, Described, Store, Writer, publish, said_of_head
from trl_opsd.teacher.stored import StoredTeacher, WrittenTeacher
from trl_opsd.trainer import OPSDTrainer
from trl_opsd.types import OutputHead
from trl_opsd.types.known import TokenHead

COMPLETIONS = "completions"
"""Folder of generated completions beside their targets: a dataset for `dataset_name`."""
FORMATS = ("states", "topk")
TOP_K = 64
"""Likeliest tokens that are kept of each position, where nothing else is said."""


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
        seconds = perf_counter()
        writers = write_targets(trainer, folder, format, top_k)
        written = sum(gather_object([writer.tokens for writer in writers]))
        speed = written / (perf_counter() - seconds)
    if trainer.accelerator.is_main_process:
        print(_in_words(folder, [writer.store for writer in writers], speed, generates))
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


def write_targets(trainer: OPSDTrainer, folder: Path, format: str = "states", top_k: int = TOP_K) -> list[Writer]:
    """Has the teachers score each completion of the training dataset, and keeps their targets. Collective.

    Rows are scored in the batches of the first epoch, as they would be in a training, and those that it leaves out at
    the end. Rows that are there already are not scored, so a run that was killed goes on where it ended.

    Args:
        trainer ([`OPSDTrainer`]):
            One with `lmbda=0`; its teachers keep their targets from now on.
        folder (`Path`):
            Where they are kept.
        format (`str`, *optional*, defaults to `"states"`):
            `"states"`, for every objective; or `"topk"`, the log-probabilities of each token that follows and of the
            likeliest ones, at temperature 1, and the mass of all others.
        top_k (`int`, *optional*, defaults to 64):
            Of the latter, how many.

    Returns:
        `list[Writer]`: of each teacher, with its store and the number of tokens that this process added.

    Raises:
        ValueError: The folder has other targets, the teachers change, or the disk has no room for them.
        OSError: The disk is full; what was written is kept.
    """
    _wrap(trainer)
    writers = _write(trainer, folder, format, top_k)
    with preserved_mode(trainer.model):
        trainer.model.train()
        trainer.methods.begin()
        for number, inputs in enumerate(_batches(trainer, "teach")):
            trainer.score(inputs)
            if number == 0:
                _check_room(folder, writers, len(inputs), trainer.train_dataset)
        _flush(trainer, writers)
        if can_look_up(trainer):
            for inputs in _left_over(trainer):
                trainer.score(inputs)
            _flush(trainer, writers)
    return writers


def _write(trainer: OPSDTrainer, folder: Path, format: str, top_k: int) -> list[Writer]:
    """Has the teachers of a trainer write their targets. Collective."""
    process, teachers = trainer.accelerator.process_index, trainer.teachers
    described, heads = _described(trainer, format, top_k)
    is_new = not any(gather_object([(folder / HEADER).exists()]))
    if not is_new:
        _check_same(folder, described)
    for name, head in heads.items() if is_new else ():
        with gathered_head(head):  # by all processes together
            if process == 0:
                Store(described.folder_of(folder, name)).write_head(head)
    if is_new and process == 0:
        described.write(folder)
    trainer.accelerator.wait_for_everyone()
    writers = []
    for name, teacher in teachers.items():
        writers.append(Writer(Store(described.folder_of(folder, name)), process))
        stored = StoredTeacher(writers[-1].store, heads[name], described, name)
        written = WrittenTeacher(teacher, stored, writers[-1])
        if teachers.origin is teacher:  # read in other contexts, too
            teachers.origin = written
        teachers[name] = written
    return writers


def _flush(trainer: OPSDTrainer, writers: Iterable[Writer]) -> None:
    """Writes the rows that wait, and reads those of other processes. Collective."""
    for writer in writers:
        writer.flush()
    trainer.accelerator.wait_for_everyone()
    for writer in writers:
        writer.store.refresh()


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
    publish(path, Dataset.from_list(kept, _features(trainer, kept[0])).to_parquet, trainer.accelerator.process_index)


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


def _left_over(trainer: OPSDTrainer) -> Iterator[list[dict[str, Any]]]:
    """The rows that no whole batch of an epoch had. Collective: each process gets as many."""
    accelerator, dataset = trainer.accelerator, trainer.train_dataset
    missing = missing_rows(trainer, dataset)
    each = trainer.args.per_device_train_batch_size
    for start in range(0, len(missing), each * accelerator.num_processes):
        numbers = missing[start + accelerator.process_index :: accelerator.num_processes][:each]
        yield [dataset[number] for number in numbers or missing[:1]]


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


def _described(trainer: OPSDTrainer, format: str, top_k: int) -> tuple[Described, dict[str, OutputHead]]:
    """The header, and the head of each teacher's targets."""
    args, teachers = trainer.args, trainer.teachers
    if format not in FORMATS:
        raise ValueError(f"The format of targets is {format!r}: expected one of {', '.join(FORMATS)}.")
    if args.teacher_model_kind in ("ema", "live"):
        raise ValueError(
            f"`teacher_model_kind={args.teacher_model_kind!r}`: this teacher is another one in each step, so nothing "
            "of it can be kept: use 'base', or another teacher."
        )
    now = fingerprint.of_teachers(teachers, args, trainer.base_samples)
    heads, said = {}, {}
    for name, teacher in teachers.items():
        heads[name] = _kept_head(trainer, name, teacher, format, top_k)
        known = f", top {top_k}" * (format == "topk")
        said[name] = {
            "is": now["teachers"][name] + known,
            "weights": {part: one for part, one in now["teacher_weights"].items() if part in (name, f"head of {name}")},
            "context": teacher.context,
            "dtype": str(teacher.head.weight.dtype),
            "head": said_of_head(heads[name]),
        }
    versions = {name: version(name) for name in ("trl_opsd", "torch", "transformers")}
    return Described(format, top_k if format == "topk" else None, made_for(trainer), versions, said), heads


def _kept_head(trainer: OPSDTrainer, name: str, teacher: Teacher, format: str, top_k: int) -> OutputHead:
    """The head of the targets that are kept of a teacher; `ValueError` where it has none of that format."""
    if trainer.cross is not None:
        raise ValueError(
            "`cross_tokenizer`: a folder keeps what a teacher says of tokens, and these models share none."
        )
    if getattr(teacher, "student_k", 0):
        raise ValueError(
            f"The server of {name!r} scores the student's likeliest tokens, which change as the student learns: set "
            "`teacher_server_targets='teacher_top_k'`."
        )
    if isinstance(teacher.head, TokenHead):
        if format == "states":
            raise ValueError(f"The server of {name!r} tells no hidden states: write `--format topk`.")
        return teacher.head
    if format == "states":
        return teacher.head
    vocabulary = trainer.teaching.vocabulary or shape_of(teacher.head)[0]
    # One more: the token that follows.
    return TokenHead.sized(vocabulary, min(top_k, vocabulary) + 1, trainer.accelerator.device)


def _check_same(folder: Path, now: Described) -> None:
    """Refuses to add to targets of another kind, or of other teachers."""
    then = Described.at(folder)
    lines = then.differences(now.made_for)
    for name in ("format", "top_k", "teachers"):
        before, after = getattr(then, name), getattr(now, name)
        lines += [f"  {name}: {before} there, {after} here"] * (before != after)
    if lines:
        raise ValueError(f"{folder} has other targets:\n" + "\n".join(lines) + "\nWrite to another folder.")


def _check_room(folder: Path, writers: Iterable[Writer], rows: int, dataset: Any) -> None:
    """Refuses to go on where the targets of all rows will not fit the disk, by those of the first batch."""
    total = len(dataset) if isinstance(dataset, Dataset) else 0
    needed, free = sum(one.waiting_bytes for one in writers) * total / rows, disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"{folder}: the targets of {total} rows need about {needed / 1e9:.3g} GB, but the disk has "
            f"{free / 1e9:.3g}: use another, or `--format topk`."
        )


def _in_words(folder: Path, stores: Sequence[Store], speed: float, generates: bool) -> str:
    """What was written, and how to train on it."""
    tokens, rows = sum(one.tokens for one in stores), sum(len(one.rows) for one in stores)
    nbytes = sum(path.stat().st_size for one in stores for path in one.folder.glob("shard-*"))
    options = {"teacher_targets": folder, "lmbda": 0, "seq_kd": "false"}
    if generates:
        options = {"dataset_name": folder / COMPLETIONS, "num_generations": 1, **options}
    return "\n".join(
        [
            f"{rows} rows, {tokens} tokens: {nbytes / 1e9:.3g} GB, {nbytes / max(tokens, 1):.0f} bytes per token; "
            f"{speed:.0f} tokens per second were added.",
            "To train on them, set these options, and remove the teacher:",
            *(f"  {name}: {value}" for name, value in options.items()),
        ]
    )
