"""Several experts into one student: what a file says of each, their rows, and the table of what it is worth."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list
from annotated_types import MinLen
from datasets import Dataset, concatenate_datasets

from trl_opsd._compat.values import pydantic
from trl_opsd.checkpoints import newest_complete
from trl_opsd.parallel.rng import preserved_rng
from trl_opsd.teacher.build import average_of

if TYPE_CHECKING:
    from trl_opsd.trainer import OPSDTrainer

logger = get_logger(__name__)

BEFORE, AFTER, AVERAGE = "student before", "student after", "average of the weights"
"""Rows of the table beside the experts."""
FILE = "experts.json"
"""What was measured, in the folder of a run: a resume measures none of it again."""
_HELD_OUT, _SHARE = 200, 0.1
"""Rows that are held out of a dataset without a `test`: at most so many, and that share."""

OF_RUN = {"log_extra", "log_metric", "trainer_state"}
"""What a reward function is given of the run, not of rows."""

Load = Callable[[str], Mapping[str, Any]]
"""Loads the splits of a dataset by its name or path."""


class Expert(pydantic.BaseModel, extra="forbid", frozen=True):
    """A teacher, and what it is an expert in."""

    model: str
    """Path or id of a checkpoint or of an adapter."""
    dataset: str
    """Its rows to train on: path or id."""
    metric: str
    """A reward function, `module.function` or one of `trl.rewards`: the accuracy of completions of its rows."""
    test: str | None = None
    """Its rows to measure on. If not set, the split `test` of the dataset, or rows that are held out."""


def experts_of(given: Any) -> dict[str, Expert]:
    """What a file says of the experts; a `ValueError` for anything else."""
    try:
        return pydantic.TypeAdapter(Annotated[dict[str, Expert], MinLen(2)]).validate_python(given)
    except pydantic.ValidationError as error:
        raise ValueError(
            f"`experts`: expected at least two names with {{model: ..., dataset: ..., metric: ...}}; {error}"
        ) from None


class Metric:
    """A reward function for the rows of one expert, named after it in the log."""

    def __init__(self, name: str, function: Any) -> None:
        self.__name__, self._function = name, function

    def __call__(self, **columns: Any) -> list[float | None]:
        mine = [place for place, teacher in enumerate(columns["teacher"]) if teacher == self.__name__]
        found: list[float | None] = [None] * len(columns["teacher"])
        if mine:
            given = {
                name: values if name in OF_RUN else [values[place] for place in mine]
                for name, values in columns.items()
            }
            said = self._function(**given)
            said = asyncio.run(said) if inspect.iscoroutine(said) else said
            for place, value in zip(mine, said, strict=True):
                found[place] = value
        return found


class Experts:
    """The task of merging experts: their teachers, rows and metrics, and what is measured before and after.

    Args:
        experts: by name, as in the column `teacher`.
        load: loads datasets.
        metrics: the functions of the experts, in their order.
        seed: of the rows that are held out.
    """

    def __init__(self, experts: Mapping[str, Expert], load: Load, metrics: Sequence[Any], seed: int) -> None:
        self.experts, self._load, self._seed = experts, load, seed
        self._found: dict[str, dict[str, float]] = {}
        self.rewards = [Metric(name, one) for name, one in zip(experts, metrics, strict=True)]

    @property
    def teachers(self) -> dict[str, str]:
        return {name: one.model for name, one in self.experts.items()}

    @cached_property
    def _rows(self) -> dict[str, tuple[Dataset, Dataset]]:
        """By expert, its rows to train on and to measure on."""
        found = {}
        for name, one in self.experts.items():
            splits = self._load(one.dataset)
            rows = splits.get("train", next(iter(splits.values())))
            if one.test is not None:
                of_test = self._load(one.test)
                test = of_test.get("test", next(iter(of_test.values())))
            elif (test := splits.get("test")) is None:
                parts = rows.train_test_split(min(_HELD_OUT, int(len(rows) * _SHARE)), seed=self._seed)
                rows, test = parts["train"], parts["test"]
            found[name] = tuple(some.add_column("teacher", [name] * len(some)) for some in (rows, test))
        return found

    def data(self) -> dict[str, Any]:
        """The rows of all experts to train on, and those of each to measure on."""
        train = concatenate_datasets([rows for rows, _ in self._rows.values()])
        return {"train": train, "test": {name: test for name, (_, test) in self._rows.items()}}

    # ---- What is measured -------------------------------------------------------------------------------------------

    def evaluate(self, trainer: OPSDTrainer) -> None:
        """Before training, measures all but the student after it; then that, and shows the table. Collective."""
        file, is_trained = Path(trainer.args.output_dir, FILE), trainer.state.global_step > 0
        # A resume knows what was measured; where a training begins anew, the folder may be that of another.
        if trainer.args.resume_from_checkpoint and file.exists() and newest_complete(file.parent)[0]:
            self._found = json.loads(file.read_text(encoding="utf-8"))["accuracy"] | self._found
        (found,) = broadcast_object_list([self._found])
        with preserved_rng(trainer.accelerator.device):  # whatever was measured, the same is trained
            self._measure(trainer, found, is_trained)
        self._found = found
        if trainer.is_world_process_zero():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({"accuracy": found}, indent=1), encoding="utf-8")
            if is_trained:
                self._publish(trainer, table(found, {name: len(test) for name, (_, test) in self._rows.items()}))

    def _measure(self, trainer: OPSDTrainer, found: dict[str, dict[str, float]], is_trained: bool) -> None:
        if is_trained:
            found[AFTER] = self._measured(trainer)
            return
        unknown = [name for name in self.experts if name not in found]
        whole = [name for name in unknown if getattr(trainer.teachers[name], "is_whole", False)]
        if others := [name for name in unknown if name not in whole]:
            logger.warning(
                f"Not measured: {', '.join(others)}, which cannot generate here: they are behind a server, streamed, "
                "sharded, or have another tokenizer than the student."
            )
        for name in whole:
            with trainer.generating_with(name):
                found[name] = self._measured(trainer)
        if AVERAGE not in found and trainer.cross is None and trainer.args.teacher_server_url is None:
            try:
                model = average_of([*self.teachers.values()], trainer.args).to(trainer.model.dtype)
            except (ValueError, OSError) as error:
                logger.warning(f"The average of the experts' weights is not measured: {error}")
            else:
                with trainer.generating_with(model):
                    found[AVERAGE] = self._measured(trainer)
        if BEFORE not in found:
            found[BEFORE] = self._measured(trainer)

    def _measured(self, trainer: OPSDTrainer) -> dict[str, float]:
        """The accuracy of what generates now, by task."""
        found = {}
        for name, (_, test) in self._rows.items():
            metrics = trainer.predict(test, metric_key_prefix="test").metrics
            found[name] = float(metrics[f"test_rewards/{name}/mean"])
        return found

    def _publish(self, trainer: OPSDTrainer, lines: list[str]) -> None:
        """Prints the table, and writes it into the model card."""
        text, card = "\n".join(lines), Path(trainer.args.output_dir, "README.md")
        print(text)
        before = card.read_text(encoding="utf-8") if card.exists() else ""
        card.write_text(f"{before}\n## Experts\n\n{text}\n", encoding="utf-8")


def table(found: Mapping[str, Mapping[str, float]], tasks: Mapping[str, int]) -> list[str]:
    """Accuracies by row and task (which have so many rows to measure on), as lines of Markdown.

    With the share of the headroom, between the means of student and experts, that is gone.
    """

    def mean(of: Mapping[str, float]) -> float:
        return sum(of[name] for name in tasks) / len(tasks)

    before = found[BEFORE]
    best = {name: found[name][name] for name in tasks if name in found}
    rows = [name for name in (*tasks, AVERAGE, BEFORE, AFTER) if name in found]
    lines = [
        f"| accuracy | {' | '.join(f'{name} ({rows} rows)' for name, rows in tasks.items())} | mean | "
        "share of the headroom |",
        "|---" * (len(tasks) + 3) + "|",
    ]
    for row in rows:
        of, share = found[row], "–"
        if row in (AVERAGE, AFTER) and len(best) == len(tasks) and (room := mean(best) - mean(before)) > 0:
            share = f"{(mean(of) - mean(before)) / room:.0%}"
        lines.append(f"| {row} | {' | '.join(f'{of[name]:.3f}' for name in tasks)} | {mean(of):.3f} | {share} |")
    return lines
