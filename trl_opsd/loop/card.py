"""Completes TRL's model card: which model was trained, who taught it, by which method and objective.

TRL's names the base model only if that is on the Hub (else "None"), no teacher, and one paper for every method.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from trl_opsd._compat.peft import is_peft, without_peft
from trl_opsd._compat.sharding import class_of
from trl_opsd._compat.trl import DistillationTrainer, get_config_model_id
from trl_opsd.config import OPSDConfig
from trl_opsd.losses import Divergence
from trl_opsd.options.words import shape_in_words, temperatures_in_words
from trl_opsd.report.files import PAGE

__all__ = ["SEAMS", "Cards"]

SEAMS: dict[str, tuple[str, ...]] = {
    "create_model_card": ("self", "model_name", "dataset_name", "tags"),
}
"""Overridden methods of TRL's trainer, with their parameters; a test compares them with the installed ones."""

_SELF_DISTILLATION = {
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

_OWN = {
    "base": "the model itself as it was before training",
    "ema": "an exponential moving average of the model itself",
    "live": "the model itself as it is at each step",
}
"""What each `teacher_model_kind` is; all of them read more than the student."""

_FIGURES = re.compile(r"(.+_)?(divergence|rewards/.+)/mean")
"""Names in the log that the card shows, also of evaluations."""
_MARKS = re.compile(r"\[([^\]]+)\]\([^)]+\)|`")
"""Markdown links and backticks."""
_BASE, _PROCEDURE, _UNNAMED = "This model is a fine-tuned version of [", "## Training procedure", 'model="None"'
"""What is replaced in TRL's card: the beginnings of two lines, and a part of another."""


class Cards(DistillationTrainer):
    """A trainer whose model cards name base model, teachers, objective and figures."""

    args: OPSDConfig
    model: Any
    teachers: Mapping[str, Any]
    divergence: Divergence

    @property
    def temperatures(self) -> tuple[float, float]:
        """Softmax temperatures of the student and of the teacher in the loss."""
        raise NotImplementedError

    @property
    def settings(self) -> Mapping[str, str]:
        """How it is trained, in words by topic; a card is published, so it has no names of folders and no data."""
        raise NotImplementedError

    @property
    def _at(self) -> str:
        return temperatures_in_words(*self.temperatures)

    @property
    def _source(self) -> str:
        if self.args.lmbda == 1:
            return "its own completions"
        own = f"its own completions for a share of {self.args.lmbda:g} of the rows, and "
        return f"{own if self.args.lmbda else ''}completions of the {'teacher' if self.args.seq_kd else 'dataset'}"

    @property
    def _name(self) -> str:
        kind = self.args.teacher_model_kind
        return "on-policy distillation" if kind is None else "on-policy self-distillation (OPSD)"

    @property
    def _paper(self) -> dict[str, str]:
        paper: dict[str, str] = super()._paper if self.args.teacher_model_kind is None else _SELF_DISTILLATION
        return paper

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Writes `README.md` to `output_dir`: TRL's card, with base model, teachers, objective, settings and figures.

        Args:
            model_name (`str`, *optional*):
                Name of the model. When `None`, that of the repository on the Hub, or of `output_dir`.
            dataset_name (`str`, *optional*):
                Name of the dataset on the Hub.
            tags (`str` or `list[str]`, *optional*):
                More tags.
        """
        here = Path(self.args.output_dir).resolve().name
        super().create_model_card(model_name or (self.hub_model_id or here).split("/")[-1], dataset_name, tags)
        if not self.is_world_process_zero():
            return
        path = Path(self.args.output_dir) / "README.md"
        card = ModelCard.load(path)
        of_dataset = f" on the [{dataset_name}](https://huggingface.co/datasets/{dataset_name}) dataset"
        base = f"This model is a fine-tuned version of {_shown(self.model)}{of_dataset if dataset_name else ''}."
        lines = [base if line.startswith(_BASE) else line for line in card.text.split("\n")]
        after = lines.index(_PROCEDURE) + 1
        lines[after:after] = ["", *self._procedure()]
        card.text = "\n".join(lines).replace(_UNNAMED, f'model="{self.hub_model_id or self.args.output_dir}"')
        if (known := _hub_id(_path(self.model))) is not None:
            card.data.base_model = known
        card.save(path)

    def _taught(self) -> dict[str, str]:
        """Teachers, objective and settings, in words by topic."""
        taught = {
            f"teacher{f' `{name}`' if len(self.teachers) > 1 else ''}": self._taught_by(one)
            for name, one in self.teachers.items()
        }
        objective = f"`{self.divergence!r}` at {self._at}{shape_in_words(self.args)}, over {self._source}"
        return {**taught, "objective": objective, **self.settings}

    def about(self) -> dict[str, str]:
        """The same and the student, without markup, for the report."""
        said = {"student": _shown(self.model), **self._taught()}
        return {topic.replace("`", ""): _MARKS.sub(r"\1", text) for topic, text in said.items()}

    def _procedure(self) -> list[str]:
        return [
            *(f"- {topic[0].upper()}{topic[1:]}: {said}" for topic, said in self._taught().items()),
            *([f"- Curves and completions: [{PAGE}]({PAGE})"] if self.args.report else []),
            *figures(self.state.log_history),
        ]

    def _taught_by(self, teacher: Any) -> str:
        args = self.args
        if args.teacher_model_kind is None:
            model = getattr(teacher, "model", None)
            return f"a `{type(teacher).__name__}`" if model is None else _shown(model)
        said = _OWN[args.teacher_model_kind]
        if args.teacher_model_kind == "base" and is_peft(self.model):
            said += ", without its adapter"
        if args.teacher_model_kind == "ema":
            said += f" (`teacher_update_rate={args.teacher_update_rate:g}`)"
        return f"{said}, which read context that the student did not"


def figures(logs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The first and the last value of divergences and rewards, as the lines of a table; none before the first log."""
    names = dict.fromkeys(name for log in logs for name in log if _FIGURES.fullmatch(name))
    found = {name: [(log[name], log["step"]) for log in logs if log.get(name) is not None] for name in names}
    rows = [_row(name.replace("|", "/"), values[0], values[-1]) for name, values in found.items() if values]
    return ["", "| | first | last |", "|---|---|---|", *rows] if rows else []


def _row(name: str, *found: tuple[float, int]) -> str:
    return f"| `{name}` | {' | '.join(f'{value:.4g} (step {step})' for value, step in found)} |"


def _path(model: Any) -> str:
    return str(get_config_model_id(model.config) or "")


def _shown(model: Any) -> str:
    """A model in a sentence: with a link if it is on the Hub, by the name of its folder, or by its class."""
    path = _path(model)
    if (known := _hub_id(path)) is not None:
        return f"[{known}](https://huggingface.co/{known})"
    kind = class_of(without_peft(model)).__name__
    return f"`{Path(path).name}` (a local `{kind}`)" if path else f"a `{kind}` that has no name"


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
