"""README as an index shows it, where links into the repository would lead nowhere, and the names of CITATION.cff.

All else stands in setup.cfg.
"""

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent


def for_an_index(text: str, repository: str, tag: str) -> str:
    """Makes links to files of the repository absolute: pages, folders, and pictures as raw files."""

    def absolute(found: re.Match[str]) -> str:
        path = found[2].partition("#")[0]
        kind = "raw" if found[1][0] == "!" else "blob" if Path(path).suffix or path == "LICENSE" else "tree"
        return f"{found[1]}({repository}/{kind}/{tag}/{found[2]})"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    picture, link = r"(!\[[^\]]*\])", r"((?<!!)\[(?:!\[[^\]]*\]\([^)]*\)|[^\]])*\])"
    for kind in (picture, link):  # a picture may be the text of a link
        parts[::2] = [re.sub(kind + r"\((?!\w+:|#)([^)\s]+)\)", absolute, part) for part in parts[::2]]
    return "".join(parts)


cited = (HERE / "CITATION.cff").read_text(encoding="utf-8")
names = dict(re.findall(r'^[ -]*([a-z-]+): "?(.*?)"?$', cited, re.MULTILINE))
repository = names["repository-code"]
source = (HERE / "trl_opsd" / "__init__.py").read_text(encoding="utf-8")
[version] = re.findall(r'^__version__ = "(.*)"$', source, re.MULTILINE)
readme = (HERE / "README.md").read_text(encoding="utf-8")
setup(
    author=names["name"],
    author_email=names["email"],
    project_urls={
        "Source": repository,
        "Documentation": names["url"],
        "Changes": f"{repository}/blob/main/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    },
    long_description=for_an_index(readme, repository, f"v{version}"),
)
