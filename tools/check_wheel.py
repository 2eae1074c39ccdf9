"""Builds the wheel and uses it as users do: as an index shows it, and as `pip` installs it today.

The latter is an empty environment with the newest of everything but torch (of which an index may serve a CPU build in
the locked version alone), first without extras: README's code trains there, on toys, and the command takes its one
step. Then with the small extras. That all extras can be installed together is resolved, for each Python, as well as
each lower bound beside them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCES = ("trl_opsd", "setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE", "CITATION.cff", "MANIFEST.in")
PACKAGING = REPOSITORY / ".packaging"
"""Tools that `make wheel` installs apart."""
PYTHONS = ("3.11", "3.12", "3.13")
RESOLVED = ("torch", "transformers", "trl", "vllm", "deepspeed", "torchao", "compressed-tensors")

README = """
import datasets, importlib.metadata, importlib.util, pathlib, re, sys
sys.path.append(sys.argv[1] + "/tests")
import trl_opsd
from support import tiny
for name, width in {"0.5B": 32, "1.5B": 48}.items():
    tiny.qwen2(width).save_pretrained(f"Qwen/Qwen2.5-{name}-Instruct")
    tiny.tokenizer().save_pretrained(f"Qwen/Qwen2.5-{name}-Instruct")
datasets.load_dataset = lambda *_, **__: tiny.rows(16)
config = trl_opsd.OPSDConfig
small = {"max_steps": 2, "max_completion_length": 8, "logging_steps": 1, "use_cpu": True}
trl_opsd.OPSDConfig = lambda **given: config(**given, **small)
[code] = re.findall("```python\\n(.*?)```", pathlib.Path(sys.argv[1], "README.md").read_text(), flags=re.DOTALL)
names = {}
exec(code, names)
losses = [row["loss"] for row in names["trainer"].state.log_history if "loss" in row]
assert len(losses) == 2 and min(losses) > 0, losses
assert not importlib.util.find_spec("aiohttp"), "an extra is installed: what a plain install lacks would not show"
libraries = ("torch", "transformers", "trl", "peft", "datasets")
versions = [f"{name} {importlib.metadata.version(name)}" for name in libraries]
print("README's code trained with", *versions, "losses", *losses)
tiny.rows(16).to_json("rows.jsonl")
"""
DRY_RUN = (
    *("--model_name_or_path", "Qwen/Qwen2.5-0.5B-Instruct"),
    *("--teacher_model_name_or_path", "Qwen/Qwen2.5-1.5B-Instruct"),
    *("--dataset_name", "rows.jsonl", "--max_completion_length", "8", "--use_cpu", "--output_dir", "dry"),
)
WITH_SMALL_EXTRAS = "import trl_opsd.teacher.servers, aiohttp"


def main() -> None:
    """Stops at the first error."""
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder))
        check_contents(wheel)
        check_page(wheel)
        check_extras(wheel)
        pip = check_installed(wheel, Path(folder))
        run(*pip, "install", "-q", f"{wheel}[server,images]", at=folder)
        run(pip[0], "-I", "-c", WITH_SMALL_EXTRAS, at=folder)


def check_installed(archive: Path, folder: Path) -> tuple[object, ...]:
    """Installs an archive in an empty environment, and trains there as README says; returns the `pip` of it."""
    plain = folder / f"plain{archive.suffix}"
    venv.create(plain, with_pip=True)
    pip = (plain / "bin" / "python", "-m", "pip", "--disable-pip-version-check")
    run(*pip, "install", "-q", "-r", REPOSITORY / "requirements" / "torch.txt", at=folder)
    run(*pip, "install", "-q", archive, at=folder)
    run(plain / "bin" / "trl-opsd", "--help", at=folder, quiet=True)
    run(pip[0], "-I", "-c", README, REPOSITORY, at=folder)
    run(plain / "bin" / "trl-opsd", "train", "--dry_run", *DRY_RUN, at=folder, quiet=True)
    run(pip[0], REPOSITORY / "examples/quickstart.py", "--steps", "2", at=folder, quiet=True)
    return pip


def check_page(*archives: Path) -> None:
    """Renders README as an index does; its links are absolute, and those into the repository lead to what is there."""
    sys.path.append(str(PACKAGING))
    from readme_renderer import markdown
    from twine.commands.check import check

    assert not check([*map(str, archives)], strict=True), "twine would not upload this"
    with zipfile.ZipFile(archives[0]) as wheel:
        [name] = [one for one in wheel.namelist() if one.endswith(".dist-info/METADATA")]
        metadata = message_from_bytes(wheel.read(name))
    urls = dict(one.split(", ", 1) for one in metadata.get_all("Project-URL"))
    page = markdown.render(str(metadata.get_payload(decode=True), "utf-8")) or ""
    links = [one for one in re.findall(r'(?:href|src)="([^"]*)"', page) if not one.startswith("#")]
    inside = [one.removeprefix(urls["Source"]) for one in links if one.startswith(f"{urls['Source']}/")]
    paths = [one.partition("#")[0].split("/", 3)[3] for one in inside]
    assert len(paths) > 10, f"README is not rendered, or has hardly a link: {page[:200]}"
    lost = [path for path in paths if not (REPOSITORY / path).exists()]
    lost += [one for one in links if not one.startswith("https://")]
    assert not lost, f"links of README that lead nowhere: {lost}"


def check_extras(wheel: Path) -> None:
    """Resolves all extras together as `pip` would today, and the lower bounds of all but vLLM, which has its own."""
    from check_versions import EXTRAS, lower_bounds  # which imports this file

    newest = [(python, "all", []) for python in PYTHONS]
    index = {"UV_DEFAULT_INDEX": "PIP_INDEX_URL", "UV_INDEX": "PIP_EXTRA_INDEX_URL"}
    env = os.environ | {ours: os.environ[of_pip] for ours, of_pip in index.items() if os.environ.get(of_pip)}
    asked = []
    for python, extras, pins in (*newest, (PYTHONS[0], ",".join(EXTRAS), lower_bounds())):
        wanted = wheel.parent / f"{python}-{len(pins)}.in"
        wanted.write_text("\n".join([f"trl_opsd[{extras}] @ {wheel.as_uri()}", *pins]))
        command = (PACKAGING / "bin" / "uv", "pip", "compile", "-q", "--no-header", "--no-annotate")
        command = (*map(str, command), f"--python-version={python}", str(wanted))
        began = subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        asked.append((f"Python {python} [{extras}]{', lower bounds' if pins else ''}", began))
    for name, began in asked:  # which wait for the index, all at once
        out, errors = began.communicate()
        assert not began.returncode, f"{name} cannot be installed together:\n{errors}"
        found = dict(line.split("==") for line in out.splitlines() if "==" in line)
        print(f"{name}:", *(f"{one} {found[one]}" for one in RESOLVED if one in found))


def build(folder: Path, repository: Path = REPOSITORY) -> Path:
    """Builds both archives from a copy, so that no stale `build/` is used, and the wheel from the source archive."""
    source, dist = folder / "source", folder / "dist"
    copy(SOURCES, repository, source)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, source, at=folder, quiet=True)
    (wheel,) = dist.glob("*.whl")
    return wheel


def copy(names: tuple[str, ...], repository: Path, folder: Path) -> None:
    """Copies files and folders of a repository, without the bytecode of earlier runs."""
    folder.mkdir()
    for name in names:
        if (source := repository / name).is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder)


def check_contents(wheel: Path) -> None:
    """Nothing of the package is missing in the wheel, and it holds nothing besides the package and its metadata."""
    held = set(zipfile.ZipFile(wheel).namelist())
    kinds = ("*.py", "*.yaml", "template/*", "py.typed")
    inside = [path for kind in kinds for path in (REPOSITORY / "trl_opsd").rglob(kind)]
    package = {str(path.relative_to(REPOSITORY)) for path in inside}
    metadata = {name for name in held if name.partition("/")[0].endswith(".dist-info")}
    licences = {name for name in metadata if name.endswith("/LICENSE")}
    missing, unwanted = (package | (set() if licences else {"LICENSE"})) - held, held - metadata - package
    assert not missing, f"{wheel.name} lacks {sorted(missing)}"
    assert not unwanted, f"{wheel.name} also holds {sorted(unwanted)}"


def run(*command: object, at: str | Path, quiet: bool = False) -> None:
    """Runs a command outside the repository, so that nothing is imported from it; prints the output if it fails."""
    done = subprocess.run([*map(str, command)], cwd=at, capture_output=quiet, text=True)
    if done.returncode:
        raise SystemExit(f"{done.stdout or ''}{done.stderr or ''}failed: {' '.join(map(str, command[:4]))}")


if __name__ == "__main__":
    main()
