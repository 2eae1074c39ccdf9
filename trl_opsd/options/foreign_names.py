"""Unknown names of options and arguments: what TRL's other trainers mean by them, or the closest name here.

Plain renamings of an option stand with it (`Option.also`); docs/migration.md compares whole trainers.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, ClassVar, Self

from trl_opsd.options.table import table

_MIGRATION = "docs/migration.md compares the options of that trainer with these"
_WHOLE = (
    "the loss uses the full vocabulary, or with `top_k_teacher` the teacher's top k tokens and one bucket for the rest"
)
_NUMBER = "each completion is used for one optimizer step; `num_generations` sets the completions per prompt"
_PROMPTS = "prompts are never cut; `overlong_prompts='drop'` drops those that are too long"

_ADVICE = {
    # options of distillation; the first three tell which config this was
    "max_new_tokens": f"it is called `max_completion_length`; {_MIGRATION}",
    "distillation_alpha": f"it is called `beta`: 0 forward KL, 1 reverse KL; or set `divergence`; {_MIGRATION}",
    "use_uld_loss": f"teacher and student share one tokenizer, `trl.experimental.gold` compares two; {_MIGRATION}",
    "distillation_objective": "it is called `divergence`",
    "loss_type": "`divergence` sets the objective; all tokens of a completion have the same weight",
    **dict.fromkeys(("distillation_mode", "distillation_topk", "loss_top_k", "teacher_top_k"), _WHOLE),
    "top_entropy_quantile": "set `token_selection='student_entropy'` and `token_fraction`",
    "mask_truncated_completions": "override `weigh`, see docs/extending.md",
    "teacher_model": "pass it to `OPSDTrainer`, or set `teacher_model_name_or_path`",
    "privileged_context": "it is a column of the dataset, see docs/teachers.md",
    # options of reinforcement learning, and of rows
    **dict.fromkeys(("num_iterations", "steps_per_generation"), _NUMBER),
    "generation_batch_size": "it is `per_device_train_batch_size` x processes x `gradient_accumulation_steps`",
    **dict.fromkeys(("max_prompt_length", "max_length", "truncation_mode"), _PROMPTS),
    "packing": "`padding_free=True` concatenates the rows of a micro-batch",
    **dict.fromkeys(("completion_only_loss", "assistant_only_loss"), "the loss is on the tokens of completions only"),
    **dict.fromkeys(("eos_token", "pad_token"), "set it in the tokenizer that you pass as `processing_class`"),
    **dict.fromkeys(("do_sample", "num_beams"), "put it into `generation_kwargs`"),
    # options of loading and training
    **dict.fromkeys(("dtype", "torch_dtype", "attn_implementation"), "put it into `model_init_kwargs`"),
    **dict.fromkeys(("student_model_name_or_path", "model_name_or_path"), "it is the argument `model` of the trainer"),
    "use_peft": "pass `peft_config=LoraConfig(...)` to `OPSDTrainer`",
    "evaluation_strategy": "it is called `eval_strategy`",
    "warmup_ratio": "it is called `warmup_steps`, where a value below 1 is a share of all steps",
    # arguments
    **dict.fromkeys(("tokenizer", "processor"), "it is the argument `processing_class` of `OPSDTrainer`"),
    "teacher_tokenizer": "it is the argument `teacher_processing_class` of `OPSDTrainer`",
    "student": "it is the argument `model` of `OPSDTrainer`",
    **dict.fromkeys(("teacher", "ref_model"), "it is the argument `teacher_model` of `OPSDTrainer`"),
    "dataset": "it is the argument `train_dataset` of `OPSDTrainer`",
    "optimizer": "pass `optimizers=(optimizer, lr_scheduler)` to `OPSDTrainer`; each may be None",
    **dict.fromkeys(("reward_func", "reward_model"), "it is the argument `reward_funcs` of `OPSDTrainer`"),
    "rollout_func": "it is the argument `rollout` of `OPSDTrainer`, a `trl_opsd.RolloutBackend`",
    "data_collator": "rows reach the trainer as they are, and the rollout pads them: remove it",
    "formatting_func": "make a column 'prompt' with `dataset.map`",
    "compute_metrics": "there are no labels to compare predictions with; an evaluation logs `eval_loss`",
    "compute_loss_func": "pass a `divergence`, see docs/extending.md",
}
"""Names of TRL's other trainers that are no plain renaming, and what to do here."""

_FAMILIES = {
    "student_": "it sets how to load the student: put it, without 'student_', into `model_init_kwargs`",
    "teacher_": "it sets how to load the teacher: put it, without 'teacher_', into `teacher_model_init_kwargs`",
    "lora_": "pass `peft_config=LoraConfig(...)` to `OPSDTrainer`",
    "dataset_": "pass the dataset itself to `OPSDTrainer`, as `train_dataset` or `eval_dataset`",
    "reward_": "rewards are passed to `OPSDTrainer`, as `reward_funcs`; `reward_weight` is their weight in training",
}
"""What to do instead of options with these prefixes."""

TRAINER_ARGUMENTS = (
    *("model", "args", "train_dataset", "eval_dataset", "processing_class", "callbacks", "optimizers"),
    *("quantization_config", "peft_config", "tools", "rollout", "reward_funcs", "reward_processing_classes"),
    *("teacher_processing_class", "teacher_prompt_fn", "prompt_weight_fn", "environment_factory"),
)
"""Arguments of `OPSDTrainer` that are no options as well."""


@cache
def advice(config: type) -> Mapping[str, str]:
    """What to do instead of every name of other trainers."""
    also = {other: f"it is called `{name}`" for name, one in table(config).items() for other in one.also.split()}
    return {**also, **_ADVICE}


def instead(name: str, known: Iterable[str], config: type) -> str:
    """What to do instead of an unknown option or argument; empty if nothing is near."""
    prefix = next((start for start in _FAMILIES if name.startswith(start)), "")
    close = did_you_mean(name, [one for one in known if one.startswith(prefix)])
    return advice(config).get(name) or close or _FAMILIES.get(prefix, "")


def _explained(what: str, name: str, known: Collection[str], config: Any) -> str:
    """A sentence about an option or an argument, as `what` says, that does not exist."""
    if what == "option" and name in TRAINER_ARGUMENTS:
        return f"has no option {name!r}: it is an argument of `OPSDTrainer`."
    if what == "argument" and name in {one.name for one in fields(config)}:
        return f"has no argument {name!r}: it is an option, `args=OPSDConfig({name}=...)`."
    found = (
        instead(name, known, config) or "see docs/reference.md for all, docs/migration.md for those of other trainers."
    )
    return f"has no {what} {name!r}: {found}"


def without_meaning(name: str, config: type, known: Collection[str]) -> str:
    """Why a new attribute beside the known ones would change nothing; empty for one of the user's own.

    A name of one word, or one that continues a known one, is the user's: `config`, `rollouts`, `train_dataset_2`.
    """
    if name.startswith("_"):
        return ""
    if "_" in name and name in advice(config):
        return advice(config)[name]
    candidates = [one for one in known if not one.startswith("_") and not name.startswith(one)]
    close = difflib.get_close_matches(name, candidates, n=1, cutoff=0.9)
    return f"it is unknown; did you mean `{close[0]}`" if close else ""


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """The known name that this one may be a slip of, or at most three that have all of its parts.

    Example:

    ```python
    >>> nearest("vllm_host", ["vllm_server_host", "hub_token"]), nearest("eos_token", ["vllm_server_host", "hub_token"])
    (['vllm_server_host'], [])
    ```
    """
    # None where none is near: a wrong hint costs more than no hint.
    known = sorted(known, key=lambda one: (len(one), one))  # often a set, whose order differs from process to process
    longer = [one for one in known if set(name.split("_")) <= set(one.split("_"))]
    slip, similar = (difflib.get_close_matches(name, known, n=1, cutoff=cutoff) for cutoff in (0.9, 0.8))
    return slip or longer[:3] or similar


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question with the nearest names; empty if there are none."""
    close = nearest(name, known)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else ""


class StrictNames:
    """A class whose constructor refuses unknown names, each with what to do.

    A subclass that takes `**kwargs` may know more names than its signature tells, so it is left to Python.
    """

    _config_class: ClassVar[type | None] = None
    """The config of a class that takes arguments; `None` for a config itself, which takes options."""

    def __new__(cls, *args: Any, **given: Any) -> Self:
        """Checks the names; `__init__` takes the values.

        Raises:
            TypeError: A name is unknown.
        """
        known = inspect.signature(cls.__init__).parameters
        if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values()):
            unknown = [name for name in given if name not in known]
            if unknown:
                what, names = "argument" if cls._config_class else "option", list(known)[1:]
                told = (_explained(what, name, names, cls._config_class or cls) for name in unknown)
                raise TypeError("\n".join(f"`{cls.__name__}` {one}" for one in told))
        return super().__new__(cls)
