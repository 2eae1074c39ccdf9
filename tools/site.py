"""Hooks of the documentation's site: its address; README and its neighbours become pages, other links plain text.

`tests/test_docs.py` checks those links in the repository, where they lead somewhere.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "examples/README.md": "examples.md",
    "examples/published/README.md": "published.md",
    "CHANGELOG.md": "",
    "SECURITY.md": "",
    "CONTRIBUTING.md": "",
    "RELEASE.md": "",
    "AGENTS.md": "for_tools.md",  # where file names have no case, `agents.md` is the same
}
"""Files beside `docs` that are pages, and their other names there."""
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """Sets the address, which is one of the names that a person fills in."""
    config.site_url = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["url"]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are no files of `docs`."""
    for name, other in PAGES.items():
        text = re.sub(r"\]\((?:\.\./)*docs/", "](", (ROOT / name).read_text(encoding="utf-8"))
        files.append(File.generated(config, other or name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Points links at pages, and leaves the text of those to other files of the repository."""

    def target(found: re.Match[str]) -> str:
        text, path, anchor = found.group(1), found.group(2), found.group(3) or ""
        name = path.removeprefix("../")
        name = PAGES.get(name) or PAGES.get(f"{name}/README.md") or name
        return f"[{text}]({name}{anchor})" if files.get_file_from_path(name) else text

    return _LINK.sub(target, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Writes the types of docstrings, which are in the notation of TRL and transformers, as plain names."""
    return _CODE.sub(lambda found: f"<code>{_plain(found.group(1))}</code>", _LINKED.sub(r"<code>\1</code>", html))


_LINKED = re.compile(r"\[<code>~?(?:[\w.]+\.)?(\w+)</code>\]")
_CODE = re.compile(r"<code>([^<]*`[^<]*)</code>")


def _plain(types: str) -> str:
    """`[`~a.b.C`] or `str`, *optional*` as `C or str, optional`."""
    names = re.sub(r"\[`~?(?:[\w.]+\.)?(\w+)`\]", r"\1", types)
    return names.replace("`", "").replace("*optional*", "optional").replace("*", "")
