"""Models and rows on disk, as users have them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from datasets import Dataset, DatasetDict
from support import tiny


@pytest.fixture(scope="session")
def disk(tmp_path_factory) -> SimpleNamespace:
    """Paths: a `student` and a wider `teacher`, both in bfloat16, and 16 chats in every form that can be loaded.

    The chat template reads `enable_thinking`.
    """
    folder, words = tmp_path_factory.mktemp("disk"), tiny.tokenizer()
    words.chat_template = f"{{% if enable_thinking is defined %}}{{% endif %}}{tiny.CHAT_TEMPLATE}"
    for name, model in {"student": tiny.qwen2(32, seed=0), "teacher": tiny.qwen2(48, seed=1)}.items():
        model.bfloat16().save_pretrained(folder / name)
        words.save_pretrained(folder / name)
    chats = Dataset.from_list([{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in tiny.rows(16)])
    (folder / "data").mkdir()
    chats.to_json(folder / "data" / "train.jsonl")
    chats.to_parquet(folder / "rows.parquet")
    chats.save_to_disk(folder / "one_saved")
    DatasetDict({"train": chats, "validation": chats.select(range(4))}).save_to_disk(folder / "splits_saved")
    files = {"jsonl": str(folder / "data" / "train.jsonl"), "parquet": str(folder / "rows.parquet")}
    folders = ("student", "teacher", "data", "one_saved", "splits_saved")
    return SimpleNamespace(**files, **{name: str(folder / name) for name in folders})
