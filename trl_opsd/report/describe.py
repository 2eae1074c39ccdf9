"""Says in words what a trainer does: on the console when a training begins, in the model card and in the report.

A card is published, so it names no folders or servers, and shows no rows. TRL's names the base model only if that is
on the Hub (else "None"), no teacher, and one paper for every method.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets import Dataset
from huggingface_hub import ModelCard
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_opsd._compat.peft import is_peft
from trl_opsd._compat.versions import installed
from trl_opsd.data.datasets import AnyDataset, by_name, columns_of
from trl_opsd.data.prompts import Request
from trl_opsd.data.readers import Reader
from trl_opsd.losses.divergence import describe
from trl_opsd.methods import METHODS
from trl_opsd.methods.rewards import PromptFunction, Rewards
from trl_opsd.models.checks import described, sizes
from trl_opsd.models.tokenizers import readable
from trl_opsd.options.normalize import SAMPLING
from trl_opsd.options.rules import prompts_of_step
from trl_opsd.options.table import shape_in_words, temperatures_in_words
from trl_opsd.parallel.precision import rounds_float32

if TYPE_CHECKING:
    from trl_opsd.trainer import OPSDTrainer

_WIDTH = 120
"""Characters in a line."""
_PROMPT = 360
"""Maximum characters shown of a prompt; of a longer one, its beginning and its end."""
_PRIVATE = re.compile(r"https?://\S+|(?<!\w)'([^']+)'")
"""Addresses, and paths of folders or names on the Hub."""
_PROCEDURE = "## Training procedure"
"""The line of TRL's card that ours follow."""


class Banner(TrainerCallback):
    """Prints the description of a trainer when a training begins, in the main process.

    It shows the first prompt, but of a stream; `trainer.remove_callback(Banner)` silences it.
    """

    def __init__(self, trainer: OPSDTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero:
            tqdm.write(text(self._trainer))  # on lines of its own, beside a progress bar


def text(trainer: OPSDTrainer) -> str:
    """The description, names and texts in two columns."""
    parts = [*_parts(trainer).items(), *_rows(trainer)]
    width = max(len(name) for name, _ in parts)
    filler = textwrap.TextWrapper(_WIDTH, subsequent_indent=" " * (width + 4), break_on_hyphens=False)
    return "\n".join([type(trainer).__name__, *(filler.fill(f"  {name:<{width}}  {said}") for name, said in parts)])


def published(trainer: OPSDTrainer) -> dict[str, str]:
    """Models, objective and settings by topic, for the card and the report: a folder by its last name, no address."""

    def known(found: re.Match[str]) -> str:
        return "a server" if found[1] is None else repr(found[1] if is_of_hub(found[1]) else Path(found[1]).name)

    def is_of_hub(path: str) -> bool:
        return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", path)) and not os.path.isdir(path)

    return {topic: _PRIVATE.sub(known, said) for topic, said in _parts(trainer).items()}


def complete_card(trainer: OPSDTrainer) -> None:
    """Completes the `README.md` that TRL has written to the output folder."""
    args, parts = trainer.args, published(trainer)
    path = Path(args.output_dir) / "README.md"
    card = ModelCard.load(path)
    made_with = ", ".join(f"{name} {one}" for name, one in installed().items() if name in ("trl_opsd", "torch"))
    entries = {**parts, "made with": f"{made_with}, seed {args.seed}"}
    lines = "\n".join(f"- {topic[0].upper()}{topic[1:]}: {said}" for topic, said in entries.items())
    found = card.text.replace(_PROCEDURE, f"{_PROCEDURE}\n\n{lines}", 1)
    found = re.sub(r"\[None\]\([^)]*\)", lambda _: parts["student"], found)
    card.text = found.replace('model="None"', f'model="{trainer.hub_model_id or args.output_dir}"')
    card.save(path)


# ---- Parts ----------------------------------------------------------------------------------------------------------


def _parts(trainer: OPSDTrainer) -> dict[str, str]:
    """The entries but those about rows. Nothing here is collective: one process may do it alone."""
    args, model, teachers = trainer.args, trainer.model, trainer.teaching.teachers
    kinds = {
        None: "",
        "base": f"the {'student without its adapter' if is_peft(model) else 'initial student'}: ",
        "ema": f"moving average of the student (update rate {args.teacher_update_rate:g}, every "
        f"{args.teacher_sync_steps} steps): ",
        "live": "the current student: ",
    }
    parts = {"student": _student(trainer)}
    for name, teacher in teachers.items():
        topic = "teacher" if len(teachers) == 1 else f"teacher {name!r}"
        parts[topic] = f"{kinds[args.teacher_model_kind]}{teacher}"
    parts |= {
        "attention": model.config._attn_implementation,
        "processes": trainer.strategy,
        "steps": _steps(trainer),
        "completions": _completions(trainer),
        "objective": f"{describe(trainer.divergence)}, {temperatures_in_words(*trainer.temperatures)}"
        f"{shape_in_words(args)}",
    }
    if trainer._reward_names and (rewards := trainer.methods.get(Rewards)) is not None:
        logged = ", logged only" if rewards.logs_in_training else ", in evaluations only"
        parts["rewards"] = ", ".join(trainer._reward_names) + ("" if trainer.teaching.learned_rewards else logged)
    # Of a user's own the name alone: their settings may be private.
    of_user = [type(one).__name__ for one in trainer.methods.of_user]
    if methods := [one.described() for one in trainer.methods if one.resumed and type(one) in METHODS] + of_user:
        parts["methods"] = ", ".join(methods)
    used = trainer.optimizer
    while hasattr(used, "optimizer"):  # what accelerate and DeepSpeed wrap around it
        used = used.optimizer
    name = args.optim.value if used is None else type(used).__name__
    groups = getattr(trainer.optimizer, "param_groups", [])
    # A scheduler keeps the rate it starts from, and changes the other at once.
    rates = sorted({float(one.get("initial_lr", one["lr"])) for one in groups}) or [args.learning_rate]
    return {**parts, "optimizer": f"{name}, learning rate {', '.join(map(str, rates))}"}


def _student(trainer: OPSDTrainer) -> str:
    model, precision = trainer.model, trainer.accelerator.mixed_precision
    trained = [one for one in model.parameters() if one.requires_grad]
    part = "" if len(trained) == len(list(model.parameters())) else f", {sizes(trained)} trainable"
    computes = "" if precision == "no" else f"; computes in {precision}"
    return f"{described(model)}{part}{computes}{'; rounds float32 products' if rounds_float32() else ''}"


def _steps(trainer: OPSDTrainer) -> str:
    args, state = trainer.args, trainer.state
    factors = args.per_device_train_batch_size, args.world_size, args.gradient_accumulation_steps
    rows, number = factors[0] * factors[1] * factors[2], args.num_generations
    what = f"{rows} prompts" if number == 1 else f"{rows // number} prompts x {number} completions"
    batch = "{} each: {} per device x {} processes x {} accumulation steps".format(what, *factors)
    if state.max_steps > 0:  # known once a training has begun
        return f"{state.max_steps} of {batch}" + (f"; {state.global_step} done" if state.global_step else "")
    return f"{args.max_steps} of {batch}" if args.max_steps > 0 else f"{args.num_train_epochs:g} epochs of {batch}"


def _completions(trainer: OPSDTrainer) -> str:
    args, options, limit = trainer.args, trainer.generation_config, trainer.limits.completion
    given = f"of the {'teacher' if args.seq_kd else 'dataset'} for {1 - args.lmbda:g} of the rows"
    most = f"at most {min(options.max_new_tokens or limit, limit)} tokens"
    shown = [given if args.lmbda < 1 else "", f"by {trainer.rollout}", most]
    # What it takes from the student's own config; `None` if it may not even follow the options.
    if (of_student := getattr(trainer.rollout, "of_student", None)) is not None:
        sampling = {name: getattr(options, name) for name in SAMPLING} if options.do_sample else {"do_sample": False}
        used = {**sampling, **(args.generation_kwargs or {}), **of_student}
        shown += [f"{name} {value}" for name, value in used.items() if value is not None]
    if trainer.tools:
        shown.append(f"with the tools {', '.join(tool.__name__ for tool in trainer.tools)}")
    return ", ".join(filter(None, shown))


# ---- Rows -----------------------------------------------------------------------------------------------------------


def _rows(trainer: OPSDTrainer) -> Iterator[tuple[str, str]]:
    named = {"train_dataset": trainer.train_dataset, **by_name(trainer.eval_dataset)}
    where, dataset = next((name, one) for name, one in named.items() if one is not None)
    is_stream = not isinstance(dataset, Dataset)
    step = prompts_of_step(trainer.args)
    left = 0 if is_stream or dataset is not trainer.train_dataset else len(dataset) % step
    more = f", {left} dropped per epoch: they do not fill a step of {step} prompts" if left else ""
    times = 0 if is_stream or dataset is not trainer.train_dataset else trainer.state.max_steps * step / len(dataset)
    more = f", each read {times:.3g} times{more}" if times > 1 else more
    yield "rows", f"{where}, a stream" if is_stream else f"{len(dataset)} in {where}{more}"
    if unread := _unread(trainer, dataset):
        yield "unused columns", ", ".join(unread)
    if is_stream:
        return
    readers, methods = trainer.teaching.readers, trainer.methods
    request = readers.intake.read(dataset[0], f"row 0 of {where}")
    yield "prompt", _decoded(trainer, readers.student, request)
    name = "teacher's prompt" if len(readers.intake.teachers) == 1 else f"prompt of {request.teacher!r}"
    if methods.get(PromptFunction) is not None or any(one.has("teacher_prompt") for one in methods.of_user):
        yield name, "made of each completion, by `teacher_prompt_fn` or a method"
    else:
        own = "the same" if readers.are_alike(request) else _decoded(trainer, readers.teacher, request)
        yield name, own + " + what it is told later" * (readers.intake.is_told or methods.any("falls_back"))


def _unread(trainer: OPSDTrainer, dataset: AnyDataset) -> list[str]:
    """Columns that nothing reads, as far as is known: a function or a subclass may read any."""
    weighs, calls = not str(trainer.weigh.__module__).startswith("trl_opsd."), trainer.methods.get(PromptFunction)
    if trainer._reward_names or calls is not None or trainer.methods.of_user or weighs:
        return []
    return [repr(name) for name in columns_of(dataset) or () if name not in trainer.row_columns]


def _decoded(trainer: OPSDTrainer, reader: Reader, request: Request) -> str:
    prompt = reader.prompt_of(request)
    source = "chat template" if prompt.kind == "messages" else "text, no chat template"
    ids = reader.token_ids([prompt])[0]
    said = readable(ids, reader.tokenizer_of(prompt), trainer.placeholders)
    if len(said) > _PROMPT:
        said = f"{said[: _PROMPT // 2]} [...] {said[-_PROMPT // 2 :]}"
    return f"{len(ids)} tokens ({source}): {said!r}"
