"""Completes TRL's model card: which model was trained, who taught it, by which method and objective.

TRL's names the base model only if that is on the Hub (else "None"), no teacher, and one paper for every method.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from trl_opsd._compat.peft import is_peft, without_peft
from trl_opsd._compat.sharding import class_of
from trl_opsd._compat.trl import DistillationTrainer, get_config_model_id
from trl_opsd._compat.versions import versions
from trl_opsd.methods.quantization import FOLDER, StudentQuantization
from trl_opsd.options.table import is_set, shape_in_words, table, temperatures_in_words
from trl_opsd.report.records import PAGE

SELF_DISTILLATION = {
    "title": "Self-Distilled Reasoner: On-Policy Self-Distillation for Large Language Models",
    "id": "2601.18734",
    "citation": textwrap.dedent("""\
        @article{zhao2026selfdistilled,
            title   = {{Self-Distilled Reasoner: On-Policy Self-Distillation for Large Language Models}},
            author  = {Siyan Zhao and Zhihui Xie and Mengchen Liu and Jing Huang and Guan Pang and Feiyu Chen and Aditya Grover},
            year    = 2026,
            journal = {arXiv preprint arXiv:2601.18734},
        }"""),  # noqa: E501
}
"""The paper of a student that is its own teacher; TRL's is that of distillation from another model."""

_FIGURES = re.compile(r"(.+_)?(divergence/mean|rewards/.+/mean|certificate/.+)")
"""Names in the log that the card shows, also of evaluations."""
_MARKS = re.compile(r"\[([^\]]+)\]\([^)]+\)|`")
"""Markdown links and backticks."""
_BASE, _PROCEDURE, _UNNAMED = "This model is a fine-tuned version of [", "## Training procedure", 'model="None"'
"""What is replaced in TRL's card: the beginnings of two lines, and a part of another."""


def complete(trainer: DistillationTrainer, settings: Mapping[str, str], dataset_name: str | None) -> None:
    """Completes the `README.md` that TRL has written to the output folder.

    `settings` says how it is trained, in words by topic; a card is published, so it has no names of folders and no
    data.
    """
    folder = trainer.args.output_dir
    path = Path(folder) / "README.md"
    card = ModelCard.load(path)
    of_dataset = f" on the [{dataset_name}](https://huggingface.co/datasets/{dataset_name}) dataset"
    base = f"This model is a fine-tuned version of {_shown(trainer.model)}{of_dataset if dataset_name else ''}."
    lines = [base if line.startswith(_BASE) else line for line in card.text.split("\n")]
    after = lines.index(_PROCEDURE) + 1
    lines[after:after] = [
        "",
        *(f"- {topic[0].upper()}{topic[1:]}: {text}" for topic, text in {**_taught(trainer), **settings}.items()),
        *([f"- Curves and completions: [{PAGE}]({PAGE})"] if trainer.args.report else []),
        *_made(trainer),
        *_served(trainer),
        *figures(trainer.state.log_history),
    ]
    card.text = "\n".join(lines).replace(_UNNAMED, f'model="{trainer.hub_model_id or folder}"')
    if (known := _hub_id(_path(trainer.model))) is not None:
        card.data.base_model = known
    card.save(path)


def about(trainer: DistillationTrainer, settings: Mapping[str, str]) -> dict[str, str]:
    """Student, teachers, objective and settings by topic, without markup, for the report."""
    texts = {"student": _shown(trainer.model), **_taught(trainer), **settings}
    return {topic.replace("`", ""): _MARKS.sub(r"\1", text) for topic, text in texts.items()}


def _taught(trainer: DistillationTrainer) -> dict[str, str]:
    args, several = trainer.args, len(trainer.teachers) > 1
    taught = {
        f"teacher `{name}`" if several else "teacher": _teacher(trainer, it) for name, it in trainer.teachers.items()
    }
    source = "its own completions"
    if args.lmbda < 1:
        own = f"{source} for a share of {args.lmbda:g} of the rows, and "
        source = f"{own if args.lmbda else ''}completions of the {'teacher' if args.seq_kd else 'dataset'}"
    at, shape = temperatures_in_words(*trainer.temperatures), shape_in_words(args) + trainer.methods.words
    return {
        **taught,
        "objective": f"`{trainer.divergence!r}` at {at}{shape}, over {source}",
    }


def _made(trainer: DistillationTrainer) -> list[str]:
    """What reproduces and explains the run: its seed, the version of this package, and the papers that it follows."""
    objective = getattr(trainer.divergence, "of", trainer.divergence)  # of buckets of a teacher's top tokens
    helps = {one.name: one.metadata.get("help", "") for one in fields(trainer.args)}
    used = [name for name in table(type(trainer.args)) if is_set(trainer.args, name)]
    explained = [type(objective).__doc__ or "", *(type(one).__doc__ or "" for one in trainer.methods if one.words)]
    told = " ".join([*explained, *(str(helps[name]) for name in used)])
    papers = dict.fromkeys(re.findall(r"arXiv\s+(\d{4}\.\d{5})", told))
    links = ", ".join(f"[arXiv {one}](https://arxiv.org/abs/{one})" for one in papers)
    by = ", ".join(f"{name} {number}" for name, number in versions().items() if name in ("trl_opsd", "torch"))
    return [f"- Made with: {by}, seed {trainer.args.seed}", *[f"- Objective and methods follow: {links}"] * bool(links)]


def _served(trainer: DistillationTrainer) -> list[str]:
    """What computes as the student did: the weights beside that folder, or an adapter's base by its name, do not."""
    if trainer.methods.get(StudentQuantization) is None:
        return []
    return [f"- To serve: {'this adapter on the base' if is_peft(trainer.model) else 'the model'} in `{FOLDER}`"]


def _teacher(trainer: DistillationTrainer, teacher: Any) -> str:
    args = trainer.args
    if args.teacher_model_kind is None:
        model, adapter = getattr(teacher, "model", None), getattr(getattr(teacher, "placement", None), "adapter", None)
        if adapter is not None:
            return f"the adapter {_linked(adapter) or f'`{Path(adapter).name}`'} of {_shown(model)}"
        return f"a `{type(teacher).__name__}`" if model is None else _shown(model)
    kinds = {
        "base": f"the model itself before training{', without its adapter' if is_peft(trainer.model) else ''}",
        "ema": "an exponential moving average of the model itself "
        f"(`teacher_update_rate={args.teacher_update_rate:g}`)",
        "live": "the current model itself",
    }
    return f"{kinds[args.teacher_model_kind]}, given context that the student did not see"


def figures(logs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The first and the last value of divergences and rewards, as the lines of a table; none before the first log."""
    names = dict.fromkeys(name for log in logs for name in log if _FIGURES.fullmatch(name))
    found = {name: [(log[name], log["step"]) for log in logs if log.get(name) is not None] for name in names}
    ends = {name.replace("|", "/"): (values[0], values[-1]) for name, values in found.items() if values}
    rows = [
        f"| `{name}` | {' | '.join(f'{value:.4g} (step {at})' for value, at in two)} |" for name, two in ends.items()
    ]
    return ["", "| | first | last |", "|---|---|---|", *rows] if rows else []


def _path(model: Any) -> str:
    return str(get_config_model_id(model.config) or "")


def _shown(model: Any) -> str:
    """A model in a sentence: with a link if it is on the Hub, by the name of its folder, or by its class."""
    path, kind = _path(model), class_of(without_peft(model)).__name__
    return _linked(path) or (f"`{Path(path).name}` (a local `{kind}`)" if path else f"an unnamed `{kind}`")


def _linked(path: str) -> str | None:
    return None if (known := _hub_id(path)) is None else f"[{known}](https://huggingface.co/{known})"


def _hub_id(path: str) -> str | None:
    """The id of a model on the Hub, also of its folder in the cache; `None` for any other folder."""
    # A snapshot in the cache: `models--owner--name/snapshots/<commit>`.
    cached = [part for part in Path(path).parts if part.startswith("models--")]
    if cached:
        return cached[-1].removeprefix("models--").replace("--", "/")
    try:
        validate_repo_id(path)
    except HFValidationError:
        return None
    return path if path and not os.path.isdir(path) else None  # a folder may look like `owner/name`
