"""Surveys the rows of a dataset as they are stored, column by column: their shapes, their sizes, and a digest.

Rows of one shape have text, numbers, lists and `None` in the same places, and the same roles, so that one of them
represents all in a check of their form. No row becomes a Python object, so a million rows take about a second.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

Numbers: TypeAlias = np.ndarray
"""One number per row, or per value of a column."""

_BY_VALUE = ("role", "type", "teacher", "environment")
"""Fields whose text is part of the shape; of other text only whether it is empty or blank."""
_ROWS = 10_000
"""Rows surveyed at once."""


def has_transform(dataset: Any) -> bool:
    """Whether rows are computed when they are read, by `Dataset.set_transform`."""
    return bool(dataset.format["type"] == "custom")


@dataclass(frozen=True, slots=True)
class Survey:
    """The shape and the size of each row."""

    shapes: Numbers
    """[rows], 64-bit hashes."""
    sizes: Mapping[str, Numbers]
    """By column, [rows]: an upper bound of the UTF-8 bytes of all its texts after NFC normalization."""
    shape_of_row: Numbers = field(init=False)
    """[rows], index of the row's shape, in order of first occurrence."""
    first_of_each_shape: Numbers = field(init=False)
    """[shapes], first row of each shape."""

    def __post_init__(self) -> None:
        encoded = pa.array(self.shapes).dictionary_encode()
        shape_of_row = encoded.indices.to_numpy()
        firsts = np.zeros(len(encoded.dictionary), np.int64)
        firsts[shape_of_row[::-1]] = np.arange(len(shape_of_row))[::-1]  # the last assignment wins
        object.__setattr__(self, "shape_of_row", shape_of_row)
        object.__setattr__(self, "first_of_each_shape", firsts)

    @classmethod
    def of(cls, dataset: Dataset, columns: Collection[str]) -> Survey | None:
        """Surveys those of the columns that the dataset has; `None` if its rows are not read as they are stored."""
        names = sorted(set(columns) & set(dataset.column_names))
        if has_transform(dataset) or not all(_is_known(dataset.data.schema.field(name).type) for name in names):
            return None
        table, rows = _stored(dataset, names)
        if rows is not None and len(rows) < len(table) // 10:  # otherwise surveying all is faster than taking rows
            table, rows = table.take(rows), None
        shapes, sizes = np.zeros(len(table), np.uint64), {name: np.zeros(len(table), np.int64) for name in names}
        for start in range(0, len(table), _ROWS):
            part = slice(start, start + _ROWS)
            for name in names:
                shape, sizes[name][part] = _summed(table.column(name).slice(start, _ROWS).combine_chunks(), name)
                # Wraps around at 64 bits, as hashes may.
                shapes[part] += shape * _hash(name)
        survey = cls(shapes, sizes)
        return survey if rows is None else survey.select(rows)

    def select(self, rows: Numbers) -> Survey:
        """The survey of these rows alone."""
        return Survey(self.shapes[rows], {name: sizes[rows] for name, sizes in self.sizes.items()})

    def size_of(self, columns: Collection[str]) -> Numbers:
        """[rows], the bytes of these columns together."""
        return sum((self.sizes[name] for name in columns if name in self.sizes), np.zeros(len(self.shapes), np.int64))


def _stored(dataset: Dataset, names: list[str]) -> tuple[pa.Table, Numbers | None]:
    """The columns as stored, and the numbers of the selected rows in their order; `None` for all of them."""
    # `select` and `shuffle` only record indices; the table itself keeps all rows.
    rows = dataset._indices
    return dataset.data.table.select(names), None if rows is None else rows.column(0).to_numpy()


def _tables(dataset: Dataset, names: list[str]) -> Iterator[pa.Table]:
    """The columns as stored, in the order of the rows, a part at a time."""
    # `take`, because `Dataset.iter` over shuffled rows makes a chunk of each row and takes ten times as long.
    table, rows = _stored(dataset, names)
    for start in range(0, len(dataset), _ROWS):
        yield table.slice(start, _ROWS) if rows is None else table.take(rows[start : start + _ROWS])


# ---- Shapes and sizes ------------------------------------------------------------------------------------------------


def _is_known(kind: pa.DataType) -> bool:
    """Whether values are read as they are stored, and of a kind whose shape is known here."""
    if pa.types.is_struct(kind):
        return all(_is_known(field.type) for field in kind)
    if _is_list(kind):
        return _is_known(kind.value_type)
    known = _is_text(kind) or _is_bytes(kind) or _is_number(kind)
    return known or pa.types.is_null(kind) or pa.types.is_boolean(kind)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _is_bytes(kind: pa.DataType) -> bool:
    """Whether values are files, as of images, whose contents are not surveyed."""
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def _summed(values: pa.Array, name: str) -> tuple[Numbers, Numbers]:
    """Shape and size of each value of a column, or of a field, of this name."""
    # A shape is a sum of random numbers for what a value contains, each multiplied by an odd one for its place.
    kind = values.type
    shapes: Numbers = np.full(len(values), _hash("valid"))
    sizes: Numbers = np.zeros(len(values), np.int64)
    if pa.types.is_struct(kind):
        for place in range(kind.num_fields):
            part = kind.field(place).name
            shape, size = _summed(pc.struct_field(values, place), part)
            shapes, sizes = shapes + shape * _hash(part), sizes + size
    elif _is_list(kind):
        lengths = _integers(pc.list_value_length(values))
        # All lists of a column are one flat array; each list's sum is a difference of two running sums.
        ends = np.cumsum(lengths)
        starts = ends - lengths
        shape, size = _summed(pc.list_flatten(values), name)
        places = _places(lengths.max(initial=0))[np.arange(len(shape)) - np.repeat(starts, lengths)]
        shapes = shapes + lengths.astype(np.uint64) * _hash("length") + _per_list(shape * places, starts, ends)
        sizes = _per_list(size, starts, ends)
    elif _is_text(kind):
        sizes = _integers(pc.binary_length(values))
        if name in _BY_VALUE:
            shapes = shapes + _by_value(values)
        else:
            state = (sizes > 0).astype(np.int64) + _integers(pc.utf8_is_space(values))
            shapes = shapes + np.array([_hash("empty"), _hash("text"), _hash("blank")])[state]
        # NFC makes a non-ASCII character at most three times as long.
        if not pc.all(pc.string_is_ascii(values)).as_py():
            sizes = sizes + 4 * (sizes - _integers(pc.utf8_length(values)))
    elif _is_number(kind):
        sizes = sizes + 32  # more than any number has as text
    # A missing value has the shape 0, whatever its kind.
    if values.null_count:
        shapes = np.where(values.is_valid().to_numpy(zero_copy_only=False), shapes, np.uint64(0))
    return shapes, sizes


def _integers(values: pa.Array) -> Numbers:
    """As integers, with 0 for `None`."""
    return pc.fill_null(pc.cast(values, pa.int64()), 0).to_numpy(zero_copy_only=False)


def _by_value(texts: pa.Array) -> Numbers:
    codes = texts.dictionary_encode()
    hashes = np.array([*map(_hash, codes.dictionary.to_pylist()), 0], np.uint64)
    return hashes[_integers(pc.fill_null(codes.indices, len(hashes) - 1))]


def _per_list(values: Numbers, starts: Numbers, ends: Numbers) -> Numbers:
    """The sum over the values of each list."""
    sums: Numbers = np.zeros(len(values) + 1, values.dtype)
    np.cumsum(values, out=sums[1:])
    return sums[ends] - sums[starts]


@cache
def _hash(text: str) -> np.uint64:
    """An odd pseudo-random number for a text."""
    return np.uint64(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) | 1)


def _places(number: int) -> Numbers:
    """An odd pseudo-random number for each place in a list."""
    return np.random.default_rng(0).integers(2**64, size=number, dtype=np.uint64) | np.uint64(1)


# ---- Digest ----------------------------------------------------------------------------------------------------------


def digest(dataset: Dataset, columns: Collection[str] | None) -> str:
    """A digest of these columns (all if `None`) and the order of rows, independent of how they are stored."""
    names = sorted(name for name in dataset.column_names if columns is None or name in columns)
    streams: defaultdict[str, Any] = defaultdict(hashlib.sha256)
    for table in _tables(dataset, names):
        for name in names:
            _feed(streams, name, table.column(name).combine_chunks())
    parts = [(path, streams[path].hexdigest()) for path in sorted(streams)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _feed(streams: defaultdict[str, Any], path: str, values: pa.Array) -> None:
    """Adds values to the hash streams below a path, independent of where a table is cut."""
    kind = values.type
    # Streams by path, so that the digest depends on contents alone, and not on chunks or storage types.
    streams[f"{path} is valid"].update(values.is_valid().to_numpy(zero_copy_only=False))
    if pa.types.is_struct(kind):
        for place in range(kind.num_fields):
            _feed(streams, f"{path}.{kind.field(place).name}", pc.struct_field(values, place))
    elif _is_list(kind):
        streams[f"{path} lengths"].update(_integers(pc.list_value_length(values)))
        _feed(streams, f"{path}[]", pc.list_flatten(values))
    elif _is_text(kind) or _is_bytes(kind):
        streams[f"{path} lengths"].update(_integers(pc.binary_length(values)))
        streams[f"{path} text"].update(_characters(values.drop_null()))
    else:
        lines = (json.dumps(value, default=str) + "\n" for value in values.to_pylist())
        streams[f"{path} values"].update("".join(lines).encode())


def _characters(texts: pa.Array) -> memoryview:
    """The bytes of all texts, joined, without a copy."""
    _, offsets, data = texts.buffers()
    if not len(texts) or data is None:
        return memoryview(b"")
    is_large = pa.types.is_large_string(texts.type) or pa.types.is_large_binary(texts.type)
    kind = np.int64 if is_large else np.int32
    ends = np.frombuffer(offsets, kind, len(texts) + 1, texts.offset * np.dtype(kind).itemsize)
    return memoryview(data)[ends[0] : ends[-1]]
