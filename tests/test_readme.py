"""The code of the README runs as it stands there, with tiny models in place of those on the Hub."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import datasets
import pytest
import tiny

import trl_opsd

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_a_snippet_of_the_readme_runs(snippet, tmp_path, monkeypatch):
    for name, width in (("Qwen2.5-0.5B-Instruct", 32), ("Qwen2.5-1.5B-Instruct", 48), ("Qwen3-1.7B", 32)):
        tiny.qwen2(width, max_position_embeddings=1024).save_pretrained(tmp_path / "Qwen" / name)
        tiny.tokenizer().save_pretrained(tmp_path / "Qwen" / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: tiny.rows(16))
    # The defaults are bf16 and three epochs; neither fits a CPU or a test.
    on_the_cpu = functools.partial(tiny_config, trl_opsd.OPSDConfig)
    monkeypatch.setattr(trl_opsd, "OPSDConfig", on_the_cpu, raising=False)
    names: dict[str, Any] = {}
    exec(snippet, names)
    if "trainer" in names:
        assert names["trainer"].state.global_step == 2


def tiny_config(config: type, **options: Any) -> Any:
    small = {"max_steps": 2, "max_completion_length": 8, "use_cpu": True, "bf16": False, "report_to": "none"}
    return config(**options, **small)


def test_the_readme_has_the_snippets_this_file_runs():
    assert len(SNIPPETS) == 3
