"""Writes tests/surface.json: every public name with what may be relied on, as docs/extending.md promises.

Written again for each release (RELEASE.md), where its difference from the last one shows what the changelog has to say.

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.version import Version
from reference import changed_fields, new_fields
from typer.main import get_command
from typer.testing import CliRunner

import trl_opsd
from trl_opsd import OPSDConfig, OPSDTrainer
from trl_opsd.cli import doctor
from trl_opsd.cli.audit import Audit
from trl_opsd.cli.main import app
from trl_opsd.cli.options import ExtraArguments
from trl_opsd.losses import DIVERGENCES
from trl_opsd.methods import NAMED, Rewards
from trl_opsd.models.probes import Finding

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "tests" / "surface.json"
MODULES = ("trl_opsd", "trl_opsd.losses", "trl_opsd.rollout", "trl_opsd.teacher", "trl_opsd.types")
"""Their `__all__`: of the first all names are public, of the others those that `PAGES` use."""
ALSO = (
    "trl_opsd.describe.Banner",
    "trl_opsd.cli.audit.audit",
    "trl_opsd.cli.targets.write_targets",
    "trl_opsd.rollout.host.Host",
    "trl_opsd.losses.objective.Objective",
    "trl_opsd.methods.base.MethodHost",
    "trl_opsd.models.backbone.logits_of",
    "trl_opsd.types.loss.columns",
)
"""Public names of other modules, which pages of the documentation use."""
PAGES = ("README.md", *(f"docs/{name}.md" for name in ("extending", "generation", "objectives", "start", "teachers")))
"""Their code and code spans have what is public below the first module: names, members and constructors."""
OF_TRAINER = {"train", "evaluate", "predict", "save_model", "interrupted"}
GOING: dict[str, str] = {}
"""Versions in which names go that cannot say so themselves, as `"commands: plan --bytes"`; options and classes can."""

Surface = dict[str, dict[str, str]]


def surface() -> Surface:
    """What is public, by kind and name, each with what a caller may rely on."""
    found = {
        "version": {"trl_opsd": trl_opsd.__version__},
        "python": dict(_names()),
        "options": {one.name: _option(one) for one in [*new_fields(), *(ours for _, ours in changed_fields())]},
        "methods": {name: str(inspect.signature(kind)) for name, kind in NAMED.items()},
        "divergences": {name: repr(make()) for name, make in DIVERGENCES.items()},
        "metrics": {name: one.unit for name, one in OPSDTrainer.known_metrics.items()},
        "commands": dict(_commands()),
        "json": dict(_documents()),
        "files": dict.fromkeys(_files(), ""),
        "environment": dict.fromkeys(_variables(), ""),
    }
    return {kind: {name: _going(kind, name, names[name]) for name in sorted(names)} for kind, names in found.items()}


def _going(kind: str, name: str, detail: str) -> str:
    version = GOING.get(f"{kind}: {name}")
    return f"{detail}; goes in {version}" if version else detail


Difference = dict[tuple[str, str], tuple[str | None, str | None]]
"""By kind and name what something was and is, `None` where it was or is not there."""


def differences(then: Surface, now: Surface) -> Difference:
    """What is new, gone or different."""
    kinds = [kind for kind in now if kind != "version"]
    sides = {
        (kind, name): (then.get(kind, {}).get(name), now[kind].get(name))
        for kind in kinds
        for name in sorted({**then.get(kind, {}), **now[kind]})
    }
    return {one: (was, is_now) for one, (was, is_now) in sides.items() if was != is_now}


def undocumented(found: Difference, changes: str) -> list[str]:
    """The names of differences that are no code span of a section of the changelog, whole or by their last part.

    A span may go on after the name, as in `name=1` and `name(...)`.
    """
    told = set()
    for span in re.findall(r"`([^`]+)`", changes):
        heads = [re.split(r"[=(]", word)[0] for word in (span, *span.split())]
        told |= {span, *heads, *(head.lstrip("-") for head in heads), *(head.rpartition(".")[2] for head in heads)}
    return [f"{kind}: {name}" for kind, name in found if not {name, re.findall(r"[\w/<>]+", name)[-1]} & told]


def unstable(found: Difference, released: str, version: str) -> list[str]:
    """The names that are gone and were not deprecated until this version, or that a patch of a release changes."""
    then, now = Version(released), Version(Version(version).base_version)
    is_patch = not then.is_prerelease and then.release[:2] == now.release[:2]
    wrong = []
    for (kind, name), (was, is_now) in found.items():
        goes = re.search(r"goes in (?:trl_opsd )?([\d.]+\d)", was or "")
        if (is_now is None and not (goes and Version(goes[1]) <= now)) or (is_patch and was is not None):
            wrong.append(f"{kind}: {name}")
    return wrong


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
        yield path, "a class" if inspect.isclass(thing) else "a function" if callable(thing) else "a value"
        yield from _parameters(path, thing) if is_built and callable(thing) and thing is not OPSDConfig else ()
        if inspect.isclass(thing) and thing is not OPSDConfig:  # whose fields are the options
            own = [base for base in thing.__mro__ if base.__module__.startswith("trl_opsd") and base not in seen]
            members = {member for base in own for member in vars(base) if member[0] != "_"} & told
            for one in sorted(members):
                member = inspect.getattr_static(thing, one)
                yield f"{path}.{one}", "a method" if callable(getattr(thing, one, None)) else "an attribute"
                yield from _parameters(f"{path}.{one}", member) if callable(getattr(thing, one, None)) else ()
        seen.add(thing)


def _code(text: str) -> list[str]:
    """What stands in Python blocks and in code spans."""
    blocks = re.findall(r"^```python$(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [*blocks, *re.findall(r"`([^`\n]+)`", text)]


def _parameters(path: str, thing: Any) -> Iterator[tuple[str, str]]:
    """The parameters of what is called, each with its default, and when it goes, if it is deprecated."""
    goes = f"; deprecated: {said}" if (said := getattr(thing, "__deprecated__", "")) else ""
    thing = thing.__func__ if isinstance(thing, classmethod | staticmethod) else thing
    for number, one in enumerate(inspect.signature(thing).parameters.values()):
        if one.name not in ("self", "cls") and one.name[0] != "_":
            place = "by name" if one.kind is one.KEYWORD_ONLY else f"at {number}"
            default = "required" if one.default is one.empty else repr(one.default)
            yield f"{path}({one.name})", f"{place}, {default}{goes}"


def _option(field: dataclasses.Field) -> str:
    return repr(field.default)


def _commands() -> Iterator[tuple[str, str]]:
    """Each command with what its exit status says, and its parameters with their defaults."""
    for name, one in get_command(app).commands.items():
        status = re.search(r"Exit status: (.*?)\.(\n|$)", inspect.cleandoc(one.help or "") + "\n", re.DOTALL)
        yield name, f"exit status {' '.join(status[1].split()) if status else 'as train'}"
        for number, each in enumerate(one.params):
            if each.name != "help":
                is_argument = each.param_type_name == "argument"
                options = [f"at {number}"] if is_argument else [*each.opts, *each.secondary_opts]
                yield f"{name} {max(each.opts, key=len)}", f"{' '.join(options)}, {each.default!r}"
    yield from ((f"train --{one.name}", repr(one.default)) for one in dataclasses.fields(ExtraArguments))


def _documents() -> Iterator[tuple[str, str]]:
    """The keys of what commands print with `--json`."""
    yield from _keys("doctor", doctor.document(doctor.Pair("a", "a", None), [Finding("heads", "ok", "same", 0.1)]))
    student = str(ROOT / "examples" / "arithmetic" / "student")
    planned = CliRunner().invoke(app, ["plan", student, *["--prompt", "8", "--length", "8", "--json"]])
    assert not planned.exit_code, planned.stderr
    yield from _keys("plan", json.loads(planned.stdout))
    yield from ((f"audit:{one.name}", "") for one in dataclasses.fields(Audit))


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
            num_generations=2,
        )
        rows = Dataset.from_list([{"prompt": "1+1="}] * 8)
        OPSDTrainer(model, None, args, rows, methods=[Rewards(_length)]).train()
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
