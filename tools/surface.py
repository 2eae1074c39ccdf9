"""Writes tests/surface.json: every public name with what may be relied on, as docs/stability.md promises.

The file is that of the last release. `tests/test_stability.py` compares the package with it: each difference needs a
line in the changelog, and nothing goes that was not deprecated before. Written again for each release (RELEASE.md).

    python tools/surface.py
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from packaging.version import Version
from reference import changed_fields, new_fields
from typer.main import get_command
from typer.testing import CliRunner

import trl_opsd
from trl_opsd import OPSDConfig, OPSDTrainer
from trl_opsd.cli.audit.measure import Audit, Measured
from trl_opsd.cli.doctor import checks as doctor
from trl_opsd.cli.main import app
from trl_opsd.cli.train.options import ExtraArguments
from trl_opsd.losses import DIVERGENCES
from trl_opsd.losses.registry import Settings
from trl_opsd.methods import METRICS
from trl_opsd.models.probes import Finding
from trl_opsd.options.table import table

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "tests" / "surface.json"
MODULES = ("trl_opsd", "trl_opsd.losses", "trl_opsd.rollout", "trl_opsd.teacher", "trl_opsd.types")
"""Their `__all__`: of the first all names are public, of the others those that `PAGES` use."""
ALSO = (
    "trl_opsd.banner.Banner",
    "trl_opsd.cli.audit.measure.audit",
    "trl_opsd.host.Host",
    "trl_opsd.losses.objective.Objective",
    "trl_opsd.methods.base.MethodHost",
    "trl_opsd.models.backbone.logits_of",
    "trl_opsd.types.loss.columns",
)
"""Public names of other modules, which pages of the documentation use."""
PAGES = ("README.md", *(f"docs/{name}.md" for name in ("extending", "generation", "objectives", "start", "teachers")))
"""Their code and code spans have what is public below the first module: names, members and constructors."""
OF_TRAINER = {"train", "evaluate", "predict", "save_model"}

Surface = dict[str, dict[str, str]]


def surface() -> Surface:
    """What is public, by kind and name, each with what a caller may rely on."""
    found = {
        "python": dict(_names()),
        "options": {one.name: _option(one) for one in [*new_fields(), *(ours for _, ours in changed_fields())]},
        "divergences": {name: repr(make(Settings())) for name, make in DIVERGENCES.items()},
        "metrics": {name: one.unit for name, one in METRICS.items()},
        "commands": dict(_commands()),
        "json": dict(_documents()),
        "files": dict.fromkeys(_files(), ""),
        "environment": dict.fromkeys(_variables(), ""),
    }
    return {kind: dict(sorted(names.items())) for kind, names in found.items()}


def differences(then: Surface, now: Surface) -> dict[tuple[str, str], tuple[str | None, str | None]]:
    """What is new, gone or different, by kind and name: what it was and is, `None` where it was or is not there."""
    each = {(kind, name) for side in (then, now) for kind, names in side.items() for name in names}
    sides = {one: (then.get(one[0], {}).get(one[1]), now.get(one[0], {}).get(one[1])) for one in sorted(each)}
    return {one: (was, is_now) for one, (was, is_now) in sides.items() if was != is_now}


def undocumented(found: Mapping[tuple[str, str], Any], changes: str) -> list[str]:
    """The names of differences that no code span of a section of the changelog has, in whole or from its last dot."""
    told = set(re.findall(r"[\w/.-]+", " ".join(re.findall(r"`([^`]+)`", changes))))
    return [f"{kind}: {name}" for kind, name in found if not {name, name.rpartition(".")[2]} & told]


def undeprecated(found: Mapping[tuple[str, str], tuple[str | None, str | None]], version: str) -> list[str]:
    """The names that are gone, and were not deprecated until this version."""
    gone = {f"{kind}: {name}": was or "" for (kind, name), (was, is_now) in found.items() if is_now is None}
    goes = {name: re.search(r"goes in (?:trl_opsd )?([\d.]+\d)", was) for name, was in gone.items()}
    return [name for name, match in goes.items() if not match or Version(match[1]) > Version(version)]


def _names() -> Iterator[tuple[str, str]]:
    pages = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    code = "\n".join(_code(pages))
    told = set(re.findall(r"\w+", code)) | OF_TRAINER
    listed = [(module, name) for module in MODULES for name in importlib.import_module(module).__all__]
    public = [f"{module}.{name}" for module, name in listed if module == MODULES[0] or name in told]
    seen: set[Any] = set()
    for path in [*public, *ALSO]:
        module, _, name = path.rpartition(".")
        thing = getattr(importlib.import_module(module), name)
        if thing in seen:
            continue
        is_built = not inspect.isclass(thing) or re.search(rf"\b{name}\(", code)
        yield path, _called(thing) if is_built else "a class"
        if inspect.isclass(thing) and thing is not OPSDConfig:  # whose fields are the options
            own = [base for base in thing.__mro__ if base.__module__.startswith("trl_opsd") and base not in seen]
            members = {member for base in own for member in vars(base) if member[0] != "_"} & told
            yield from ((f"{path}.{one}", _called(inspect.getattr_static(thing, one))) for one in sorted(members))
        seen.add(thing)


def _code(text: str) -> list[str]:
    """What stands in Python blocks and in code spans."""
    blocks = re.findall(r"^```python$(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [*blocks, *re.findall(r"`([^`\n]+)`", text)]


def _called(thing: Any) -> str:
    """How something is called: its parameters with their defaults, without types."""
    goes = f" deprecated: {said}" if (said := getattr(thing, "__deprecated__", "")) else ""
    thing = thing.__func__ if isinstance(thing, classmethod | staticmethod) else thing
    if not callable(thing) or thing is OPSDConfig:
        return f"an attribute{goes}" if thing is not OPSDConfig else "see options"
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return f"an error, {', '.join(base.__name__ for base in thing.__bases__)}"
    bare = inspect.signature(thing)
    kept = [one.replace(annotation=one.empty) for one in bare.parameters.values() if one.name != "self"]
    return f"{bare.replace(parameters=kept, return_annotation=bare.empty)}{goes}"


def _option(field: dataclasses.Field) -> str:
    option = table(OPSDConfig).get(field.name)
    goes = f"; deprecated, goes in {option.goes}" if option and option.goes else ""
    return f"{field.default!r}{goes}"


def _commands() -> Iterator[tuple[str, str]]:
    """Each command with its parameters and what its exit status says."""
    for name, one in get_command(app).commands.items():  # type: ignore[attr-defined]
        given = [*(max(each.opts, key=len) for each in one.params if each.name != "help")]
        status = re.search(r"Exit status: (.*?)\.(\n|$)", inspect.cleandoc(one.help or "") + "\n", re.DOTALL)
        yield name, f"{' '.join(given)}; exit status {' '.join(status[1].split()) if status else 'as train'}"
    yield "train's options besides", " ".join(f"--{one.name}" for one in dataclasses.fields(ExtraArguments))


def _documents() -> Iterator[tuple[str, str]]:
    """The keys of what commands print with `--json`."""
    side = SimpleNamespace(source="a")
    pair: Any = SimpleNamespace(student=side, teacher=side, tiny=False)
    yield from _keys("doctor", json.loads(doctor.document(pair, [Finding("heads", "ok", "same", 0.1)])))
    student = str(ROOT / "examples" / "arithmetic" / "student")
    planned = CliRunner().invoke(app, ["plan", student, *["--prompt", "8", "--length", "8", "--json"]])
    assert not planned.exit_code, planned.stderr
    yield from _keys("plan", json.loads(planned.stdout))
    for kind, at in ((Audit, ""), (Measured, "candidates[].")):
        yield from ((f"audit:{at}{one.name}", "") for one in dataclasses.fields(kind) if one.name != "samples")


def _keys(command: str, document: Any, at: str = "") -> Iterator[tuple[str, str]]:
    """The keys of a document, and of its lists' first items; those of tables by name are data."""
    for key, value in document.items():
        yield f"{command}:{at}{key}", type(value).__name__
        if isinstance(value, list) and value and isinstance(value[0], dict):
            yield from _keys(command, value[0], f"{at}{key}[].")


def _files() -> list[str]:
    """Our files in the folder of a run that does much; those of transformers, peft and DeepSpeed are theirs."""
    from datasets import Dataset

    model = str(ROOT / "examples" / "arithmetic" / "student")
    with tempfile.TemporaryDirectory() as folder:
        args = OPSDConfig(
            folder,
            use_cpu=True,
            teacher_model_kind="ema",
            teacher_temperature=2.0,
            max_steps=1,
            save_steps=1,
            max_completion_length=4,
            per_device_train_batch_size=2,
            log_completions=True,
            num_completions_to_print=0,
            report=True,
            report_to="none",
            disable_tqdm=True,
            skip_prompts="flat_groups",
            num_generations=2,
        )
        rows = Dataset.from_list([{"prompt": "1+1="}] * 8)
        OPSDTrainer(model, None, args, rows, reward_funcs=_length).train()
        paths = [str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()]
    ours = [path for path in paths if re.search(r"(^|/)(opsd_|ema_teacher|completions/|report)", path)]
    return sorted({re.sub(r"\d+", "N", path) for path in ours})


def _length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(one)) for one in completions]


def _variables() -> set[str]:
    """The environment variables that the package reads for itself."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in Path(trl_opsd.__file__).parent.rglob("*.py")]
    texts = (one.value for tree in trees for one in ast.walk(tree) if isinstance(one, ast.Constant))
    return {one for one in texts if isinstance(one, str) and re.fullmatch(r"TRL_OPSD_[A-Z_]+", one)}


def recorded(found: Surface) -> str:
    """As it stands in the file."""
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Writes the file."""
    FILE.write_text(recorded(surface()), encoding="utf-8")


if __name__ == "__main__":
    main()
