"""Several experts into one student: what a file says of each, their rows, and the table of what it is worth."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.logging import get_logger
from datasets import Dataset, concatenate_datasets

from trl_opsd.models.adapters import average_of
from trl_opsd.report.page import write
from trl_opsd.report.records import about, tell

if TYPE_CHECKING:
    from trl_opsd import OPSDTrainer

logger = get_logger(__name__)

BEFORE, AFTER, AVERAGE = "student before", "student after", "average of the weights"
"""Rows of the table beside the experts."""
FILE = "experts.json"
"""What was measured, in the folder of a run: a resume measures none of it again."""
_HELD_OUT, _SHARE = 200, 0.1
"""Rows that are held out of a dataset without a `test`: at most so many, and that share."""

Load = Callable[[str], Mapping[str, Any]]
"""Loads the splits of a dataset by its name or path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expert:
    """A teacher, and what it is an expert in."""

    model: str
    """Path or id of a checkpoint or of an adapter."""
    dataset: str
    """Its rows to train on: path or id."""
    metric: str
    """A reward function, `module.function` or one of `trl.rewards`: the accuracy of completions of its rows."""
    test: str | None = None
    """Its rows to measure on. If not set, the split `test` of the dataset, or rows that are held out."""
    server: str | None = None
    """Address of a server that has its layers; then it is not measured itself."""
    share: float | None = None
    """Its share of each step's rows: `teacher_shares`."""
    weight: float | None = None
    """Its share of the loss: `teacher_weights`."""


def experts_of(given: Any) -> dict[str, Expert]:
    """What a file says of the experts; a `ValueError` for anything else."""
    shape = "`experts`: expected a mapping of names to {model: ..., dataset: ..., metric: ...}"
    if not (isinstance(given, Mapping) and given):
        raise ValueError(f"{shape}, got {given!r}.")
    known = {one.name: one.default is MISSING for one in fields(Expert)}
    found = {}
    for name, said in given.items():
        if not isinstance(said, Mapping):
            raise ValueError(f"{shape}, got {said!r} for {name!r}.")
        missing = [key for key, is_needed in known.items() if is_needed and key not in said]
        if wrong := [*sorted(said.keys() - known), *missing]:
            raise ValueError(
                f"`experts`: {wrong[0]!r} of {name!r} is {'unknown' if wrong[0] in said else 'missing'}: expected "
                f"{', '.join(known)}, of which the first three are needed."
            )
        found[str(name)] = Expert(**said)
    return found


class Metric:
    """A reward function for the rows of one expert, named after it in the log."""

    def __init__(self, name: str, function: Any) -> None:
        self.__name__, self._function = name, function

    def __call__(self, **columns: Any) -> list[float | None]:
        mine = [place for place, teacher in enumerate(columns["teacher"]) if teacher == self.__name__]
        found: list[float | None] = [None] * len(columns["teacher"])
        if mine:
            whole = {"log_extra", "log_metric", "trainer_state"}
            given = {
                name: values if name in whole else [values[place] for place in mine] for name, values in columns.items()
            }
            for place, value in zip(mine, self._function(**given), strict=True):
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
        self.rewards = [Metric(name, one) for name, one in zip(experts, metrics, strict=True)]

    @property
    def teachers(self) -> dict[str, str]:
        return {name: one.model for name, one in self.experts.items()}

    def settings(self) -> dict[str, Any]:
        """The options of the config that the experts set."""
        found = {
            option: {name: getattr(one, key) for name, one in self.experts.items() if getattr(one, key) is not None}
            for option, key in {"teacher_shares": "share", "teacher_weights": "weight"}.items()
        } | {"teacher_server_url": {name: one.server for name, one in self.experts.items() if one.server}}
        return {name: value for name, value in found.items() if value}

    @cached_property
    def _rows(self) -> dict[str, tuple[Dataset, Dataset]]:
        """By expert, its rows to train on and to measure on."""
        found = {}
        for name, one in self.experts.items():
            splits = self._load(one.dataset)
            rows = splits.get("train") or next(iter(splits.values()))
            if one.test is not None:
                of_test = self._load(one.test)
                test = of_test.get("test") or next(iter(of_test.values()))
            elif (test := splits.get("test")) is None:
                if not isinstance(rows, Dataset):
                    raise ValueError(f"`experts`: the dataset of {name!r} is a stream: set `test`.")
                held = min(_HELD_OUT, int(len(rows) * _SHARE))
                if not held:
                    raise ValueError(
                        f"`experts`: the dataset of {name!r} has {len(rows)} rows, too few to hold any out: set `test`."
                    )
                parts = rows.train_test_split(test_size=held, seed=self._seed)
                rows, test = parts["train"], parts["test"]
            for some in (rows, test):
                if "teacher" in some.column_names:
                    raise ValueError(f"`experts`: the dataset of {name!r} has a column 'teacher': remove or rename it.")
            found[name] = tuple(some.add_column("teacher", [name] * len(some)) for some in (rows, test))
        return found

    def data(self) -> dict[str, Any]:
        """The rows of all experts to train on, and those of each to measure on."""
        try:
            train = concatenate_datasets([rows for rows, _ in self._rows.values()])
        except ValueError as error:
            raise ValueError(f"`experts`: columns of one name differ between their datasets: {error}") from error
        return {"train": train, "test": {name: test for name, (_, test) in self._rows.items()}}

    # ---- What is measured -------------------------------------------------------------------------------------------

    def evaluate(self, trainer: OPSDTrainer) -> None:
        """Before training, measures all but the student after it; then that, and shows the table. Collective."""
        file = Path(trainer.args.output_dir, FILE)
        said = json.loads(json.dumps({name: asdict(one) for name, one in self.experts.items()}))
        known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        found: dict[str, dict[str, float]] = known.get("accuracy", {}) if known.get("experts") == said else {}
        trainer.accelerator.wait_for_everyone()  # all have read it
        if trainer.state.global_step:
            found[AFTER] = self._measured(trainer)
        else:
            # One behind a server, sharded, or with another tokenizer cannot generate for the student's prompts here.
            whole = [name for name in self.experts if getattr(trainer.teachers[name], "is_whole", False)]
            for name in whole:
                if name not in found:
                    with trainer.generating_with(name):
                        found[name] = self._measured(trainer)
            if AVERAGE not in found and all(one.server is None for one in self.experts.values()):
                found |= self._of_average(trainer)
            if BEFORE not in found:
                found[BEFORE] = self._measured(trainer)
        if trainer.is_world_process_zero():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({"experts": said, "accuracy": found}, indent=1), encoding="utf-8")
            if AFTER in found:
                self._publish(trainer, table(found, [*self.experts]))

    def _measured(self, trainer: OPSDTrainer) -> dict[str, float]:
        """The accuracy of what generates now, by task."""
        found = {}
        for name, (_, test) in self._rows.items():
            metrics = trainer.predict(test, metric_key_prefix="test").metrics
            found[name] = float(metrics[f"test_rewards/{name}/mean"])
        return found

    def _of_average(self, trainer: OPSDTrainer) -> dict[str, dict[str, float]]:
        """That of the average of the experts' weights, where they can be averaged."""
        try:
            model = average_of([*self.teachers.values()])
        except ValueError as error:
            logger.warning(f"The experts' weights have no average: {error}")
            return {}
        with trainer.generating_with(model.to(trainer.model.dtype)):
            return {AVERAGE: self._measured(trainer)}

    def _publish(self, trainer: OPSDTrainer, lines: list[str]) -> None:
        """Prints the table, and writes it into the model card and the report."""
        text, run = "\n".join(lines), Path(trainer.args.output_dir)
        print(text)
        card = run / "README.md"
        card.write_text(f"{card.read_text(encoding='utf-8')}\n## Experts\n\n{text}\n", encoding="utf-8")
        if trainer.args.report:
            tell(run, {**about(run), "experts": text})
            write(run)


def table(found: Mapping[str, Mapping[str, float]], tasks: Sequence[str]) -> list[str]:
    """Accuracies by row and task, as lines of Markdown; with the share of the headroom between student and experts."""

    def mean(of: Mapping[str, float]) -> float:
        return sum(of[name] for name in tasks) / len(tasks)

    before = found[BEFORE]
    best = {name: found[name][name] for name in tasks if name in found}
    rows = [name for name in (*tasks, AVERAGE, BEFORE, AFTER) if name in found]
    lines = [
        f"| accuracy | {' | '.join(tasks)} | mean | share of the headroom |",
        "|---" * (len(tasks) + 3) + "|",
    ]
    for row in rows:
        of, share = found[row], "–"
        if row in (AVERAGE, AFTER) and len(best) == len(tasks) and (room := mean(best) - mean(before)) > 0:
            share = f"{(mean(of) - mean(before)) / room:.0%}"
        lines.append(f"| {row} | {' | '.join(f'{of[name]:.3f}' for name in tasks)} | {mean(of):.3f} | {share} |")
    return lines
