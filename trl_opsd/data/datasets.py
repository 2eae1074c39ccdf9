"""Datasets: the check of all rows before a training, and which process reads which row of a stream.

accelerate shards a map-style dataset by rows, but a `datasets` stream of several files by files. Files have unequal
lengths, and sharding by file ignores that TRL repeats the rows of a generation batch.
Form is checked on one row of each shape; of the others only those are tokenized that may be too long.
"""

from __future__ import annotations

import copy
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, final

import numpy as np
from accelerate.logging import get_logger
from datasets import Dataset, Features, Image, IterableDataset, LargeList, List
from torch.utils.data import Dataset as TorchRows
from torch.utils.data import IterableDataset as TorchStream
from tqdm.auto import tqdm

from trl_opsd.data.prompts import COLUMNS, Intake, Request, common_kind
from trl_opsd.data.readers import Reader
from trl_opsd.data.survey import Numbers, Survey, digest, has_transform

logger = get_logger(__name__)

AnyDataset: TypeAlias = Dataset | IterableDataset
EvalDatasets: TypeAlias = AnyDataset | dict[str, AnyDataset] | None


def columns_of(dataset: AnyDataset | None) -> list[str] | None:
    """The columns of the rows as they are read, after any transform; `None` if unknown."""
    if dataset is None:
        return None
    if isinstance(dataset, Dataset) and has_transform(dataset) and len(dataset):
        return list(dataset[0])
    names: list[str] | None = dataset.column_names
    return names


def by_name(eval_dataset: EvalDatasets) -> dict[str, AnyDataset | None]:
    """Evaluation datasets by their names in messages."""
    if isinstance(eval_dataset, dict):
        return {f"eval_dataset[{name!r}]": dataset for name, dataset in eval_dataset.items()}
    return {"eval_dataset": eval_dataset}


def describe_rows(dataset: Any, columns: Collection[str] | None) -> str:
    """The number of rows and a digest of their contents, identical on every machine; a stream is not read."""
    if dataset is None or isinstance(dataset, IterableDataset):
        return "none" if dataset is None else "a stream"
    # A transform may compute the rows from any column.
    found = digest(dataset, None if has_transform(dataset) else columns)
    return f"{len(dataset)} rows, digest {found[:16]}"


@final
class WholeStream(TorchStream):
    """All rows of a stream, in order, in every process, so that accelerate shards by rows instead of files."""

    def __init__(self, stream: IterableDataset, columns: Collection[str]) -> None:
        self._stream = stream
        self._columns = columns
        self.rows = self.digest = 0  # of this pass so far; the digest is a CRC-32 that processes compare

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, which determines the order of the next pass if the stream is shuffled."""
        self._stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.rows = self.digest = 0
        for row in self._stream:
            self.rows += 1
            # Cheap, and enough to notice processes that stream different rows.
            read = repr([comparable(row.get(name)) for name in self._columns])
            self.digest = zlib.crc32(read.encode(), self.digest)
            yield row
        if not self.rows:
            raise ValueError("the stream is empty: pass one with rows.")


@final
class Decoded(TorchRows):
    """The rows of a dataset; a row that repeats, in a batch or in the next, is decoded once.

    A row is read for each of its completions.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._last: dict[int, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, numbers: list[int]) -> list[dict[str, Any]]:
        """Rows by their numbers."""
        known = {number: self._last[number] for number in numbers if number in self._last}
        missing = [number for number in dict.fromkeys(numbers) if number not in known]
        self._last = known | dict(zip(missing, self._dataset.__getitems__(missing) if missing else (), strict=True))
        return [{**self._last[number]} for number in numbers]


def has_encoded_images(dataset: Any) -> bool:
    """Whether images are decoded when rows are read, other than by a transform, which may draw at random."""
    return (
        isinstance(dataset, Dataset) and not has_transform(dataset) and _undecoded(dataset.features) != dataset.features
    )


def comparable(value: Any) -> Any:
    """A value whose `repr` is the same in all processes: that of a PIL image has its address."""
    if isinstance(value, Mapping):
        return {name: comparable(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [comparable(one) for one in value]
    return (value.size, zlib.crc32(value.tobytes())) if hasattr(value, "tobytes") else value


_BATCH = 1000
"""Rows tokenized at once."""
_SOME = 20
"""First rows from which a warning generalises."""
_UNKNOWN = 1 << 40
"""Tokens of images that no processor counts without reading them."""
_FEW = 1000
"""Rows up to which no progress bar is shown."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A dataset, and what is known of its rows."""

    dataset: Any
    """A [`~datasets.Dataset`] or [`~datasets.IterableDataset`] whose columns have been checked."""
    where: str
    """Its name in messages."""
    survey: Survey | None
    """The shape and size of each row; `None` for a stream, or where only reading each row reveals them."""
    progress: bool
    """Whether to show progress bars."""
    has_images: bool | None = None
    """Whether a prompt has images; `None` where that is not known before rows are read."""
    student_sees: bool | None = None
    """Whether one of the student has."""

    @property
    def can_be_read_ahead(self) -> bool:
        """Whether rows can be read before a tokenizer is loaded: not a stream, nor a transform, which may need one."""
        return not (isinstance(self.dataset, IterableDataset) or has_transform(self.dataset))

    @property
    def one_of_each_shape(self) -> Numbers:
        """Row numbers that represent all in a check of their form: the first of each shape, in order."""
        return np.arange(len(self.dataset)) if self.survey is None else self.survey.first_of_each_shape

    def first_requests(self, intake: Intake) -> list[Request]:
        """Some rows, parsed; none of a stream or a transform."""
        if not self.can_be_read_ahead:
            return []
        return list(next(_requests(self, range(min(_SOME, len(self.dataset))), intake)).values())


def surveyed(datasets: Mapping[str, Any], args: Any, names: Collection[str] = ()) -> dict[str, Rows]:
    """The datasets that are there, each with the shapes and sizes of its rows, by what rows name in these columns."""
    columns = [name for name in COLUMNS if name != "teacher"] + [*names]
    progress = args.process_index == 0 and not args.disable_tqdm
    return {
        name: Rows(one, name, None if isinstance(one, IterableDataset) else Survey.of(one, columns), progress)
        for name, one in datasets.items()
        if one is not None
    }


def look_ahead(rows: Rows, intake: Intake) -> Rows:
    """Runs the checks that need no tokenizer, so that a bad row is refused before a model is loaded."""
    if not rows.can_be_read_ahead:
        return rows
    kind, of_student, of_teacher = None, False, False
    # One row of each shape has every form of error that the dataset has.
    for requests in _requests(rows, rows.one_of_each_shape, intake):
        kind = common_kind((request.student for request in requests.values()), kind)
        of_student |= any(one.student.has_images for one in requests.values())
        of_teacher |= any(one.of_teacher.has_images for one in requests.values())
    return replace(rows, has_images=of_student or of_teacher, student_sees=of_student)


def admit(rows: Rows, reader: Reader, dropped: Counter[str] | None) -> Rows:
    """Checks every row against the limits; with `dropped`, overlong prompts are removed and counted there instead."""
    if not reader.is_needed(columns_of(rows.dataset)):
        return rows
    if isinstance(rows.dataset, IterableDataset):
        # A stream is filtered while it is read, and otherwise checked when its rows are used.
        kept = rows.dataset if dropped is None else rows.dataset.filter(_stays(rows.where, reader, dropped))
        return replace(rows, dataset=kept, survey=None)
    # First one row of each shape, then those that their bytes do not prove to fit; only suspects are parsed again.
    numbers = rows.one_of_each_shape
    counts = _counted(rows, numbers, reader)
    if rows.survey is not None:
        context, completion = reader.strictest.context, reader.strictest.completion
        others = _may_exceed(rows, rows.survey, counts[:, 0], reader, None if context is None else context - completion)
        numbers, counts = np.append(numbers, others), np.append(counts, _counted(rows, others, reader), axis=0)
    by_number = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
    limits = reader.strictest
    suspects = [
        number
        for number, (tokens, largest_id) in sorted(by_number.items())
        if not (tokens and limits.fits(tokens) and largest_id < limits.vocabulary)
    ]
    gone = []
    for requests in _requests(rows, suspects, reader.of.intake):
        for number, request in requests.items():
            (tokens, largest_id), limits = by_number[number], reader.limits_of(request)
            if dropped is not None and not limits.fits(tokens):
                gone.append(number)
            else:
                limits.check(tokens, largest_id, reader.context_of(request).where)
    if dropped is None or not gone:
        return rows
    dropped[rows.where] += len(gone)
    left = np.delete(np.arange(len(rows.dataset)), gone)
    logger.warning(
        f"{len(gone)} prompts of {rows.where} leave no room for a completion of `max_completion_length` tokens in the "
        f"context and were dropped; {len(left)} are left."
    )
    survey = None if rows.survey is None else rows.survey.select(left)
    return replace(rows, dataset=rows.dataset.select(left), survey=survey)


def longest(rows: Rows, reader: Reader, enough: int) -> int | None:
    """Tokens of the longest prompt, at least `enough`; `None` where rows are known only when they are read."""
    if rows.survey is None:
        return None
    firsts = _counted(rows, rows.one_of_each_shape, reader)[:, 0]
    others = _counted(rows, _may_exceed(rows, rows.survey, firsts, reader, enough), reader)[:, 0]
    return max([enough, *firsts.tolist(), *others.tolist()])


def _may_exceed(rows: Rows, survey: Survey, first_tokens: Numbers, reader: Reader, most: int | None) -> Numbers:
    """Numbers of the rows, other than the first of each shape, that are not known to have at most that many tokens."""
    # A row has the tokens of the first of its shape, which has the same chat template around it, and those of its own
    # text, at most one per byte. Twice the bytes, as some templates write a message twice; a prompt that one writes
    # more often is refused when it is drawn.
    others = np.ones(len(survey.shapes), bool)
    if reader.is_bounded:
        if most is None:
            return np.zeros(0, np.int64)
        tokens = np.zeros(len(others), np.int64)
        tokens[survey.first_of_each_shape] = first_tokens
        tokens = tokens[survey.first_alike] + 2 * survey.size_of(reader.columns) * reader.copies
        if rows.has_images:  # counted by the headers of their files, and by those of the first
            images = _image_tokens(rows, reader)
            tokens = tokens + images - images[survey.first_alike] % _UNKNOWN
        others = tokens > most
    others[survey.first_of_each_shape] = False
    return np.flatnonzero(others)


def _image_tokens(rows: Rows, reader: Reader) -> Numbers:
    """[rows], tokens of the images of each row's prompt; very many where only the processor can tell."""
    requests = _requests(rows, range(len(rows.dataset)), reader.of.intake)
    counts = (reader.image_tokens(one) for some in requests for one in some.values())
    return np.array([_UNKNOWN if count is None else count for count in counts], np.int64)


def _counted(rows: Rows, numbers: Numbers, reader: Reader) -> Numbers:
    """[rows, 2]: the number of tokens of each row's prompt and their largest id."""
    counts, kind = [], None
    for requests in _requests(rows, numbers, reader.of.intake):
        prompts = [reader.context_of(request) for request in requests.values()]
        kind = reader.check_kind(prompts, kind)
        counts += [(len(ids), max(ids, default=0)) for ids in reader.token_ids(prompts)]
    return np.array(counts, np.int64).reshape(-1, 2)


def _requests(rows: Rows, numbers: Sequence[int] | Numbers, intake: Intake) -> Iterator[dict[int, Request]]:
    """These rows, parsed, by their numbers, a batch at a time."""
    read, hidden = rows.dataset, not rows.progress or len(numbers) <= _FEW
    if rows.can_be_read_ahead:  # else a transform may need other columns
        read_by = {*COLUMNS, *intake.names}
        read = as_stored(read.with_format(None).select_columns([one for one in read.column_names if one in read_by]))
    with tqdm(total=len(numbers), desc=f"Checking the prompts of {rows.where}", disable=hidden) as bar:
        for start in range(0, len(numbers), _BATCH):
            chosen = [int(number) for number in numbers[start : start + _BATCH]]
            batch = read[chosen]
            values = (dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True))
            yield {
                number: intake.read(row, f"row {number} of {rows.where}")
                for number, row in zip(chosen, values, strict=True)
            }
            bar.update(len(chosen))


def as_stored(dataset: Dataset) -> Dataset:
    """The dataset with images as bytes or paths, as they are stored: none is decoded."""
    found = copy.deepcopy(dataset)  # not of its table; a cast would write a new one
    found.info.features = Features(_undecoded(found.features))
    return found


def _undecoded(feature: Any) -> Any:
    if isinstance(feature, Mapping):
        return {name: _undecoded(one) for name, one in feature.items()}
    if isinstance(feature, List | LargeList):
        return replace(feature, feature=_undecoded(feature.feature))
    return replace(feature, decode=False) if isinstance(feature, Image) else feature


def _stays(where: str, reader: Reader, dropped: Counter[str]) -> Callable[[Any], bool]:
    """A filter for a stream, which keeps rows whose prompt fits, and counts and reports the others."""

    def stays(row: dict[str, Any]) -> bool:
        request = reader.of.intake.read(row, f"a row of the stream {where}")
        prompts = [reader.context_of(request)]
        reader.check_kind(prompts)
        fits = reader.limits_of(request).fits(len(reader.token_ids(prompts)[0]))
        if not fits:
            dropped[where] += 1
            logger.warning_once(
                f"{where} streams prompts that leave no room in the context for a completion of "
                "`max_completion_length` tokens; they are dropped (`trainer.dropped_prompts` has the count)."
            )
        return fits

    return stays
