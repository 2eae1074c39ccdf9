"""Describes a trainer to a person: what runs, on what, and the first prompts of student and teacher."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from datasets import Dataset
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_opsd._compat.peft import CausalLM, is_peft
from trl_opsd.data.datasets import AnyDataset, by_name, columns_of
from trl_opsd.data.images import TEACHER_IMAGE_COLUMNS
from trl_opsd.data.prompts import Request
from trl_opsd.data.readers import Reader
from trl_opsd.loop.hooks import TrainerHooks
from trl_opsd.loop.overrides import of_package
from trl_opsd.losses.divergence import describe
from trl_opsd.methods.rewards import Rewards
from trl_opsd.models.checks import described, sizes
from trl_opsd.models.tokenizers import readable
from trl_opsd.options.normalize import SAMPLING
from trl_opsd.options.rules import prompts_of_step
from trl_opsd.options.table import shape_in_words, temperatures_in_words
from trl_opsd.parallel.precision import rounds_float32

_WIDTH = 120
"""Characters in a line."""
_PROMPT = 600
"""Maximum characters shown of a prompt; of a longer one, its beginning and its end."""
_OF_TEACHER = "teacher's prompt"
"""Name of the entry with the teacher's first prompt."""
_TOO_LOW = ", at most a hundredth of what adapters usually take (1e-4 to 2e-4)"


class Banner(TrainerCallback):
    """Prints the description of a trainer when a training begins, in the main process.

    It shows the first prompt; `trainer.remove_callback(Banner)` silences it. `add` returns the entry that is known only
    after a step, or `None`; it is printed once.
    """

    def __init__(self, describe: Callable[[], str], add: Callable[[], str | None]) -> None:
        self._describe, self._add = describe, add
        self._added: str | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero:
            tqdm.write(self._describe())  # on lines of its own, beside a progress bar
        self._added = self._add()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero and self._added is None and (added := self._add()) is not None:
            tqdm.write(added)
            self._added = added


@dataclass(frozen=True, slots=True)
class Described:
    """A complete trainer, to be described. Nothing here is collective: one process may do it alone."""

    trainer: TrainerHooks
    rewards: Collection[str]
    """Names of its reward functions."""

    def text(self, reads_stream: bool = False) -> str:
        """The description, an entry for each part; `reads_stream` shows the first row of a stream, which reads it."""
        return "\n".join([type(self.trainer).__name__, *_filled(chain(self._parts(), self._rows(reads_stream)))])

    def later(self) -> str | None:
        """The entry that is known only after a step: the first prompt that code of the user has made for a teacher."""
        made = self.trainer.teaching.first_made
        return None if made is None else "\n".join(_filled([(_OF_TEACHER, self._shown(*made))]))

    def settings(self) -> dict[str, str]:
        """How it trains, for a model card: the entries that name no folder and show no row."""
        told = ("steps", "completions", "rewards", "optimizer")
        return {name: " ".join(said.replace(_TOO_LOW, "").split()) for name, said in self._parts() if name in told}

    def _parts(self) -> Iterator[tuple[str, str]]:
        args, teachers = self.trainer.args, self.trainer.teaching.teachers
        yield "student", self._student()
        kinds = {
            None: "",
            "base": f"the {'student without its adapter' if is_peft(self.trainer.model) else 'initial student'}: ",
            "ema": f"moving average of the student (update rate {args.teacher_update_rate:g}, every "
            f"{args.teacher_sync_steps} steps): ",
            "live": "the current student: ",
        }
        copies = teachers.average.copies.values() if teachers.average else ()
        averaged = f"; averaged in {sizes(copies)}" if copies else ""
        for name, teacher in teachers.items():
            of_teacher = f"{kinds[args.teacher_model_kind]}{teacher}{averaged}"
            yield "teacher" if len(teachers) == 1 else f"teacher {name!r}", of_teacher
        yield "attention", self._attention()
        yield "processes", self.trainer.strategy
        yield "steps", self._steps()
        yield "completions", self._completions()
        tempered = temperatures_in_words(*self.trainer.temperatures)
        yield (
            "objective",
            f"{describe(self.trainer.divergence)}, {tempered}{shape_in_words(args)}{self.trainer.methods.words}",
        )
        if self.rewards and (rewards := self.trainer.methods.get(Rewards)) is not None:
            lacking = "" if self.trainer.train_dataset is None else ": training rows lack their columns"
            logged = ", logged only" if rewards.logs_in_training else f", in evaluations only{lacking}"
            yield "rewards", ", ".join(self.rewards) + ("" if self.trainer.teaching.learned_rewards else logged)
        if self.trainer.methods.of_user:
            yield "methods", ", ".join(type(one).__name__ for one in self.trainer.methods.of_user)
        yield "optimizer", self._optimizer()

    def _student(self) -> str:
        model, precision = self.trainer.model, self.trainer.accelerator.mixed_precision
        trained = [one for one in model.parameters() if one.requires_grad]
        part = "" if len(trained) == len(list(model.parameters())) else f", {sizes(trained)} trainable"
        seeing = getattr(model.config, "vision_config", None)
        towers = [one for one in model.modules() if seeing is not None and getattr(one, "config", None) is seeing]
        if is_peft(model) and any(one.requires_grad for tower in towers for one in tower.parameters()):
            part += ", in the vision tower too"
        computes = "" if precision == "no" else f"; computes in {precision}"
        return f"{described(model)}{part}{computes}{'; rounds float32 products' if rounds_float32() else ''}"

    def _attention(self) -> str:
        """The implementation in each model, or in all of them."""
        found = {"student": self.trainer.model.config._attn_implementation}
        for name, teacher in self.trainer.teaching.teachers.items():
            model = getattr(getattr(teacher, "teacher", teacher), "model", None)
            if isinstance(model, CausalLM):  # else a server's, or a user's own
                found[name] = model.config._attn_implementation
        same = len({*found.values()}) == 1
        return found["student"] if same else ", ".join(f"{name} {kind}" for name, kind in found.items())

    def _steps(self) -> str:
        args, state = self.trainer.args, self.trainer.state
        factors = args.per_device_train_batch_size, args.world_size, args.gradient_accumulation_steps
        rows, number = factors[0] * factors[1] * factors[2], args.num_generations
        what = f"{rows} prompts" if number == 1 else f"{rows // number} prompts x {number} completions"
        batch = "{} each: {} per device x {} processes x {} accumulation steps".format(what, *factors)
        if state.max_steps > 0:  # known once a training has begun
            return f"{state.max_steps} of {batch}" + (f"; {state.global_step} done" if state.global_step else "")
        return f"{args.max_steps} of {batch}" if args.max_steps > 0 else f"{args.num_train_epochs} epochs of {batch}"

    def _completions(self) -> str:
        trainer, options, limit = self.trainer, self.trainer.generation_config, self.trainer.limits.completion
        context = trainer.limits.context if trainer.args.has_engine else None
        where = f"by {trainer.rollout}" + (f" with a context of {context} tokens" if context else "")
        shown = [where, f"at most {min(options.max_new_tokens or limit, limit)} tokens"]
        # What it takes from the student's own config; `None` if it may not even follow the options.
        if (of_student := getattr(trainer.rollout, "of_student", None)) is not None:
            others = {**(trainer.args.generation_kwargs or {}), **of_student}
            sampling = {name: of_student.get(name, getattr(options, name)) for name in SAMPLING}
            beams = others.pop("num_beams", options.num_beams) or 1
            shown += [
                f"{beams} beams" if beams > 1 else "",
                _listed(sampling) if options.do_sample else "greedy",
                _listed({name: value for name, value in others.items() if name not in (*SAMPLING, "do_sample")}),
            ]
            if (evaluated := trainer.args.eval_temperature) is not None:
                shown.append(f"in evaluations {f'temperature {evaluated:g}' if evaluated else 'greedy'}")
        if trainer.tools:
            shown.append(f"with the tools {', '.join(tool.__name__ for tool in trainer.tools)}")
        return ", ".join(filter(None, shown))

    def _optimizer(self) -> str:
        args, used = self.trainer.args, self.trainer.optimizer
        while hasattr(used, "optimizer"):  # what accelerate and DeepSpeed wrap around it
            used = used.optimizer
        groups = [] if used is None else used.param_groups
        # A scheduler keeps the rate it starts from, and changes the other at once.
        rates = sorted({float(one.get("initial_lr", one["lr"])) for one in groups}) or [args.learning_rate]
        low = _TOO_LOW if is_peft(self.trainer.model) and rates[-1] <= 1e-6 else ""
        name = args.optim.value if used is None else type(used).__name__
        return f"{name}, learning rate {', '.join(map(str, rates))}{low}"

    def _rows(self, reads_stream: bool) -> Iterator[tuple[str, str]]:
        trainer = self.trainer
        named = {"train_dataset": trainer.train_dataset, **by_name(trainer.eval_dataset)}
        where, dataset = next((name, one) for name, one in named.items() if one is not None)
        is_stream = not isinstance(dataset, Dataset)
        step = prompts_of_step(trainer.args)
        left = 0 if is_stream or dataset is not trainer.train_dataset else len(dataset) % step
        more = f", {left} dropped per epoch: they do not fill a step of {step} prompts" if left else ""
        yield "rows", f"{where}, a stream" if is_stream else f"{len(dataset)} in {where}{more}"
        if unread := self._unread(dataset):
            yield "unused columns", ", ".join(unread)
        if is_stream and not reads_stream:
            yield "prompts", "shown when training starts"
            return
        row = next(iter(dataset), None)
        if row is None:
            raise ValueError(f"`{where}` is an empty stream, or all its rows were dropped because they are too long.")
        readers, made, by = trainer.teaching.readers, trainer.teaching.first_made, trainer.methods.rewriting
        request = readers.intake.read(row, f"row 0 of {where}")
        yield "prompt", self._decoded(readers.student, request)
        if made is not None:
            yield _OF_TEACHER, self._shown(*made)
        elif by:
            yield _OF_TEACHER, f"what {by} returns, shown after the first step"
        else:
            name = _OF_TEACHER if len(readers.intake.teachers) == 1 else f"prompt of {request.teacher!r}"
            later = {
                "what the environment tells": readers.intake.is_told,
                "a success of its group": trainer.methods.fall_back,
                "its own images": not {*TEACHER_IMAGE_COLUMNS}.isdisjoint(columns_of(dataset) or ()),
            }
            own = "the same" if readers.are_alike(request) else self._decoded(readers.teacher, request)
            yield name, " + ".join([own, *(text for text, is_there in later.items() if is_there)])

    def _unread(self, dataset: AnyDataset) -> list[str]:
        """Columns that nothing reads, as far as is known: a function or a subclass may read any."""
        methods = self.trainer.methods
        sees_rows = self.rewards or methods.rewriting or methods.of_user or not of_package(self.trainer.weigh)
        read = {*self.trainer.row_columns}
        if len(self.trainer.teaching.readers.intake.teachers) == 1:
            read.discard("teacher")
        return [] if sees_rows else [repr(name) for name in columns_of(dataset) or () if name not in read]

    def _decoded(self, reader: Reader, request: Request) -> str:
        prompt = reader.prompt_of(request)
        source = "chat template" if prompt.kind == "messages" else "text, no chat template"
        return self._shown(reader.token_ids([prompt])[0], reader.tokenizer_of(prompt), source)

    def _shown(self, ids: list[int], tokenizer: PreTrainedTokenizerBase, source: str) -> str:
        text = readable(ids, tokenizer, self.trainer.placeholders)
        if len(text) > _PROMPT:
            text = f"{text[: _PROMPT // 2]} [...] {text[-_PROMPT // 2 :]}"
        return f"{len(ids)} tokens ({source}): {text!r}"


def _filled(parts: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Names and texts in two columns."""
    parts = list(parts)
    width = max(len(name) for name, _ in parts)
    indent = " " * (width + 4)
    for name, text in parts:
        yield textwrap.fill(f"  {name:<{width}}  {text}", _WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def _listed(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items() if value is not None)
