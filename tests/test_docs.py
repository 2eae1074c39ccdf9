"""Links between pages lead to files and headings that exist; so do errors, files, flags and options on a page."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from pathlib import Path

from trl_opsd import OPSDConfig, OPSDTrainer

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
NOTES = [*sorted((ROOT / "benchmarks" / "notes").glob("*.md")), ROOT / "examples" / "README.md"]
"""Lab notes and the index of examples: their links are checked, they are no pages of the site."""
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


def python_blocks() -> list[tuple[str, str]]:
    """The Python blocks of all pages, with their pages; one with `...` as an argument is a fragment."""
    return [
        (page.name, block)
        for page in PAGES
        for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    ]


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


def present(page: Path) -> str:
    """A page without the scripts of earlier commits, as in "at commit 0123abcd by `python benchmarks/a.py --b 1`"."""
    return re.sub(r"(?<=commit )[0-9a-f]{8} by (`[^`]*`|\S+)", "", page.read_text(encoding="utf-8"))


def test_files_named_on_a_page_exist():
    path = re.compile(r"(?<![\w/.])(?:benchmarks|examples|requirements|tests|tools|trl_opsd)/[\w/]*(?:\.\w+)?")
    named = {(page.name, found) for page in [*PAGES, *NOTES] for found in path.findall(present(page))}
    assert len(named) > 100
    metrics = {"tools/call_frequency", "tools/failure_frequency"}  # of TRL
    assert [(page, found) for page, found in named if found not in metrics and not (ROOT / found).exists()] == []
