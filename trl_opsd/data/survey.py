"""Surveys the rows of a dataset as they are stored, column by column: their shapes, their sizes, and a digest.

Rows of one shape have text, numbers, lists and `None` in the same places, and the same roles, so that one of them
represents all in a check of their form. No row becomes a Python object, so a million rows take about a second.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
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


@dataclass(frozen=True)
class Survey:
    """The shape and the size of each row."""

    shapes: Numbers
    """[rows], 64-bit hashes."""
    sizes: Mapping[str, Numbers]
    """By column, [rows]: an upper bound of the UTF-8 bytes of all its texts after NFC normalization."""

    @cached_property
    def first_alike(self) -> Numbers:
        """[rows], the first row of the same shape."""
        _, firsts, shape_of_row = np.unique(self.shapes, return_index=True, return_inverse=True)
        return firsts[shape_of_row]

    @cached_property
    def first_of_each_shape(self) -> Numbers:
        """[shapes], in order."""
        return np.flatnonzero(self.first_alike == np.arange(len(self.shapes)))

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
            for name in names:
                for path, values, owners, places in _inside(
                    table.column(name).slice(start, _ROWS), name, np.array([_hash(name)])
                ):
                    states, lengths = _seen(values, path.replace("[]", "").rpartition(".")[2])
                    # Wraps around at 64 bits, as hashes may.
                    np.add.at(shapes, start + owners, states * places)
                    np.add.at(sizes[name], start + owners, lengths)
        survey = cls(shapes, sizes)
        return survey if rows is None else survey.select(rows)

    def select(self, rows: Numbers) -> Survey:
        """The survey of these rows alone."""
        return Survey(self.shapes[rows], {name: sizes[rows] for name, sizes in self.sizes.items()})

    def size_of(self, columns: Collection[str]) -> Numbers:
        """[rows], the bytes of these columns together."""
        return sum((self.sizes[name] for name in columns if name in self.sizes), np.zeros(len(self.shapes), np.int64))


def digest(dataset: Dataset, columns: Collection[str] | None) -> str:
    """A digest of these columns (all if `None`) and the order of rows, independent of how they are stored."""
    names = sorted(name for name in dataset.column_names if columns is None or name in columns)
    table, rows = _stored(dataset, names)
    # A stream per path, so that the digest depends on contents alone, and not on chunks or storage types.
    streams: defaultdict[str, Any] = defaultdict(hashlib.sha256)
    for start in range(0, len(dataset), _ROWS):
        # `take`, because `Dataset.iter` over shuffled rows makes a chunk of each row and takes ten times as long.
        part = table.slice(start, _ROWS) if rows is None else table.take(rows[start : start + _ROWS])
        for name in names:
            for path, values, _, _ in _inside(part.column(name), name):
                streams[f"{path} is valid"].update(values.is_valid().to_numpy(zero_copy_only=False))
                if _is_list(values.type):
                    streams[f"{path} lengths"].update(_integers(pc.list_value_length(values)))
                elif _is_text(values.type):
                    texts = values.drop_null().cast(pa.large_binary())
                    streams[f"{path} lengths"].update(_integers(pc.binary_length(values)))
                    _, offsets, data = texts.buffers()
                    ends = np.frombuffer(offsets or b"", np.int64)[texts.offset :][: len(texts) + 1]
                    if len(texts):  # all bytes at once, without a copy
                        streams[f"{path} text"].update(memoryview(data or b"")[ends[0] : ends[-1]])
                elif not pa.types.is_struct(values.type):
                    lines = (json.dumps(value, default=str) + "\n" for value in values.to_pylist())
                    streams[f"{path} values"].update("".join(lines).encode())
    parts = [(path, streams[path].hexdigest()) for path in sorted(streams)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _stored(dataset: Dataset, names: list[str]) -> tuple[pa.Table, Numbers | None]:
    """The columns as stored, and the numbers of the selected rows in their order; `None` for all of them."""
    # `select` and `shuffle` only record indices; the table itself keeps all rows.
    rows = dataset._indices
    return dataset.data.table.select(names), None if rows is None else rows.column(0).to_numpy()


def _inside(
    column: pa.ChunkedArray, name: str, number: Numbers | None = None
) -> Iterator[tuple[str, pa.Array, Numbers, Any]]:
    """A column, and each array within it: its path, its values, and of each value the row and a number for its place.

    Numbers are random and odd, so that a sum of products with them tells places apart; without a first there are none.
    """
    rows = np.arange(len(column))
    found: list[tuple[str, pa.Array, Numbers, Any]] = [(name, column.combine_chunks(), rows, number)]
    for path, values, owners, places in found:  # which grows
        yield path, values, owners, places
        if pa.types.is_struct(values.type):
            for place, field in enumerate(values.type):
                part = f"{path}.{field.name}"
                within = None if places is None else places * _hash(part)
                found.append((part, pc.struct_field(values, place), owners, within))
        elif _is_list(values.type):
            lengths = _integers(pc.list_value_length(values))
            within = None
            if places is not None:
                place_in_list = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
                random = np.random.default_rng(0).integers(2**64, size=lengths.max(initial=0), dtype=np.uint64)
                within = np.broadcast_to(places, len(values)).repeat(lengths) * (random | np.uint64(1))[place_in_list]
            found.append((f"{path}[]", pc.list_flatten(values), owners.repeat(lengths), within))


def _seen(values: pa.Array, name: str) -> tuple[Numbers, Numbers]:
    """Of each value a number for what its shape has of it, and its size, without the values within it."""
    states, sizes = np.full(len(values), _hash("valid")), np.zeros(len(values), np.int64)
    if _is_list(values.type):
        states = states + _integers(pc.list_value_length(values)).astype(np.uint64) * _hash("length")
    elif _is_text(values.type) and not _is_bytes(values.type):
        sizes = _integers(pc.binary_length(values))
        if name in _BY_VALUE:
            codes = values.dictionary_encode()
            hashes = np.array([*map(_hash, codes.dictionary.to_pylist()), 0], np.uint64)
            states = states + hashes[_integers(pc.fill_null(codes.indices, len(hashes) - 1))]
        else:
            kinds = (sizes > 0).astype(np.int64) + _integers(pc.utf8_is_space(values))
            states = states + np.array([_hash("empty"), _hash("text"), _hash("blank")])[kinds]
        # NFC makes a non-ASCII character at most three times as long.
        if not pc.all(pc.string_is_ascii(values)).as_py():
            sizes = sizes + 4 * (sizes - _integers(pc.utf8_length(values)))
    elif _is_number(values.type):
        sizes = sizes + 32  # more than any number has as text
    if values.null_count:  # a missing value has the shape 0, whatever its kind
        states = np.where(values.is_valid().to_numpy(zero_copy_only=False), states, np.uint64(0))
    return states, sizes


def _is_known(kind: pa.DataType) -> bool:
    """Whether values are read as they are stored, and of a kind whose shape is known here."""
    if pa.types.is_struct(kind) or _is_list(kind):
        return all(_is_known(kind.field(number).type) for number in range(kind.num_fields))
    return _is_text(kind) or _is_number(kind) or pa.types.is_null(kind) or pa.types.is_boolean(kind)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _is_text(kind: pa.DataType) -> bool:
    """Whether values are text, or files, as of images, whose contents are not surveyed."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or _is_bytes(kind)


def _is_bytes(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def _integers(values: pa.Array) -> Numbers:
    """As integers, with 0 for `None`."""
    return pc.fill_null(pc.cast(values, pa.int64()), 0).to_numpy(zero_copy_only=False)


@cache
def _hash(text: str) -> np.uint64:
    """An odd pseudo-random number for a text."""
    return np.uint64(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) | 1)
