"""Servers of teachers; unused where vLLM is absent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from served_lab import states_teacher
from support import serving
from transformers import AutoModelForCausalLM

from trl_opsd.teacher.served import ServedTeacher


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


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """The path of a teacher, and the teacher itself."""
    folder = tmp_path_factory.mktemp("teacher") / "untied"
    path = serving.save_teacher(folder, seed=1)
    return path, AutoModelForCausalLM.from_pretrained(path)


@pytest.fixture
def served(checkpoint: tuple[str, Any]) -> Callable[..., ServedTeacher]:
    def served(server: Any, **given: Any) -> ServedTeacher:
        return states_teacher(checkpoint[0], server.url, **given)

    return served
