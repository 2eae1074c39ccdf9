"""The survey of a dataset against one that reads its rows as Python objects, and the bound on their tokens."""

from __future__ import annotations

import itertools
import unicodedata
from datetime import datetime
from typing import Any

import pyarrow as pa
import pytest
from datasets import Dataset, Features, Json, List, Value, concatenate_datasets, load_from_disk
from support import tiny
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trl_opsd.data.survey import Survey, digest
from trl_opsd.data.tokenization import at_most_one_token_per_byte

pytestmark = pytest.mark.quick

COLUMNS = ("prompt", "privileged_context")


def message(role: str | None, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


CHATS = [
    [message("user", "a")],
    [message("user", "déjà vu 漢字")],
    [message("user", "")],
    [message("user", "  \n")],
    [message("user", None)],
    [message("system", "a")],
    [message(None, "a")],
    [message("system", "a"), message("user", "b")],
    [message("user", "a"), message("system", "b")],
    [message("user", "a"), message("user", "b"), message("user", "c")],
    [message("user", "a"), None],
    [],
    None,
]


def naive_shape(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return {part: naive_shape(one, part) for part, one in sorted(value.items())}
    if isinstance(value, list):
        return [naive_shape(one, name) for one in value]
    if isinstance(value, str) and name != "role":
        return "blank" if value.isspace() else "text" if value else "empty"
    return value if name == "role" else type(value).__name__


def naive_size(value: Any) -> int:
    if isinstance(value, dict | list):
        return sum(map(naive_size, value.values() if isinstance(value, dict) else value))
    return len(unicodedata.normalize("NFC", str(value)).encode()) if value is not None else 0


def rows(*values: Any, **more: Any) -> Dataset:
    return Dataset.from_list([{"prompt": value, **more} for value in values])


DATASETS = [
    rows(*CHATS, *reversed(CHATS)),
    rows("a", "b", "", " ", None, "\u1d160", "\u0958"),
    rows("a", "b", privileged_context=3),
    rows("a", "b", privileged_context=[message("user", "x")]),
    rows([message("user", [{"type": "text", "text": "a"}])], [message("user", [{"type": "image", "text": None}])]),
]


@pytest.mark.parametrize("dataset", DATASETS)
def test_rows_that_differ_in_words_only_have_one_shape_and_are_not_longer_than_their_size(dataset):
    survey = Survey.of(dataset, COLUMNS)
    shapes = [naive_shape(row, "") if "type" not in str(row) else str(row) for row in dataset]
    for one, other in itertools.combinations(range(len(dataset)), 2):
        assert (shapes[one] == shapes[other]) == (survey.shapes[one] == survey.shapes[other]), (one, other)
    firsts = [shapes.index(shape) for shape in shapes]
    assert survey.first_of_each_shape.tolist() == sorted(set(firsts))
    assert survey.first_alike.tolist() == firsts
    for number, row in enumerate(dataset):
        assert survey.size_of(COLUMNS)[number] >= naive_size(row)
        assert survey.size_of(["prompt"])[number] >= naive_size(row["prompt"])


def test_survey_and_digest_are_independent_of_storage():
    dataset = rows(*CHATS[:10] * 3)
    order = [7, 3, 21, 0, 0, 12, 29]
    wide = [{"name": "prompt", "type": pa.large_list(pa.struct({"content": pa.large_string(), "role": pa.string()}))}]
    table = pa.table({"prompt": [dataset[number]["prompt"] for number in order]}).cast(
        pa.schema([pa.field(**field) for field in wide])
    )
    straight = Dataset.from_list([dataset[number] for number in order])
    same = [
        dataset.select(order),
        concatenate_datasets([dataset.select([one]) for one in order]),
        Dataset(table),
        straight.with_format("torch"),
        concatenate_datasets([dataset] * 10).select(order),
    ]
    expected = Survey.of(straight, COLUMNS)
    for one in same:
        survey = Survey.of(one, COLUMNS)
        assert survey.shapes.tolist() == expected.shapes.tolist()
        assert survey.size_of(COLUMNS).tolist() == expected.size_of(COLUMNS).tolist()
        assert (digest(one, COLUMNS) == digest(straight, COLUMNS)) == (one.features == straight.features)


def test_digest_is_that_of_the_values_wherever_they_are_stored(tmp_path):
    values = [
        {"prompt": None if number % 7 == 0 else "x" * (number % 5), "flag": [True, None, False][number % 3],
         "inner": None if number % 4 == 0 else {"deep": [None, {"a": number}], "text": "y"}, "whole": str(number)}
        for number in range(2_300)
    ]  # fmt: skip
    dataset = Dataset.from_list(values)
    dataset.save_to_disk(tmp_path / "saved")
    dataset.to_parquet(tmp_path / "rows.parquet")
    stored = [
        load_from_disk(str(tmp_path / "saved")),
        Dataset.from_parquet(str(tmp_path / "rows.parquet"), cache_dir=str(tmp_path)),
        dataset.select(range(len(dataset))),
        dataset.select([*range(len(dataset))]),
        concatenate_datasets([dataset.select(range(7)), dataset.select(range(7, len(dataset)))]),
    ]
    columns = ("prompt", "flag", "inner", "whole")
    assert {digest(one, columns) for one in stored} == {digest(dataset, columns)}
    for number, change in ((0, {"prompt": ""}), (1, {"flag": False}), (2, {"inner": {"deep": [None], "text": "y"}})):
        changed = Dataset.from_list([row | change if at == number else row for at, row in enumerate(values)])
        assert digest(changed, columns) != digest(dataset, columns)


def test_a_digest_tells_contents_apart():
    contents = [
        rows("a", "bc"),
        rows("ab", "c"),
        rows("a", "bc", "d"),
        rows("bc", "a"),
        rows("a", None),
        rows("a", ""),
        rows(["a", "bc"]),
        rows(["a"], ["bc", "d"]),
        rows(["a", "bc"], ["d"]),
        rows(1, 2),
        rows(1.0, 2.0),
        rows("a", "bc", privileged_context="x"),
        rows([message("a", "bc")]),
    ]
    assert len({digest(one, None) for one in contents}) == len(contents)


def test_rows_that_are_decoded_are_not_surveyed():
    decoded = Dataset.from_dict({"prompt": [[{"a": 1}]]}, features=Features({"prompt": List(Json())}))
    assert Survey.of(decoded, COLUMNS) is None
    assert Survey.of(rows("a").with_transform(lambda batch: batch), COLUMNS) is None
    assert Survey.of(rows(datetime(2026, 1, 1)), COLUMNS) is None
    assert Survey.of(Dataset.from_dict({"other": [b"a"]}, features=Features(other=Value("binary"))), COLUMNS)


def words(normalizer: Any = None, pre_tokenizer: Any = None, **options: Any) -> PreTrainedTokenizerFast:
    """Characters, and the bytes of others, as SentencePiece has them."""
    tokens = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b"]
    backend = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, [], **options))
    backend.decoder = decoders.ByteFallback()
    backend.normalizer, backend.pre_tokenizer = normalizer, pre_tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", bos_token="<s>")


LLAMA = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
TEXTS = ["a", "a b", "déjà vu", "漢字かな", "\U0001d160" * 5, "\u0958\u0929", "<s>a</s>b", "  x\n\t", "🙂" * 3]


def with_normalizer(normalizer: Any) -> PreTrainedTokenizerFast:
    made = tiny.tokenizer()
    made.backend_tokenizer.normalizer = normalizer
    return made


BOUNDED = {
    "tiny": tiny.tokenizer(),
    "Qwen": with_normalizer(normalizers.NFC()),
    "Llama 2": words(LLAMA, byte_fallback=True),
    "Gemma": words(
        normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous"), byte_fallback=True
    ),
    "Mistral": words(None, pre_tokenizers.Metaspace(), byte_fallback=True),
}
UNBOUNDED = {
    "T5": PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.Unigram([("<unk>", 0.0)], 0)), eos_token="<unk>"),
    "expands compatibility forms": with_normalizer(normalizers.NFKC()),
    "strips": with_normalizer(normalizers.Strip()),
    "writes words": with_normalizer(normalizers.Replace("a", "abracadabra")),
    "drops what it does not know": words(LLAMA, byte_fallback=False),
}


@pytest.mark.parametrize("name", [*BOUNDED, *UNBOUNDED])
def test_a_bounded_tokenizer_has_at_most_one_token_per_byte(name):
    assert at_most_one_token_per_byte({**BOUNDED, **UNBOUNDED}[name]) == (name in BOUNDED)
    if name in BOUNDED:
        sizes = Survey.of(rows(*TEXTS), COLUMNS).size_of(COLUMNS)
        for text, size in zip(TEXTS, sizes, strict=True):
            assert 1 <= len(BOUNDED[name](text)["input_ids"]) <= size + 1
