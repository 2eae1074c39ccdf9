"""Fixtures for all tests. The Hub is switched off before anything is imported: nothing can be downloaded. DeepSpeed's
extensions are built in a folder of the clone.

Tiny tensors are handled fastest by one thread, and tests may share a machine.
"""

from __future__ import annotations

import os

os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
os.environ.setdefault("TORCH_EXTENSIONS_DIR", os.path.join(os.path.dirname(__file__), "../build/extensions"))

import copy
import functools
import gc
import inspect
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate.utils.imports
import pytest
import torch
from support import tiny
from transformers import PreTrainedModel

from trl_opsd import FixedRollout, OPSDTrainer


def pytest_configure(config: pytest.Config) -> None:
    """Removes the locks of builds that a killed suite has left: every later one would wait for them."""
    if not hasattr(config, "workerinput"):
        for lock in Path(os.environ["TORCH_EXTENSIONS_DIR"]).glob("*/lock"):
            if time.time() - lock.stat().st_mtime > 600:  # no build takes as long
                lock.unlink(missing_ok=True)
    # for each trainer, accelerate looks for thirty packages and reads what their authors wrote about them
    found = functools.cache(accelerate.utils.imports._is_package_available)
    accelerate.utils.imports._is_package_available = found
    if not torch.accelerator.is_available():  # torch would note each seed, and the stack, for when a device is used
        for devices in (torch.cuda, torch.mtia, torch.xpu):
            devices.manual_seed_all = lambda seed: None


def pytest_collection_finish() -> None:
    """Takes what was imported out of garbage collection: accelerate collects in each training, and would walk it.

    Forks the server of pairs of processes, where a test has imported it.
    """
    gc.freeze()
    if "support.forks" in sys.modules:
        sys.modules["support.forks"].serve()


@pytest.fixture(autouse=True)
def _fail_on_loading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a test marked `before_loading` fail when it loads weights."""
    if request.node.get_closest_marker("before_loading"):
        fails = classmethod(lambda cls, path, *args, **kwargs: pytest.fail(f"loaded {path}"))
        monkeypatch.setattr(PreTrainedModel, "from_pretrained", fails)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises `KeyboardInterrupt`, also where the tests run in the background of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def make_trainer(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., OPSDTrainer]:
    """Builds a trainer of a tiny student and a wider teacher that replays recorded completions.

    Keyword arguments that the trainer knows go to the trainer, all others to its config. In a test with the marker
    `before_loading` both models are paths.
    """
    return functools.partial(_built, tmp_path, request.node.get_closest_marker("before_loading") is not None)


@pytest.fixture
def trained(make_trainer: Callable[..., OPSDTrainer]) -> Callable[..., OPSDTrainer]:
    """As `make_trainer`, and trains; from a checkpoint, where `resume` says so."""

    def trained(*cls: type[OPSDTrainer], resume: Any = None, **given: Any) -> OPSDTrainer:
        trainer = make_trainer(*cls, **given)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    return trained


@pytest.fixture(scope="module")
def make_shared(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., OPSDTrainer]:
    """As `make_trainer`, for trainers that several tests of a file read."""
    return functools.partial(_built, tmp_path_factory.mktemp("shared"), False)


def _built(folder: Path, without_weights: bool, cls: type[OPSDTrainer] = OPSDTrainer, **given: Any) -> OPSDTrainer:
    def model(width: int, seed: int) -> Any:
        if not without_weights:
            return tiny.qwen2(width, seed=seed)
        config = tiny.qwen2(width).config
        config.architectures = ["Qwen2ForCausalLM"]
        config.save_pretrained(folder / f"no-weights-{width}")
        return str(folder / f"no-weights-{width}")

    words, rewards = tiny.tokenizer(), tiny.rewards(given)
    of_trainer = {name: value for name, value in given.items() if name in _ARGUMENTS}
    if not isinstance(of_trainer.get("methods", []), list | tuple):
        del of_trainer["methods"]  # an option of that name
    arguments: dict[str, Any] = {
        "model": given.get("model") or model(32, seed=0),
        "teacher_model": model(48, seed=1) if "teacher_model" not in given else None,
        "train_dataset": tiny.rows(),
        "processing_class": words,
        "rollout": FixedRollout(tiny.recorded(words)),
        **of_trainer,
    }
    if "args" not in given:
        arguments["args"] = tiny.config(folder, **{name: given[name] for name in given.keys() - of_trainer.keys()})
    arguments["methods"] = [_unbound(one) for one in (*arguments.get("methods", ()), *rewards)]
    return cls(**arguments)


def _unbound(method: Any) -> Any:
    """A method of a table of tests, which may have belonged to a trainer before."""
    if getattr(method, "_host", None) is None:
        return method
    method = copy.copy(method)
    del method._host
    return method


_ARGUMENTS = set(inspect.signature(OPSDTrainer.__init__).parameters)
