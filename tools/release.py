"""Cuts a release of the commit that is checked out: builds both archives, uses each as its users do, and tags.

`make release` refuses what may not be published: placeholders, a version or a changelog that says "not yet", changes
that are not committed. `make rehearsal` lists these, goes on, and tags nothing. RELEASE.md has the steps before and
after. Nothing is uploaded: the tag starts `.github/workflows`.

    python tools/release.py [--rehearse]
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from check_wheel import REPOSITORY, build, check_contents, check_extras, check_installed, check_page
from packaging.version import Version

DIST = REPOSITORY / "dist"


def main() -> None:
    """Stops at the first error; archives are in `dist/`."""
    rehearse = "--rehearse" in sys.argv
    [version] = re.findall(r'^__version__ = "(.*)"$', read("trl_opsd/__init__.py"), re.MULTILINE)
    if found := refusals(version):
        print(f"{version} cannot be released:", *found, sep="\n  ")
        if not rehearse:
            raise SystemExit(1)
    commit = git("rev-parse", "HEAD").decode().strip()
    DIST.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        export = Path(folder, "commit")
        with tarfile.open(fileobj=io.BytesIO(git("archive", commit))) as archive:
            archive.extractall(export, filter="data")
        wheel = build(Path(folder), export)
        source = next(wheel.parent.glob("*.tar.gz"))
        check_contents(wheel)
        check_page(wheel, source)
        check_extras(wheel)
        for one in (wheel, source):
            check_installed(one, Path(folder))
            (DIST / one.name).write_bytes(one.read_bytes())
            print(f"dist/{one.name}: installed in an empty environment, where README's code has trained")
    if not rehearse and not tags(commit):
        git("tag", "--annotate", f"v{version}", "--message", f"trl_opsd {version}", commit)
        print(f"Tagged v{version}. To publish it: git push origin v{version}")


def refusals(version: str) -> list[str]:
    """Why this commit may not be released."""
    found = [f"{line}: replace it (RELEASE.md)" for line in placeholders()]
    if (parsed := Version(version)).is_prerelease or parsed.is_devrelease:
        found.append(f"trl_opsd/__init__.py: version {version} is no release")
    heading = next(line for line in read("CHANGELOG.md").splitlines() if line.startswith("## "))
    if not re.fullmatch(rf"## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", heading):
        found.append(f"CHANGELOG.md: begins with {heading!r}, expected '## {version} (<date>)'")
    if "Nothing was released yet" in read("CHANGELOG.md"):
        found.append("CHANGELOG.md: says that nothing was released yet")
    if "pip install trl_opsd" not in read("README.md"):
        found.append("README.md: does not say `pip install trl_opsd`")
    if changed := git("status", "--porcelain").decode().splitlines():
        found.append(f"not committed: {', '.join(line[3:] for line in changed[:5])}")
    if (named := tags("HEAD")) and f"v{version}" not in named:
        found.append(f"this commit has the tag {named[0]}, expected v{version}")
    if not named and git("tag", "--list", f"v{version}"):
        found.append(f"another commit has the tag v{version}")
    return found


def tags(commit: str) -> list[str]:
    """The tags of a commit: one, where a workflow builds it again."""
    return git("tag", "--points-at", commit).decode().split()


def placeholders() -> list[str]:
    """Files and lines that still have an invented name, but for those that say how to replace them."""
    own = ("tools/release.py", "RELEASE.md")
    done = subprocess.run(
        ["git", "grep", "-nIo", r"[A-Z]*-PLACEHOLDER", "--", ".", *(f":!{name}" for name in own)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    return done.stdout.splitlines()


def read(name: str) -> str:
    """A file of the repository."""
    return (REPOSITORY / name).read_text(encoding="utf-8")


def git(*command: str) -> bytes:
    """Output of a git command in the repository."""
    return subprocess.run(["git", *command], cwd=REPOSITORY, check=True, capture_output=True).stdout


if __name__ == "__main__":
    main()
