"""What docs/stability.md promises: public names stay, or go after a warning; deprecated options still work."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def tool():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tools")
        import surface

        yield surface


@pytest.fixture(scope="module")
def released():
    return json.loads((ROOT / "tests" / "surface.json").read_text(encoding="utf-8"))


def test_changes_of_public_names_are_in_the_changelog(tool, released):
    now = tool.surface()
    found = tool.differences(released, now)
    newest = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1]
    assert tool.undocumented(found, newest) == [], "name each in the first section of CHANGELOG.md, in backticks"
    versions = released["version"]["trl_opsd"], now["version"]["trl_opsd"]
    assert tool.unstable(found, *versions) == [], "deprecate first, in a minor release: docs/stability.md"


def test_names_that_pages_import_are_public(released):
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    text = "\n".join(
        page.read_text(encoding="utf-8") for page in pages if page.stem not in ("api", "design", "stability")
    )
    named = {f"{one[0]}.{name.strip()}" for one in re.findall(r"^ *from (trl_opsd[\w.]*) import ([\w, ]+)$", text, re.M)
             for name in one[1].split(",")}  # fmt: skip
    named |= set(re.findall(r"`(trl_opsd(?:\.[a-z_]+)+\.\w+)[`(]", text))
    public = {name: re.sub(r".*\.", "", name) for name in released["python"]}
    assert len(named) > 15
    assert {name for name in named if name.rpartition(".")[2] not in public.values()} == set()


def test_a_renamed_option_needs_a_line_and_a_deprecation(tool, released):
    options = dict(released["options"])
    now = {**released, "options": {**options, "clip": options.pop("kl_clip")}}
    del now["options"]["kl_clip"]
    found = tool.differences(released, now)
    assert found == {("options", "clip"): (None, "None"), ("options", "kl_clip"): ("None", None)}
    assert tool.undocumented(found, "`kl_clip` is gone") == ["options: clip"]
    assert tool.undocumented(found, "`kl_clip=1` is called `clip`") == []
    assert tool.unstable(found, "0.1.0", "0.9.0.dev0") == ["options: kl_clip"]
    earlier = {**released, "options": {**options, "kl_clip": "None; deprecated, goes in 0.3.0"}}
    found = tool.differences(earlier, now)
    assert tool.unstable(found, "0.2.0", "0.2.1") == ["options: kl_clip"]
    assert tool.unstable(found, "0.2.0", "0.3.0.dev0") == []


CHANGED = [
    ("options", "teacher_update_rate", "`teacher_update_rate`"),
    ("python", "trl_opsd.Method.weigh(targets)", "`weigh(..., targets)`, `targets`"),
    ("python", "trl_opsd.RolloutBackend.complete", "`RolloutBackend.complete`"),
    ("python", "trl_opsd.OPSDTrainer.interrupted", "`trainer.interrupted`"),
    ("python", "trl_opsd.cli.targets.write_targets", "`write_targets(...)`"),
    ("json", "doctor:verdict", "`verdict`"),
    ("json", "doctor:checks[].verdict", "`verdict`"),
    ("commands", "plan --tflops", "`trl-opsd plan --tflops 4`"),
    ("commands", "report --output", "`report --output`"),
    ("files", "checkpoint-N/opsd_manifest.json", "`checkpoint-N/opsd_manifest.json`"),
    ("environment", "TRL_OPSD_TEACHER_TOKEN", "`TRL_OPSD_TEACHER_TOKEN`"),
    ("metrics", "divergence/mean", "`divergence/mean`"),
]


@pytest.mark.parametrize(("kind", "name", "told"), CHANGED)
def test_a_change_is_seen_and_its_line_is_found(tool, released, kind, name, told):
    for is_now in ("another", None):
        names = {**released[kind], name: is_now}
        found = tool.differences(
            released, {**released, kind: {one: what for one, what in names.items() if what is not None}}
        )
        assert list(found) == [(kind, name)]
        assert tool.undocumented(found, "nothing of `this(value)`, the `verdicts` or `--out`") == [f"{kind}: {name}"]
        assert tool.undocumented(found, told) == []
        assert bool(tool.unstable(found, "0.1.0", "0.2.0")) == (is_now is None)
        assert tool.unstable(found, "0.1.0", "0.1.1") == [f"{kind}: {name}"], "a patch changes nothing"
    fresh = {one: what for one, what in released[kind].items() if one != name}
    found = tool.differences({**released, kind: fresh}, released)
    assert (tool.unstable(found, "0.1.0", "0.1.1"), tool.undocumented(found, told)) == ([], [])
