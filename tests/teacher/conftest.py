"""Servers of teachers; unused where vLLM is absent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import serving
import torch


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The same for one in bfloat16, whose head is its embeddings."""
    folder = tmp_path_factory.mktemp("half")
    path = serving.save_teacher(folder / "tied", seed=1, dtype=torch.bfloat16, tie_word_embeddings=True)
    with serving.pooling(path, folder / "log") as url:
        yield path, url


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The path of a teacher with a head of its own, and the address of a vLLM server of it, in float32."""
    folder = tmp_path_factory.mktemp("served")
    path = serving.save_teacher(folder / "untied", seed=1)
    with serving.pooling(path, folder / "log", "--dtype", "float32") as url:
        yield path, url
