"""The files in `examples/served_teacher/` are what `train.py` reads, and a run from one reaches the server."""

from __future__ import annotations

from pathlib import Path

import pytest
import train
import yaml

from trl_opsd.cli.train.options import OptionParser
from trl_opsd.cli.train.script import set_loading
from trl_opsd.http.urls import server_urls

FILES = sorted((Path(train.__file__).parent / "served_teacher").glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_file_is_read_with_its_servers(file):
    run = OptionParser().given(["--config", str(file), "--use_cpu"])
    script, config, model = run.script, run.config, run.model
    given = yaml.safe_load(file.read_text())
    assert server_urls("teacher_server_url", config.teacher_server_url) == server_urls(
        "teacher_server_url", given["teacher_server_url"]
    )
    assert (model.model_name_or_path, script.dataset_name) == (given["model_name_or_path"], given["dataset_name"])
    assert config.max_completion_length == given["max_completion_length"]
    set_loading(run.extra, config, model)
    assert config.teacher_model_init_kwargs == {}, "nothing about layers, which the server has loaded"


def test_there_are_three_files():
    assert len(FILES) == 3
