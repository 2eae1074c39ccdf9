"""Surveys the rows of a dataset as they are stored, column by column: their shapes, their sizes, and a digest.

Rows of one shape have text, numbers, lists and `None` in the same places, and the same roles, so that one of them
represents all in a check of their form. No row becomes a Python object, so a million rows take about a second.
"""

from __future__ import annotations

import hashlib
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
_ROWS = 1_000
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
        shapes, sizes = np.zeros(len(dataset), np.uint64), {name: np.zeros(len(dataset), np.int64) for name in names}
        start = 0
        for batch in _batches(dataset, names):
            part = slice(start, start := start + len(batch))
            for name in names:
                forms, sizes[name][part] = _seen(batch[name], name)
                shapes[part] += forms * _hash(name)  # wraps around at 64 bits, as hashes may
        return cls(shapes, sizes)

    def select(self, rows: Numbers) -> Survey:
        """The survey of these rows alone."""
        return Survey(self.shapes[rows], {name: sizes[rows] for name, sizes in self.sizes.items()})

    def size_of(self, columns: Collection[str]) -> Numbers:
        """[rows], the bytes of these columns together."""
        return sum((self.sizes[name] for name in columns if name in self.sizes), np.zeros(len(self.shapes), np.int64))


def digest(dataset: Dataset, columns: Collection[str] | None) -> str:
    """A digest of these columns (all if `None`) and the order of rows, independent of chunks and selections."""
    names = sorted(name for name in dataset.column_names if columns is None or name in columns)
    types = [dataset.data.schema.field(name).type for name in names]
    summed = hashlib.sha256(f"{names} {types}".encode())
    for batch in _batches(dataset, names):
        for part in (part for values in batch.columns for part in _parts(values)):
            fresh = part.take(pa.array(range(len(part)), pa.int32()))  # a slice brings its neighbours along
            summed.update(pa.record_batch([fresh], ["_"]).serialize())
    return summed.hexdigest()


def _parts(values: pa.Array) -> Iterator[pa.Array]:
    """All arrays within, each the same however it was stored: parquet has other values in the place of a `None`."""
    if pa.types.is_null(values.type):
        yield values
        return
    yield values.is_valid().cast(pa.uint8())
    if pa.types.is_struct(values.type):
        for place in range(values.type.num_fields):
            yield from _parts(pc.struct_field(values, [place]))
    elif _is_list(values.type):
        yield pc.list_value_length(values).drop_null()
        yield from _parts(pc.list_flatten(values))
    else:
        some = values.drop_null()
        yield some.cast(pa.uint8()) if pa.types.is_boolean(some.type) else some


def _batches(dataset: Dataset, names: list[str]) -> Iterator[pa.RecordBatch]:
    """The columns as they are stored, some rows at a time, in order."""
    # `select` and `shuffle` only record indices; the table itself keeps all rows.
    table, indices = dataset.data.table.select(names), dataset._indices
    rows = None if indices is None else indices.column(0).to_numpy()
    for start in range(0, len(dataset), _ROWS):
        # `take`, because `Dataset.iter` over shuffled rows makes a chunk of each row and takes ten times as long.
        part = table.slice(start, _ROWS) if rows is None else table.take(rows[start : start + _ROWS])
        yield from part.combine_chunks().to_batches()


def _seen(values: pa.Array, name: str) -> tuple[Numbers, Numbers]:
    """Of each value a hash of its shape, 0 for `None`, and its size."""
    forms: Numbers = np.full(len(values), _hash("valid"))
    sizes: Numbers = np.zeros(len(values), np.int64)
    if pa.types.is_struct(values.type):
        for field in values.type:
            form, size = _seen(pc.struct_field(values, field.name), field.name)
            forms, sizes = forms + form * _hash(field.name), sizes + size
    elif _is_list(values.type):
        lengths = _integers(pc.list_value_length(values))
        ends = lengths.cumsum()
        # Random and odd, so that a sum of products with them tells places apart.
        random = np.random.default_rng(0).integers(2**64, size=lengths.max(initial=0), dtype=np.uint64) | np.uint64(1)
        place = np.arange(lengths.sum()) - np.repeat(ends - lengths, lengths)
        form, size = _seen(pc.list_flatten(values), name)
        totals = [np.append(one[:0].sum(), one.cumsum()) for one in (form * random[place], size)]
        form, sizes = (total[ends] - total[ends - lengths] for total in totals)
        forms = forms + form + lengths.astype(np.uint64) * _hash("length")
    elif _is_text(values.type) and not _is_bytes(values.type):
        sizes = _integers(pc.binary_length(values))
        if name in _BY_VALUE:
            codes = values.dictionary_encode()
            hashes = np.array([*map(_hash, codes.dictionary.to_pylist()), 0], np.uint64)
            forms = forms + hashes[_integers(pc.fill_null(codes.indices, len(hashes) - 1))]
        else:
            kinds = (sizes > 0).astype(np.int64) + _integers(pc.utf8_is_space(values))
            forms = forms + np.array([_hash("empty"), _hash("text"), _hash("blank")])[kinds]
        # NFC makes a non-ASCII character at most three times as long.
        if not pc.all(pc.string_is_ascii(values)).as_py():
            sizes = sizes + 4 * (sizes - _integers(pc.utf8_length(values)))
    elif _is_number(values.type):
        sizes = sizes + 32  # more than any number has as text
    if values.null_count:  # whatever its kind
        forms = np.where(values.is_valid().to_numpy(zero_copy_only=False), forms, np.uint64(0))
    return forms, sizes


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
