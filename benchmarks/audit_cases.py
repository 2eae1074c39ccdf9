"""Trainings whose outcome is known or was measured, for `audit.py`: trainers of the examples, as they are and spoiled.

Students and teachers that do not travel with the package are trained first, into `out/audit/models`.
"""

from __future__ import annotations

import argparse
import sys
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import agents
import compare
import compare_agents
import torch
from arithmetic import ADDER, READER, STUDENT, SUBTRACTER, TEACHER
from arithmetic.make_models import supervise
from arithmetic.task import Problem, draw, prompts_with_answers, right
from compare_agents import Method
from datasets import Dataset
from doors import DOORS
from doors.world import Doors
from peft import LoraConfig
from pictures.student import make_student
from pictures.task import CELL, Scene, draw_scenes
from pictures.task import right as reads_digit
from pictures.task import rows as pictures
from PIL import ImageDraw
from real_model import distil
from support import serving
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from two_teachers import rows as of_two_teachers

from trl_opsd import OPSDConfig, OPSDTrainer
from trl_opsd.methods import Rewards

MODELS = Path("out/audit/models")
HELD_OUT = 200
"""Rows that a training is measured with; of an agent, 50 for each level."""

OPTIONS: dict[str, Any] = {
    "divergence": "forward_kl", "max_steps": 100, "per_device_train_batch_size": 32, "max_completion_length": 40,
    "adam_beta2": 0.98, "warmup_steps": 10, "logging_steps": 10, "bf16": False, "gradient_checkpointing": False,
    "dataloader_pin_memory": False, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
    "per_device_eval_batch_size": 100, "eval_temperature": 0.0, "num_completions_to_print": 0,
}  # fmt: skip

servers = ExitStack()
"""Servers that builders started; they end with the program."""


WORDS = {
    "helps": ("helps",),
    "off-policy as good": ("off-policy",),
    "does not": ("harms", "no better", "nothing"),
    "broken": ("broken",),
}
"""Verdicts of the audit that name the reason for an outcome."""


@dataclass(frozen=True, slots=True)
class Case:
    """A trainer, and what is known of its training."""

    half: str
    outcome: str
    """Of training on-policy: a key of `WORDS`."""
    build: Callable[..., OPSDTrainer]
    """Takes a folder for its files, a seed, and these options."""
    options: dict[str, Any]
    measured: str
    """Held-out rewards before and after training, or where they stand."""


# ---- Arithmetic ------------------------------------------------------------------------------------------------------


def arithmetic(
    folder: str,
    seed: int,
    *,
    student: Callable[[], str] = lambda: STUDENT,
    teacher: Callable[[], Any] = lambda: TEACHER,
    to_teacher: Callable[[Problem], str] | None = None,
    **options: Any,
) -> OPSDTrainer:
    """The student of `examples/compare.py`; `to_teacher` makes the text that the teacher reads in place of messages."""
    problems, held_out = draw(32 * 100, seed=1000 + seed), draw(HELD_OUT, held_out=True)
    rows = prompts_with_answers(problems)
    if to_teacher:
        rows = rows.add_column("teacher_prompt", list(map(to_teacher, problems)))
    return OPSDTrainer(
        model=student(),
        teacher_model=teacher(),
        args=OPSDConfig(folder, seed=seed, **{**OPTIONS, "learning_rate": 5e-4, "top_p": 0.6, **options}),
        train_dataset=rows,
        eval_dataset=prompts_with_answers(held_out),
        methods=[Rewards(right)],
    )


def self_taught(
    folder: str,
    seed: int,
    *,
    told: Callable[[list[Problem]], list[str]],
    student: Callable[[], str] = lambda: READER,
    **options: Any,
) -> OPSDTrainer:
    """The student of `examples/self_distillation.py` as in `remedies.py`, whose teacher is told a text for each row."""
    problems, held_out = draw(32 * 160, seed=seed), draw(HELD_OUT, held_out=True)
    of_teacher = {"teacher_model_kind": "base", "teacher_prompt_template": "{prompt}{privileged_context}"}
    given = {"learning_rate": 3e-3, "top_p": 0.6, "max_steps": 160, **of_teacher}
    return OPSDTrainer(
        model=student(),
        args=OPSDConfig(folder, seed=seed, **{**OPTIONS, **given, **options}),
        train_dataset=prompts_with_answers(problems).add_column("privileged_context", told(problems)),
        eval_dataset=prompts_with_answers(held_out).add_column("privileged_context", told(held_out)),
        methods=[Rewards(right)],
        peft_config=LoraConfig(r=32, lora_alpha=64, target_modules="all-linear"),
    )


def practised() -> str:
    """The path of the student of `examples/compare.py` that is right more often than not."""
    return compare.practised(MODELS, compare.PRACTICE)


def question(problem: Problem) -> str:
    """The question without a chat template."""
    return problem.question


def solutions(problems: list[Problem]) -> list[str]:
    return [problem.solution for problem in problems]


def of_the_next_row(problems: list[Problem]) -> list[str]:
    """Solutions in a column that has slipped by a row."""
    return solutions([*problems[1:], problems[0]])


def semicolons(problems: list[Problem]) -> list[str]:
    """A context that the model has never read after a question."""
    return [";"] * len(problems)


class Remarked(Problem):
    """A problem with a random number after its question, in place of the solution."""

    __slots__ = ()

    @property
    def remark(self) -> str:
        return f";{zlib.crc32(self.question.encode()) % 1000}"

    @property
    def prompt_with_solution(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.question + self.remark}]


def remarks(problems: list[Problem]) -> list[str]:
    return [Remarked(**asdict(problem)).remark for problem in problems]


def unmoved() -> str:
    """The path of a student that has learned to ignore remarks."""
    path = MODELS / "unmoved"
    if not path.exists():
        tokenizer, model = AutoTokenizer.from_pretrained(STUDENT), AutoModelForCausalLM.from_pretrained(STUDENT)
        problems = [Remarked(**asdict(problem)) for problem in draw(20_000, seed=6)]
        supervise(model, tokenizer, problems, steps=150, learning_rate=1e-3, shown=0.5)
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    return str(path)


def with_another_end() -> PreTrainedModel:
    """The teacher, which ends with another special token than the student."""
    teacher = AutoModelForCausalLM.from_pretrained(TEACHER)
    return _with_outputs(teacher, [0, 3, 2, 1, *range(4, 19)])


def with_other_ids() -> PreTrainedModel:
    """The teacher with a vocabulary of the same size in another order, and no path where its tokenizer would be."""
    teacher = AutoModelForCausalLM.from_pretrained(TEACHER)
    order = torch.randperm(19, generator=torch.Generator().manual_seed(0))
    teacher.get_input_embeddings().weight.data = teacher.get_input_embeddings().weight.data[order]
    return _with_outputs(teacher, order.tolist())


def _with_outputs(teacher: PreTrainedModel, order: list[int]) -> PreTrainedModel:
    head = teacher.get_output_embeddings()
    head.weight.data = head.weight.data[order]
    teacher.config._name_or_path = teacher.name_or_path = ""
    return teacher


def rounded_student() -> PreTrainedModel:
    """The student's weights, as a checkpoint in bfloat16 has them."""
    return AutoModelForCausalLM.from_pretrained(STUDENT, dtype=torch.bfloat16).float()


def two_teachers(folder: str, seed: int, **options: Any) -> OPSDTrainer:
    """The rows of `examples/two_teachers.py`; the teacher of differences has learned sums."""
    return OPSDTrainer(
        model=STUDENT,
        teacher_model={"sums": ADDER, "differences": AutoModelForCausalLM.from_pretrained(ADDER)},
        args=OPSDConfig(folder, seed=seed, **{**OPTIONS, "learning_rate": 5e-4, "top_p": 0.6, **options}),
        train_dataset=of_two_teachers(draw(32 * 100, seed=1000 + seed)),
        eval_dataset=of_two_teachers(draw(HELD_OUT, held_out=True)),
        methods=[Rewards(right)],
    )


def served(folder: str, seed: int) -> OPSDTrainer:
    """A teacher of sums at the path, and one of differences at the server."""
    flags = ("--max-model-len", "128", "--dtype", "float32")
    url = servers.enter_context(serving.pooling(SUBTRACTER, Path(folder) / "server.log", *flags))
    return arithmetic(folder, seed, teacher=lambda: ADDER, teacher_server_url=url)


# ---- Agents ----------------------------------------------------------------------------------------------------------


def agent(
    folder: str, seed: int, *, task: str = "doors", method: Method, environment: type | None = None
) -> OPSDTrainer:
    """An agent as `examples/compare_agents.py` trains it, measured on held-out rows."""
    what, models = agents.TASKS[task], DOORS if task == "doors" else MODELS / task
    for name in ("student", method.teacher):
        if not (models / name).exists():
            agents.make(what, name, models)
    what = what if environment is None else agents.Task(environment=environment, world=what.world, pieces=what.pieces)
    world, options = what.world, {**OPTIONS, "learning_rate": 2e-3, "eval_temperature": 1.0, **method.options}
    lengths = {"max_completion_length": world.MOST_TOKENS, "max_tool_calling_iterations": world.MOST_CALLS}
    return OPSDTrainer(
        model=str(models / "student"),
        teacher_model=str(models / method.teacher),
        args=OPSDConfig(folder, seed=seed, **{**options, **lengths}),
        train_dataset=world.rows(compare_agents.ROWS_TO_TRAIN, seed=seed),
        eval_dataset=world.rows(HELD_OUT, held_out=True),
        environment_factory=compare_agents.environment(what, method),
    )


class OneTry(Doors):
    """A maze that a closed door ends: what the teacher knows cannot be found out."""

    def get_reward(self) -> float:
        return float(self.is_left and self.calls == self.maze.rooms)


# ---- Pictures, and a pretrained model --------------------------------------------------------------------------------


def of_pictures(folder: str, seed: int, *, to_teacher: str = "crop", is_erased: bool = False) -> OPSDTrainer:
    """The student of `examples/pictures`, whose teacher sees the crop or the whole picture."""
    student = MODELS / "pictures"
    if not student.exists():
        make_student(student)

    def rows(scenes: list[Scene]) -> Dataset:
        found = pictures(scenes, to_teacher=to_teacher)
        if not is_erased:
            return found
        blank = [[_erased(scene)] for scene in scenes]
        return Dataset.from_dict({**found.to_dict(), "images": blank}, features=found.features)

    given = {"teacher_model_kind": "base", "max_completion_length": 4, "max_steps": 60, "learning_rate": 1e-3}
    return OPSDTrainer(
        model=str(student),
        args=OPSDConfig(folder, seed=seed, **{**OPTIONS, **given}),
        train_dataset=rows(draw_scenes(32 * 60, seed=seed)),
        eval_dataset=rows(draw_scenes(HELD_OUT, held_out=True)),
        methods=[Rewards(reads_digit)],
    )


def _erased(scene: Scene) -> Any:
    """The whole picture without its digit."""
    picture, (x, y) = scene.whole.copy(), scene.corner
    ImageDraw.Draw(picture).rectangle((x, y, x + CELL - 1, y + CELL - 1), fill=(190, 190, 190))
    return picture


def rule(folder: str, seed: int, *, told: str, wanted: str | None = None, steps: int = 30) -> OPSDTrainer:
    """SmolLM2 as its own teacher, which reads one rule and is rewarded for one."""
    asked = argparse.Namespace(
        model=".real/smollm2", divergence="forward_kl", learning_rate=2e-3, steps=steps, use_vllm=False
    )
    trainer = distil.build(asked, told, seed, Path(folder), wanted)
    trainer.args.eval_strategy = "no"
    return trainer


# ---- The cases -------------------------------------------------------------------------------------------------------

ANCHORED = Method(options={"methods": {"anchor": {"weight": 0.1}}, "learning_rate": 1e-3})
NOTES = "benchmarks/notes"

CASES = {
    "doors": Case("A", "helps", agent, {"method": Method()}, f"{NOTES}/doors.md: 0.20 to 0.94 with two rooms"),
    "doors, guide": Case(
        *("A", "does not", agent, {"method": Method(teacher="guide")}),
        f"{NOTES}/doors.md: 0.20 to 0.22 with two rooms",
    ),
    "arithmetic": Case(
        "A", "off-policy as good", arithmetic, {}, f"{NOTES}/arithmetic.md: 0.28 to 0.43, off-policy to 0.47"
    ),
    "solution": Case(
        *("A", "off-policy as good", self_taught, {"told": solutions}),
        f"{NOTES}/remedies.md: 0.42 to 0.76; off-policy 0.78, 0.79",
    ),
    "idle context": Case("A", "does not", self_taught, {"told": remarks, "student": unmoved}, "0.62 to 0.62, 0.62"),
    "strange context": Case("A", "does not", self_taught, {"told": semicolons}, "0.42 to 0.02, 0.02"),
    "template": Case("A", "broken", arithmetic, {"to_teacher": question}, "0.27 to 0.01, 0.01"),
    "end token": Case("A", "broken", arithmetic, {"teacher": with_another_end}, "0.27 to 0.01, 0.01"),
    "twin": Case("A", "does not", arithmetic, {"teacher": lambda: STUDENT}, "0.27 to 0.26, 0.24"),
    "house": Case(
        *("B", "helps", agent, {"task": "house", "method": Method()}),
        f"{NOTES}/agents.md: 0.35 to 0.96 with two rooms",
    ),
    "databases": Case(
        *("B", "helps", agent, {"task": "sql", "method": ANCHORED}),
        f"{NOTES}/agents.md: 0.49 to 0.83 with two tables",
    ),
    "databases, no anchor": Case(
        *("B", "does not", agent, {"task": "sql", "method": Method()}),
        f"{NOTES}/agents.md: 0.98 to 0.13 with one table",
    ),
    "pirate": Case("B", "helps", rule, {"told": "pirate"}, f"{NOTES}/doors.md: 0.00 to 0.96"),
    "another rule": Case("B", "does not", rule, {"told": "french", "wanted": "pirate", "steps": 15}, "0.00 to 0.00"),
    "pictures": Case("B", "off-policy as good", of_pictures, {}, "docs/choosing.md: 0.42 to 1.00, off-policy too"),
    "pictures, whole": Case("B", "does not", of_pictures, {"to_teacher": "whole"}, "docs/choosing.md: 0.42 to 0.41"),
    "pictures, erased": Case("B", "does not", of_pictures, {"is_erased": True}, "0.10 to 0.09, 0.10"),
    "other ids": Case("B", "broken", arithmetic, {"teacher": with_other_ids}, "0.27 to 0.00, 0.00"),
    "other checkpoint": Case("B", "broken", served, {}, "refused at the start"),
    "weaker teacher": Case(
        "B", "does not", arithmetic, {"student": practised, "teacher": lambda: STUDENT}, "0.84 to 0.37, 0.38"
    ),
    "rounded twin": Case("B", "does not", arithmetic, {"teacher": rounded_student}, "0.27 to 0.25, 0.26"),
    "slipped column": Case("B", "does not", self_taught, {"told": of_the_next_row}, "0.42 to 0.01, 0.01"),
    "two teachers": Case("B", "off-policy as good", two_teachers, {}, "0.27 to 0.32, 0.34; off-policy 0.34, 0.37"),
    "one try": Case("B", "does not", agent, {"method": Method(), "environment": OneTry}, "0.26 to 0.06, 0.06"),
}
"""All, by name. A pair of rewards is of training with seeds 0 and 1 with `--train`: greedy, agents sampled."""
