"""Links between pages lead to files and headings that exist; so do errors, files, flags and options on a page."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from functools import cache
from pathlib import Path

import pytest
from support import tiny
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments

from trl_opsd import OPSDConfig, OPSDTrainer
from trl_opsd.methods import NAMED

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
NOTES = sorted((ROOT / "benchmarks" / "notes").glob("*.md"))
"""Lab notes: their links are checked, they are no pages of the site."""
EXECUTED = {"README.md", "start.md", "teachers.md", "generation.md", "data.md", "distributed.md", "extending.md"}
"""Pages whose Python blocks `test_readme.py` and `examples/test_extending.py` run, but for fragments."""
PARSED_BY_TRL = (ScriptArguments, OPSDConfig, ModelConfig, DatasetMixtureConfig)
OF_TRAIN = {"help", "config", "task", *(one.name for config in PARSED_BY_TRL for one in dataclasses.fields(config))}
"""The flags of `examples/train.py`."""
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def without_code(text: str) -> str:
    """A page without its fenced blocks, in which brackets and number signs are not Markdown."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub forms them."""
    headings = re.findall(r"^#+ (.*)$", without_code(page.read_text(encoding="utf-8")), flags=re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    names = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain]
    return {
        name if not (before := names[:number].count(name)) else f"{name}-{before}" for number, name in enumerate(names)
    }


def broken(page: Path) -> list[str]:
    """Links of a page that lead nowhere in this repository; others are not followed."""
    text = re.sub(r"`[^`\n]*`", "", without_code(page.read_text(encoding="utf-8")))
    found = []
    for link in LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


def test_links_lead_to_existing_targets():
    assert {page.name: found for page in [*PAGES, *NOTES] if (found := broken(page))} == {}


def test_every_page_can_be_reached_from_the_readme():
    seen, to_read = set(), [ROOT / "README.md"]
    while to_read:
        page = to_read.pop()
        seen.add(page)
        links = [link.partition("#")[0] for link in LINK.findall(page.read_text(encoding="utf-8"))]
        pages = {(page.parent / link).resolve() for link in links if link.endswith(".md") and ":" not in link}
        pages -= set(NOTES)
        to_read += pages - seen - set(to_read)
    assert {page for page in PAGES if page not in seen} == set()


def test_every_page_is_in_the_navigation_of_the_site():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    shown = re.findall(r"([\w/]+\.md)$", text.partition("\nnav:")[2], flags=re.MULTILINE)
    other = {"README.md": "index.md", "AGENTS.md": "for_tools.md"}
    assert sorted(shown) == sorted({other.get(page.name, page.name) for page in PAGES})


@pytest.mark.parametrize("name", ["troubleshooting.md", "migration.md"])
def test_options_and_metrics_that_a_page_recommends_exist(name):
    """Those of others stand in the first column of a table; what is no option and no metric is listed here."""
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    text = text.partition("\n## Never run")[0]  # limits after it name parts of other libraries
    if name == "migration.md":
        text = "\n".join(line.split("|")[2] for line in text.splitlines() if line.count("|") > 2)
    columns = {"prompt", "completion", "privileged_context", "teacher_prompt", "teacher"}
    phases = {"complete", "teach", "compare", "sync", "gen", "score", "train", "doctor", "start", "step"}
    of_trl = {"completions/mean_length", "completions/clipped_ratio", "loss"}
    known = {*OPSDConfig.__dataclass_fields__, *OPSDTrainer.known_metrics} | columns | phases | of_trl
    named = re.findall(r"`([a-z_0-9]+(?:/[a-z_0-9]+)?)(?:=[^`]*)?`", text)
    assert len(named) > 20
    unknown = {one for one in named if one.removeprefix("eval_") not in known and one not in known}
    assert unknown <= {"methods", *NAMED, *tiny.REWARDS.values()}, "an argument of the trainer, and settings"


def python_blocks() -> list[tuple[str, str]]:
    """The Python blocks of all pages, with their pages; one with `...` as an argument is a fragment."""
    return [
        (page.name, block)
        for page in PAGES
        for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    ]


def test_python_blocks_are_executed_or_fragments():
    unrun = [(page, block) for page, block in python_blocks() if page not in EXECUTED and "..." not in block]
    assert unrun == []


def test_python_blocks_name_options_and_arguments_that_exist():
    known = {
        "OPSDConfig": {one.name for one in dataclasses.fields(OPSDConfig)},
        "OPSDTrainer": set(inspect.signature(OPSDTrainer).parameters),
    }
    calls = [
        (page, node.func.id, keyword.arg)
        for page, block in python_blocks()
        for node in ast.walk(ast.parse(block.replace("(..., ", "(*_, ").replace(", ...)", ", **_)")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known
        for keyword in node.keywords
        if keyword.arg is not None
    ]
    assert len(calls) > 30
    assert [one for one in calls if one[2] not in known[one[1]]] == []


WITH_OPTIONS = (
    "generation.md",
    "data.md",
    "distributed.md",
    "tools.md",
    "teachers.md",
    "objectives.md",
    "remedies.md",
    "start.md",
)


@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_options_that_a_page_sets_exist(name):
    """Code spans as `option=value`; what belongs to a server, a function or another library is listed here."""
    text = without_code((ROOT / "docs" / name).read_text(encoding="utf-8"))
    known = {one.name for one in dataclasses.fields(OPSDConfig)} | set(inspect.signature(OPSDTrainer).parameters)
    known |= {*OF_TRAIN, "dry_run", "teacher_models", "teacher_dtype", "teacher_attn_implementation"}
    known |= {setting for kind in NAMED.values() for setting in inspect.signature(kind).parameters}
    of_others = {
        "generates_out_of_process", "returns_logprobs",
        "num_shards", "compile", "use_cache", "disable_compile", "dtype", "eos_token",
        "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "metric_key_prefix", "device_map", "split_batches", "even_batches",
        "dispatch_batches", "OMP_NUM_THREADS", "spans", "r", "rollout", "target_modules", "enable_thinking",
        "init_lora_weights", "pass_bytes", "bias", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
    }  # fmt: skip
    found = set(re.findall(r"`([A-Za-z_]\w*)=[^`]*`", text))
    assert found - known - of_others == set()


def test_code_of_the_front_page_fits_the_site():
    blocks = re.findall(r"^```.*?^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4
    assert max(len(line) for block in blocks for line in block.splitlines()) <= 95, "100 columns at 1280 pixels"


def test_a_broken_link_and_a_broken_anchor_are_found(tmp_path):
    page = tmp_path / "page.md"
    (tmp_path / "other.md").write_text("# One `thing`, and [two](x.md)\n## Again\n## Again\n")
    page.write_text(
        "[a](other.md#one-thing-and-two) [b](other.md#again-1) [c](gone.md) [d](other.md#gone) `[e](no.md)`\n"
    )
    assert broken(page) == ["gone.md", "other.md#gone"]


@cache
def constants() -> list[str]:
    """All texts in the package's code."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "trl_opsd").rglob("*.py")]
    found = (node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return [one for one in found if isinstance(one, str)]


def test_every_error_quoted_in_the_limitations_exists():
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = page.partition("\n## Refused\n")[2]
    cells = [line.split(" | ")[1] for line in rows.splitlines() if line.startswith("| ")][1:]
    assert all('"' in cell for cell in cells), "a refusal without its message"
    said = "\n".join(constants())
    quoted = [words for cell in cells for words in re.findall(r'"([^"]+)"', cell)]
    assert [words for words in quoted if words not in said] == []


def test_files_named_on_a_page_exist():
    path = re.compile(r"(?<![\w/.])(?:benchmarks|examples|requirements|tests|tools|trl_opsd)/[\w/]*(?:\.\w+)?")
    named = {
        (page.name, found) for page in [*PAGES, *NOTES] for found in path.findall(page.read_text(encoding="utf-8"))
    }
    assert len(named) > 100
    metrics = {"tools/call_frequency", "tools/failure_frequency"}  # of TRL
    assert [(page, found) for page, found in named if found not in metrics and not (ROOT / found).exists()] == []


def test_flags_given_on_a_page_are_flags_of_the_script():
    text = "\n".join(re.sub(r"\\\n\s*", "", page.read_text(encoding="utf-8")) for page in [*PAGES, *NOTES])
    for script, given in re.findall(r"((?:benchmarks|examples|tests|tools)/[\w/]+\.py)((?: [^`|#\n]*)?)", text):
        source = (ROOT / script).read_text(encoding="utf-8")
        flags = re.findall(r"--([\w-]+)", given)
        parsed = OF_TRAIN if script == "examples/train.py" else set()
        assert [flag for flag in flags if f'"--{flag}"' not in source and flag not in parsed] == [], script
