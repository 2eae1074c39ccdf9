"""What a release and the workflows rest on: targets that exist, versions that agree, and refusals."""

from __future__ import annotations

import configparser
import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")}
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.fixture
def tools(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import check_wheel
    import release

    return check_wheel, release


def jobs(name: str) -> list[dict]:
    return [*WORKFLOWS[name]["jobs"].values()]


def test_every_step_of_a_workflow_is_a_make_target():
    seen = set()
    for name in WORKFLOWS:
        for job in jobs(name):
            targets = job.get("strategy", {}).get("matrix", {}).get("target", [])
            for run in (step["run"] for step in job.get("steps", ()) if "run" in step):
                words = re.fullmatch(r"make ([\w\" $-]+) PYTHON=python", run)[1].split()
                seen |= {one for word in words for one in (targets if word == '"$TARGET"' else [word])}
    assert seen <= TARGETS
    assert {"test", "check", "test-latest", "test-lowest", "docs", "release"} <= seen


def test_tested_pythons_are_those_of_the_metadata(tools):
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    said = re.findall(r"Python :: (3\.\d+)", config["metadata"]["classifiers"])
    [tested] = [job["strategy"]["matrix"]["python"] for job in jobs("tests") if "strategy" in job]
    assert said == tested == list(tools[0].PYTHONS)


def test_only_the_publishing_jobs_may_write():
    for name in WORKFLOWS:
        assert WORKFLOWS[name]["permissions"] == {"contents": "read"}
        for job in jobs(name):
            assert "secrets." not in str(job)
            may = job.get("permissions", {"contents": "read"})
            assert "environment" in job or may == {"contents": "read"}


def test_readme_on_an_index_links_to_the_release(tools):
    source = (ROOT / "setup.py").read_text()
    names: dict = {}
    exec(source.partition("\nconfig = ")[0].replace("Path(__file__)", "Path('.')"), names)
    nested = "[![a](docs/a.svg)](docs/b.md) [`x`](docs/b.md)\n```\n[0](docs)\n```\n"
    assert names["for_an_index"](nested, "r", "v1") == (
        "[![a](r/raw/v1/docs/a.svg)](r/blob/v1/docs/b.md) [`x`](r/blob/v1/docs/b.md)\n```\n[0](docs)\n```\n"
    )
    text = "![a](docs/a.svg) [b](docs/b.md#c) [d](examples/recipes) [e](https://x.org/y) [f](#g) [LICENSE](LICENSE)"
    at = "https://h/o/r"
    assert names["for_an_index"](text, at, "v1") == (
        f"![a]({at}/raw/v1/docs/a.svg) [b]({at}/blob/v1/docs/b.md#c) [d]({at}/tree/v1/examples/recipes) "
        f"[e](https://x.org/y) [f](#g) [LICENSE]({at}/blob/v1/LICENSE)"
    )


def test_a_placeholder_is_found_where_it_stands(tools, tmp_path, monkeypatch):
    _, release = tools
    for name in ("setup.cfg", "RELEASE.md"):
        (tmp_path / name).write_text("[metadata]\nauthor = THE-AUTHORS-PLACEHOLDER\n".replace("THE-", ""))
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(release, "REPOSITORY", tmp_path)
    assert release.placeholders() == ["setup.cfg:2:AUTHORS-PLACEHOLDER"]


def test_placeholders_versions_and_dates_are_refused(tools, monkeypatch):
    _, release = tools
    monkeypatch.setattr(release, "placeholders", list)
    monkeypatch.setattr(release, "git", lambda *command: b" M a.py\n" if command[0] == "status" else b"v0.1.0\n")
    files = {"CHANGELOG.md": "Nothing was released yet\n\n## 0.1.0 (unreleased)\n", "README.md": "pip install ."}
    monkeypatch.setattr(release, "read", files.__getitem__)
    said = release.refusals("0.1.0.dev0")
    for part in (
        "is no release",
        "nothing was released",
        "begins with '## 0.1.0 (unreleased)'",
        "`pip install trl_opsd`",
        "a.py",
    ):
        assert any(part in line for line in said), (part, said)
    files |= {"CHANGELOG.md": "## 0.1.0 (2026-11-28)\n", "README.md": "pip install trl_opsd"}
    monkeypatch.setattr(release, "git", lambda *command: b"")
    assert release.refusals("0.1.0") == []
    monkeypatch.setattr(release, "git", lambda *command: b"v0.2.0\n" if command[0] == "tag" else b"")
    assert release.refusals("0.1.0") == ["this commit has the tag v0.2.0, expected v0.1.0"]
