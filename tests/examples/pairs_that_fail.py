"""Run as a process of its own: pairs of processes of which both or one fail before training, or print help.

They are forked, as in `tests/survival/pairs.py`, so that imports are shared.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import tiny
from datasets import Dataset, load_dataset
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from trl_opsd import OPSDConfig, OPSDTrainer
from trl_opsd.cli.main import app

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import train

SECONDS = 60
"""Time limit after which a process that still waits prints its stack and ends."""


def trainer(folder: Path, **given: Any) -> OPSDTrainer:
    arguments = {"model": tiny.qwen2(32), "teacher_model": tiny.qwen2(48), "train_dataset": tiny.rows()}
    words = tiny.tokenizer()
    return OPSDTrainer(**{**arguments, "args": tiny.config(folder), "processing_class": words, **given})


def in_a_script_of_ones_own(folder: Path) -> None:
    tiny.config(folder)
    load_dataset("json", data_files=str(folder / "nowhere.json"))


def in_one_process_only(folder: Path) -> None:
    """The other waits for it."""
    args = tiny.config(folder)
    if args.process_index == 1:
        raise RuntimeError("only here")
    trainer(folder, args=args)
    time.sleep(SECONDS)


FAILURES: dict[str, Callable[[Path], Any]] = {
    "option": lambda folder: OPSDConfig(str(folder), divergence="forward", use_cpu=True),
    "JSON": lambda folder: OPSDConfig(str(folder), model_init_kwargs="{bad", use_cpu=True),
    "teacher": lambda folder: trainer(folder, teacher_model=str(folder / "nowhere")),
    "row": lambda folder: trainer(folder, train_dataset=Dataset.from_list([{"prompt": "a"}, {"prompt": ""}] * 4)),
    "own script": in_a_script_of_ones_own,
    "one process": in_one_process_only,
    "train.py, option": lambda folder: train.main(["--learning_rat", "1"]),
    "train.py, model": lambda folder: train.main(["--dataset_name", str(folder)]),
    "trl-opsd train": lambda folder: app(["train", "--dataset_name", str(folder)], prog_name="trl-opsd"),
    "train.py, help": lambda folder: train.main(["--help"]),
}


def script(name: str, folder: Path) -> None:
    """Ends as a script would: through `sys.excepthook` with a status, or as argparse ends it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not as the agent, which it was forked from
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    try:
        FAILURES[name](folder)
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def main(folder: Path) -> None:
    results = {}
    forks.build_shm_op()  # may compile; not a part of any pair's time
    for number, name in enumerate(FAILURES):
        for stream, descriptor in (("out", 1), ("err", 2)):
            with (folder / f"{number}.{stream}").open("wb") as file:
                os.dup2(file.fileno(), descriptor)
        began = time.time()
        try:
            forks.launch("ddp", script, name, folder)
            statuses = {}
        except ChildFailedError as error:
            statuses = {rank: failure.exitcode for rank, failure in error.failures.items()}
        results[name] = {"number": number, "statuses": statuses, "seconds": time.time() - began}
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
