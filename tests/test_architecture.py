"""Import rules of the package, read from its source; nothing is imported, so a mistake shows before it is a cycle."""

from __future__ import annotations

import ast
import configparser
import functools
import re
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parent.parent / "trl_opsd"

FLOORS = {
    "errors": 0,
    "progress": 0,
    "types": 0,
    "_compat": 1,
    "checkpoints": 1,
    "data": 1,
    "losses": 1,
    "environments": 2,
    "options": 2,
    "parallel": 2,
    "config": 3,
    "models": 3,
    "methods": 4,
    "report": 5,
    "rollout": 4,
    "teacher": 4,
    "bytes": 5,
    "prepare": 5,
    "loop": 6,
    "trainer": 7,
    "__init__": 8,
    "cli": 8,
    "__main__": 9,
}
"""A file imports its own package and lower floors only. The key is the file, or the folder it lies in."""

OPTIONAL = ("vllm", "deepspeed", "peft", "trl", "aiohttp", "pydantic")
"""Each is imported by one file or folder of `_compat/`."""

FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


def room(file: Path) -> str:
    """The key of a file in `FLOORS`."""
    return file.parts[0].removesuffix(".py")


HELD = "from trl_opsd.trainer import OPSDTrainer"
"""The trainer that objects of `loop/` hold, and that is described, which a type checker alone reads there."""


@functools.cache
def imports(file: Path, source: str) -> set[str]:
    """The full names of what a file imports, also inside functions and by `import_module`.

    `from trl_opsd import x` and `from . import x` count as `trl_opsd.x`: what is meant is the module, not the package.
    """
    package = ("trl_opsd", *file.parent.parts)
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if room(file) in ("report", "loop") and ast.unparse(node) == HELD:
            continue
        match node:
            case ast.Import(names=names):
                found |= {alias.name for alias in names}
            case ast.ImportFrom(module=module, names=names, level=level):
                above = package[: len(package) - level + 1] if level else ()
                base = ".".join([*above, *([module] if module else [])])
                found |= {f"{base}.{alias.name}" for alias in names} if base == "trl_opsd" else {base}
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                found |= {".".join(package) + name if name.startswith(".") else name}
    return found


def rooms_of(file: Path, source: str) -> set[str]:
    """The rooms of `trl_opsd` a file imports, except its own; `from trl_opsd import OPSDConfig` is room `__init__`."""
    names = [name.split(".") for name in imports(file, source)]
    ours = [parts[1:] for parts in names if parts[0] == "trl_opsd"]
    rooms = {rest[0] if rest and _exists(rest[0]) else "__init__" for rest in ours}
    return rooms - {room(file)}


def _exists(name: str) -> bool:
    return name in FLOORS or (ROOT / name).is_dir() or (ROOT / f"{name}.py").is_file()


def libraries(file: Path, source: str) -> set[str]:
    """The libraries a file imports, without the standard library."""
    return {name.partition(".")[0] for name in imports(file, source)} - sys.stdlib_module_names - {"trl_opsd"}


def too_high(file: Path, source: str) -> set[str]:
    """The rooms a file imports that are not below its own."""
    return {other for other in rooms_of(file, source) if FLOORS.get(other, 99) >= FLOORS.get(room(file), 99)}


@functools.cache
def read(file: Path) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def test_files_import_lower_floors_only():
    assert {str(file): found for file in FILES if (found := too_high(file, read(file)))} == {}


def executed(source: str) -> str:
    """A source without what a type checker alone reads."""
    tree = ast.parse(source)
    tree.body = [one for one in tree.body if not (isinstance(one, ast.If) and ast.unparse(one.test) == "TYPE_CHECKING")]
    return ast.unparse(tree)


def test_no_circle_within_a_room():
    """Also through imports within functions."""
    files = {".".join(("trl_opsd", *file.with_suffix("").parts)).removesuffix(".__init__"): file for file in FILES}
    arrows = {name: (imports(file, executed(read(file))) & files.keys()) - {name} for name, file in files.items()}

    def reached(start):
        found, ahead = set(), [*arrows[start]]
        while ahead:
            if (one := ahead.pop()) not in found:
                found.add(one)
                ahead += arrows[one]
        return found

    assert {name for name in files if name in reached(name)} == set()


def test_losses_import_torch_only():
    imported = {file.name: libraries(file, read(file)) for file in FILES if room(file) == "losses"}
    assert {name for name, found in imported.items() if "triton" in found} <= {"fused.py", "device.py"}
    assert set().union(*imported.values()) <= {"torch", "triton"}


def test_only_the_trainer_knows_both_teacher_and_rollout():
    know_both = {room(file) for file in FILES if {"teacher", "rollout"} <= rooms_of(file, read(file)) | {room(file)}}
    assert know_both <= {"trainer", "__init__"}


@pytest.mark.parametrize("library", OPTIONAL)
def test_optional_libraries_are_imported_in_one_place(library):
    importers = [file for file in FILES if library in libraries(file, read(file))]
    places = {file.parts[:2] for file in importers}
    assert len(places) == 1, importers or f"nothing imports {library}: take it out of OPTIONAL"
    assert {folder for folder, _ in places} == {"_compat"}, importers


GUARDED = {"triton": "comes with a torch for CUDA", "trackio": "is asked for where `report_to` names it"}
"""Libraries that are imported only where they are found."""
SOLD_AS = {"annotated_types": "annotated-types", "PIL": "pillow", "yaml": "pyyaml", "vl_convert": "vl-convert-python"}
"""Names on the index, where they differ."""
OF_OTHERS = {"compressed-tensors"}
"""What transformers imports to load what we save."""


def test_imported_libraries_are_declared():
    config = configparser.ConfigParser()
    config.read(ROOT.parent / "setup.cfg")
    extras = config["options.extras_require"]
    lines = [
        config["options"]["install_requires"],
        *(extras[name] for name in ("vllm", "deepspeed", "server", "images", "quantization")),
    ]
    declared = {re.match(r"[\w-]+", line)[0] for line in "\n".join(lines).split()}
    imported = {SOLD_AS.get(library, library) for file in FILES for library in libraries(file, read(file))}
    assert imported - GUARDED.keys() == declared - OF_OTHERS
