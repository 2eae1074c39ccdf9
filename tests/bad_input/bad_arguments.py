"""Arguments of the trainer of the wrong kind or in the wrong place, optimizers of another model, and zeros."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from cases import Case, Lab, untouched
from peft import LoraConfig
from support import tiny
from transformers import AutoModelForCausalLM

from trl_opsd import HFRollout, OPSDConfig, OPSDTrainer

FOLDER = "^`output_dir='.*/out'` cannot be written to \\(.*\\): set one that can"


def wrong_class(name: str, value: type, message: str) -> Case:
    return untouched("a class for an object", name, message, TypeError, **{name: value})


def placed(name: str, message: str, *arguments: Any) -> Case:
    """Arguments in the wrong order."""
    return Case("wrong order", name, message, lambda lab: OPSDTrainer(*arguments), TypeError, before_loading=True)


def optimizer_of(*parameters: torch.nn.Parameter, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters or [torch.nn.Parameter(torch.zeros(1))], **options)


class StepsAnother(OPSDTrainer):
    """Makes its optimizer from another model's weights."""

    def create_optimizer(self, model=None):
        self.optimizer = optimizer_of()
        return self.optimizer


def schedule_of_rate_0(lab: Lab) -> None:
    student = tiny.qwen2()
    optimizer = torch.optim.SGD(student.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    lab.make(model=student, optimizers=(optimizer, schedule)).train()


def optimizer_of_another_model(lab: Lab) -> None:
    lab.make(optimizers=(optimizer_of(*tiny.qwen2(48, 1).parameters()), None))


def scheduler_of_another_optimizer(lab: Lab) -> None:
    student = tiny.qwen2()
    one, other = (optimizer_of(*student.parameters()) for _ in range(2))
    lab.make(model=student, optimizers=(one, torch.optim.lr_scheduler.ConstantLR(other)))


def optimizer_from_before_the_adapter(lab: Lab) -> None:
    student = tiny.qwen2()
    lab.make(
        model=student,
        optimizers=(optimizer_of(*student.parameters()), None),
        peft_config=LoraConfig(target_modules=["q_proj"]),
    )


def divergence_assigned(value: Any) -> Any:
    def provoke(lab: Lab) -> None:
        lab.make().divergence = value

    return provoke


OPTIONS = OPSDConfig("out", use_cpu=True)

CLASSES = [
    wrong_class("model", AutoModelForCausalLM, "`model` is a type: expected a path"),
    wrong_class("args", OPSDConfig, "`args` is a type: expected a `trl_opsd.OPSDConfig`"),
    wrong_class("rollout", HFRollout, "`rollout` is "),
    untouched("wrong kind", "no model", "`model` is a NoneType: expected a path", TypeError, model=None, args=OPTIONS),
    untouched("wrong kind", "a Path", "`model` is a PosixPath: expected a path, ", TypeError, model=Path("student")),
    untouched("wrong kind", "a file for a folder", FOLDER, args=OPSDConfig(f"{__file__}/out")),
    untouched("wrong kind", "a folder of the kernel", FOLDER, args=OPSDConfig("/proc/out")),
    placed(
        "rows for the options",
        "`args` is a Dataset: .* third argument, after the teacher",
        "student",
        "teacher",
        tiny.rows(),
    ),
]

NOTHING_LEARNED = [
    Case("nothing would be learned", "a schedule of rate 0", "rate is 0 in all 3 steps", schedule_of_rate_0),
    Case(
        "nothing would be learned",
        "a warmup as long as the training",
        "rate is 0 in all 1 steps.*set fewer `warmup_steps`",
        lambda lab: lab.make(max_steps=1, warmup_steps=1, lr_scheduler_type="linear").train(),
    ),
    Case(
        "optimizer of another model",
        "a stranger",
        "has no trainable parameter of the student",
        optimizer_of_another_model,
    ),
    Case(
        "optimizer of another model",
        "a stranger's scheduler",
        "The scheduler is another optimizer's",
        scheduler_of_another_optimizer,
    ),
    Case(
        "optimizer of another model",
        "made by a method",
        "has no trainable parameter of the student",
        lambda lab: lab.make(cls=StepsAnother).train(),
    ),
    Case("optimizer of another model", "before the adapter", "after its adapter", optimizer_from_before_the_adapter),
]

TWICE = [
    untouched(
        "teacher given twice",
        "two paths",
        "There are two teachers, `teacher_model` and `teacher_model_name_or_path='other'`: remove",
        teacher_model_name_or_path="other",
    ),
    Case(
        "teacher given twice",
        "an object and a path",
        "`teacher_model` and `teacher_model_name_or_path='other'`: remove",
        lambda lab: lab.make(teacher_model=tiny.qwen2(48, 1), teacher_model_name_or_path="other"),
        before_loading=True,
    ),
    Case(
        "rollout given twice",
        "use_vllm",
        "There are two rollouts: `rollout`, a FixedRollout and vLLM by `use_vllm=True`",
        lambda lab: lab.make(use_vllm=True),
        before_loading=True,
    ),
]

OTHERS = [
    Case("divergence assigned", "unknown", "Did you mean 'forward_kl'", divergence_assigned("forwardkl")),
]


BEST = [
    untouched(
        "best model without evaluations",
        f"{name} {value}",
        "without evaluations",
        **{name: value, "metric_for_best_model": "loss"},
    )
    for name, value in (("save_strategy", "best"), ("load_best_model_at_end", True))
]
CASES: list[Case] = [*BEST, *CLASSES, *NOTHING_LEARNED, *TWICE, *OTHERS]
