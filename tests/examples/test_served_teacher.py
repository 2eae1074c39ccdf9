"""The files of served teachers are what `train.py` reads, and their commands start the servers of each."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import train
import yaml
from support import serving, tiny

from trl_opsd._compat.urls import server_urls
from trl_opsd.cli.options import OptionParser
from trl_opsd.cli.train import set_loading

EXAMPLES = Path(train.__file__).parent
FILES = [EXAMPLES / "cases/served_teacher.yaml", *sorted((EXAMPLES / "served_teacher").glob("*.yaml"))]
OF_ANOTHER = {"several_runs"}
"""Files whose servers are those of another one."""
OF_SIZE = ("--tensor-parallel-size", "--data-parallel-size", "--dtype", "--host", "--port")
"""Flags, with a value, that tiny models on loopback have otherwise."""


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_file_is_read_with_its_servers(file):
    run, given = OptionParser().given(["--config", str(file), "--use_cpu"]), yaml.safe_load(file.read_text())
    both = (run.config.teacher_server_url, given["teacher_server_url"])
    assert server_urls("teacher_server_url", both[0]) == server_urls("teacher_server_url", both[1])
    set_loading(run.extra, run.config, run.model)
    assert run.config.teacher_model_init_kwargs is None, "nothing about layers, which the server has loaded"


# ---- With real servers: `make test-servers` --------------------------------------------------------------------------


class Command(NamedTuple):
    """How a file says that a server is started."""

    environment: dict[str, str]
    program: str
    model: str
    flags: list[str]
    port: str

    def running(self, model: str, log: Path) -> AbstractContextManager[Any]:
        """The same with a tiny model, whose address or address and process it is."""
        if self.program == "vllm serve":
            return serving.generating(model, log, *self.flags, **self.environment)
        return serving.sglang(model, log, "--max-total-tokens", "4096", *self.flags)


def commands(text: str) -> Iterator[Command]:
    """All commands in the comments of a file."""
    lines = re.sub(r"^# *", "", text, flags=re.MULTILINE).replace("\\\n", "")
    start = r"^(?:([A-Z_]+)=(\S+) )?(vllm serve|python -m sglang.launch_server --model-path) (\S+) (.*?)(?: &)?$"
    for name, value, program, model, rest in re.findall(start, lines, re.MULTILINE):
        flags, found = iter(shlex.split(rest)), {}
        kept = []
        for flag in flags:
            if flag in OF_SIZE:
                found[flag] = next(flags)
            else:
                kept.append(flag)
        yield Command({name: value} if name.startswith("VLLM") else {}, program, model, kept, found["--port"])


@pytest.mark.servers
@pytest.mark.timeout(600)
@pytest.mark.parametrize("file", [file for file in FILES if file.stem not in OF_ANOTHER], ids=lambda file: file.stem)
def test_commands_of_a_file_start_what_it_trains_with(file, tmp_path, disk):
    text = file.read_text()
    given = yaml.safe_load(text)
    names = {given["model_name_or_path"]: "student", given["teacher_model_name_or_path"]: "teacher"}
    paths = {name: serving.save_teacher(tmp_path / of, seed=seed) for seed, (name, of) in enumerate(names.items())}
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        found = list(commands(text))
        contexts = [one.running(paths[one.model], tmp_path / f"log{one.port}") for one in found]
        urls = [one if isinstance(one, str) else one[0] for one in pool.map(stack.enter_context, contexts)]
        for name, path in paths.items():
            text = text.replace(f": {name}\n", f": {path}\n")
        for one, url in zip(found, urls, strict=True):
            assert f"http://127.0.0.1:{one.port}" in text
            text = text.replace(f"http://127.0.0.1:{one.port}", url)
        config = tmp_path / "config.yaml"
        config.write_text(text)
        arguments = ["--config", str(config), "--dataset_name", disk.data, "--output_dir", str(tmp_path / "out")]
        arguments += ["--max_completion_length", "8", "--max_steps", "2", "--logging_steps", "1"]
        trainer = train.main([*arguments, "--per_device_train_batch_size", "4", "--save_strategy", "no"])
        losses = tiny.logged(trainer, "loss")
        print(f"\n{file.stem}: {trainer.teacher}; {trainer.rollout}; losses {losses}")
        assert len(losses) == 2
        assert all(loss > 0 for loss in losses)
        has_engine = not given.keys().isdisjoint({"vllm_server_base_url", "sglang_server_url"})
        assert (len(tiny.logged(trainer, "sync/bytes")) == 2) == has_engine
        trainer.rollout.close()
