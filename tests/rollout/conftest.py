"""Trainers that generate with vLLM, in the process or over a server; unused where vLLM is absent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trl_opsd import OPSDTrainer

pytest.register_assert_rewrite("alike")


@pytest.fixture(scope="module")
def engines_are_shared() -> Iterator[None]:
    """Starts an engine once for each kind of student in a file, not for each trainer."""
    import vllm_lab

    with vllm_lab.shared_engines():
        yield


@pytest.fixture
def make(tmp_path: Path, engines_are_shared: None) -> Callable[..., OPSDTrainer]:
    """Builds a trainer of a saved student that generates with vLLM. Unknown keyword arguments go to its config."""
    import vllm_lab

    def make(shape: str = "qwen2", tied: bool = False, **given: Any) -> OPSDTrainer:
        return vllm_lab.trainer(tmp_path, shape, tied, **given)

    return make


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Config options that point to a vLLM server, which holds a student with a tied head."""
    import server_lab

    with server_lab.running(tmp_path_factory.mktemp("served")) as options:
        yield options


@pytest.fixture
def serve(
    server: dict[str, Any], make: Callable[..., OPSDTrainer], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., OPSDTrainer]]:
    """Like `make`, for a trainer that generates with the server of `server`, vLLM's over TCP; the last is connected."""
    import tcp_transfer

    tcp_transfer.use(monkeypatch)
    made: list[OPSDTrainer] = []

    def serve(**given: Any) -> OPSDTrainer:
        for before in made:
            before.rollout.close()
        made.append(make(tied=True, **{**server, **given}))
        return made[-1]

    yield serve
    for trainer in made:
        trainer.rollout.close()
