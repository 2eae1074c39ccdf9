"""Generates the completions of a batch: by the rollout, the dataset or the teachers, and checks them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from accelerate.logging import get_logger

from trl_opsd._compat.sharding import is_split_model
from trl_opsd._compat.versions import replaced
from trl_opsd.data.completions import COMPLETION, recorded
from trl_opsd.data.images import in_parts
from trl_opsd.data.prompts import PREFIX
from trl_opsd.data.readers import PromptLimits
from trl_opsd.loop.overrides import of_package, own_verbs
from trl_opsd.methods.rows import BatchRow, Written
from trl_opsd.models.backbone import preserved_mode
from trl_opsd.models.probes import Probed, prove_student
from trl_opsd.parallel.precision import autocast
from trl_opsd.parallel.rng import derived_seed
from trl_opsd.rollout import RolloutBackend
from trl_opsd.rollout.returned import begin_with_prompts, checked_completions, checked_stream
from trl_opsd.types.rollout import Author, Given, PromptIds

if TYPE_CHECKING:
    from trl_opsd.loop.turns import Turns
    from trl_opsd.parallel.prefetch import Closable
    from trl_opsd.rollout.teacher_rollout import TeacherRollout
    from trl_opsd.trainer import OPSDTrainer

logger = get_logger(__name__)

_users: WeakValueDictionary[int, Generation] = WeakValueDictionary()
"""Who each rollout was last bound to, by the id of the rollout, which is kept alive there."""


class Generation:
    """The completions of generation batches.

    With `lmbda` below 1 some rows have the completion of the dataset or of their teacher, as in TRL's GKD trainer:
    which ones follows from `seed`, the step, and the place of a row among all processes. Evaluations have none.
    """

    rollout: RolloutBackend

    def __init__(self, host: OPSDTrainer) -> None:
        self._host = host
        self.overlapping: Callable[[list[list[int]]], list[list[int]]] | None = None
        """Completes the prompts of a training in place of the verb `complete`, with `overlap`."""
        self.rows: Sequence[BatchRow] = ()
        """The rows being generated."""
        self._surplus: list[list[int]] = []
        self._has_completed = self._is_proved = False
        self.is_overridden = False
        """Whether a subclass of the trainer has a `complete` of its own."""
        self._teacher_rollouts: Mapping[str, TeacherRollout] = {}
        self._substitute: Any = None

    # ---- The rollout --------------------------------------------------------------------------------------------

    def bind(self, rollout: RolloutBackend) -> None:
        """Binds a rollout to this trainer; rejects one that cannot work with `overlap='ahead'`."""
        self.is_overridden = "complete" in own_verbs(type(self._host))
        if self._host.args.overlap == "ahead":
            self._check_generates_apart(rollout)
        rollout.bind(self._host)
        self.rollout = rollout
        _users[id(rollout)] = self

    def _check_generates_apart(self, rollout: RolloutBackend) -> None:
        if not rollout.generates_out_of_process:
            why = f"{type(rollout).__name__} generates in the trainer's process: set `vllm_mode='server'`, or"
        elif self._host.tools:
            why = "rows with `tools` are generated over several turns:"
        elif self.is_overridden:
            why = f"it would not call `{type(self._host).__name__}.complete`:"
        else:
            return
        raise ValueError(f"`overlap='ahead'`: {why} remove `overlap`.")

    @property
    def streams(self) -> bool:
        """Whether rows can be generated one by one, as `complete` would."""
        return self._apart is not None or not (self.is_overridden or self._host.tools)

    @property
    def _apart(self) -> Turns | None:
        """What has rows go their way without waiting for others; `None` where they wait, or have one turn."""
        turns = self._host.turns
        return turns if turns is not None and turns.are_apart else None

    @property
    def notifies_teacher(self) -> bool:
        """Whether a teacher is notified of each row when it has ended."""
        return self._host.args.overlap == "step" and self.streams and self._host.teaching.begins_early

    def complete(self, prompt_ids: list[list[int]]) -> list[list[int]]:
        """One checked completion of the rollout for each prompt."""
        self.be_ready()
        # A copy, so that changing it does not change what is trained on.
        returned = self.rollout.complete([ids.copy() for ids in prompt_ids], self._host.state.global_step)
        return checked_completions(returned, self._host, prompt_ids, type(self.rollout).__name__)

    def stream(self, prompt_ids: list[list[int]]) -> Closable[tuple[int, list[int]]]:
        """Generates as `complete`: the number of each prompt with its completion, checked, as it ends."""
        if self._apart is not None:
            return self._apart.stream(prompt_ids)
        self.be_ready()
        rows = self.rollout.stream([ids.copy() for ids in prompt_ids], self._host.state.global_step)
        return checked_stream(rows, self._host, prompt_ids, type(self.rollout).__name__)

    def be_ready(self) -> None:
        """Verifies the student, whose weights are where they will be, and that no other trainer has the rollout."""
        self.prove_student()
        if _users.get(id(self.rollout)) is not self:  # another trainer has used it since
            self.bind(self.rollout)

    def prove_student(self) -> None:
        """Verifies the student by running it, unless that was done, once its weights are where they will be."""
        host = self._host
        if self._is_proved:
            return
        more = () if host.cross is None else host.cross.probes
        host.batching = prove_student(
            host.model, host.in_student, host.args, host.accelerator, host.args.padding_free, more
        )
        self._is_proved = True
        if host.reads_images:
            self.prove_images()

    def prove_images(self) -> None:
        """Verifies how the student reads images. Collective if it is sharded."""
        host = self._host
        if host.processors[""] is None:  # the teacher alone sees some
            return
        prompts = host.probe_prompts()
        # DeepSpeed reduces gradients in buckets, which have to be the same in all processes, whatever it shards.
        if is_split_model(host.model) or host.is_deepspeed_enabled:
            if not host.batching.padded_up_to:
                raise ValueError("This student cannot read images under DeepSpeed or FSDP2, only under DDP.")
            host.batching = replace(host.batching, dummy_image_prompt=prompts[0])
        with autocast(host.accelerator):
            Probed(host.model, "student", host.in_student).reads(prompts, host.batching)

    # ---- The turns of a batch -----------------------------------------------------------------------------------

    def mark(self, rows: Sequence[BatchRow]) -> None:
        """Sets the place of each row of a batch, over all processes, whether it is off-policy, and whether padding."""
        args, state, distinct = self._host.args, self._host.state, self._host.distinct_rows
        for place, row in enumerate(rows, start=self._host.accelerator.process_index * len(rows)):
            row.place, row.author = place, Author.STUDENT
            row.is_padding = distinct is not None and place >= distinct
            if self._host.model.training and args.lmbda < 1:
                # Uniform in [0, 1), independent of torch's random state: a resumed run draws the same.
                drawn = derived_seed(args.seed, state.global_step, place) / 2**63
                if drawn >= args.lmbda:
                    row.author = Author.TEACHER if args.seq_kd else Author.DATASET

    def write(self, rows: Sequence[BatchRow], prompt_ids: list[list[int]]) -> Written:
        """Generates the completions of a batch, with the turns that follow their first. Collective."""
        host, self.rows, self._surplus = self._host, rows, prompt_ids[:1]
        with self.rollout.session():
            with host.phase("complete"), preserved_mode(host.model):
                completions = self._by_row(prompt_ids)
                if host.reads_logprobs:
                    for row, prompt, ids in zip(rows, prompt_ids, completions, strict=True):
                        self.note_logprobs(row, prompt, ids)
            return self.turned(prompt_ids, completions)

    def turned(self, prompt_ids: list[list[int]], completions: list[list[int]]) -> Written:
        """These first turns, and with tools those that follow. Collective."""
        turns = self._host.turns
        if turns is None or not self._host.tools:
            return Written(prompt_ids, completions)
        written = turns.run(prompt_ids, completions)
        while self.turn([]) is not None:  # later turns of other processes
            pass
        return written

    def turn(self, contexts: list[list[int]]) -> list[list[int]] | None:
        """The completions of a later turn; `None` if no process has any. Collective."""
        with self._host.phase("complete"), preserved_mode(self._host.model):
            return self._together(contexts)

    def note_logprobs(self, row: BatchRow, prompt_ids: list[int], completion_ids: list[int]) -> None:
        """Sets the sampling log-probabilities of a row, as soon as the rollout has returned it."""
        # The rollout may know the same row by chance, or a method has written it.
        if row.is_off_policy or self._substitute is not None or row.logprobs is not None:
            return
        row.logprobs = self.rollout.logprobs(prompt_ids, completion_ids) if row.prompt_weight else []

    def _by_row(self, prompt_ids: list[list[int]]) -> list[list[int]]:
        """A completion for each prompt, from the dataset, the teacher or the student; empty if skipped. Collective."""
        args = self._host.args
        if not self._host.model.training or (args.lmbda == 1 and not self._host.methods.any("skips")):
            return self._asked(prompt_ids)
        self.be_ready()  # verifies the student, even if it generates nothing in this batch
        found: dict[int, list[int]] = {number: [] for number, row in enumerate(self.rows) if not row.prompt_weight}
        given = {number: row for number, row in enumerate(self.rows) if row.is_off_policy and row.prompt_weight}
        if args.seq_kd and given:
            for row, ids in zip(given.values(), self._of_teachers(list(given.values())), strict=True):
                row.given = Given(ids, [Author.TEACHER] * len(ids))
        elif given:
            for number, row in given.items():
                row.given = self.of_dataset(row, prompt_ids[number], COMPLETION)
        found |= {number: [] for number in given}  # nothing follows what is given
        rest = [number for number in range(len(prompt_ids)) if number not in found]
        written = self._together([prompt_ids[number] for number in rest]) or []
        found.update(dict(zip(rest, written, strict=True)))
        return [found[number] for number in range(len(prompt_ids))]

    def _together(self, prompt_ids: list[list[int]]) -> list[list[int]] | None:
        """The student's completions; `None` where no process has prompts. Collective."""
        rows = torch.tensor([len(prompt_ids)], device=self._host.accelerator.device)
        return self._asked(prompt_ids) if self._host.accelerator.gather(rows).any() else None

    def _asked(self, prompt_ids: list[list[int]]) -> list[list[int]]:
        """What `complete` returns, as token ids up to the first end token; raises if these cannot be trained on."""
        if self._substitute is not None:  # in place of the rollout, whoever calls that
            return self._substitute.complete(prompt_ids) if prompt_ids else []
        host, name = self._host, type(self.rollout).__name__
        # A user's rollout is called as often as in other processes, but never without a prompt: few would accept that.
        # A method that writes takes part as long as another process does.
        writes = host.model.training and host.methods.any("writes")
        is_surplus = not (
            prompt_ids or (not writes and of_package(host.complete) and of_package(self.rollout.complete))
        )
        prompt_ids = self._surplus if is_surplus else prompt_ids
        complete = self.overlapping if self.overlapping is not None and host.model.training else host.complete
        if writes:
            none = BatchRow(self.rows[0].request, is_padding=True, images=self.rows[0].images)
            rows = [none] if is_surplus else [row for row in self.rows if row.by_student]
            completions = host.methods.complete(rows, prompt_ids, complete)
        else:
            completions = complete(prompt_ids) if self._apart is None else self._apart.first(prompt_ids)
        if self.is_overridden:
            name = f"{type(host).__name__}.complete"
            completions = checked_completions(completions, host, prompt_ids, name)
        self.look_at_first(prompt_ids, completions, name)
        return [] if is_surplus else completions

    def look_at_first(self, prompt_ids: list[list[int]], completions: list[list[int]], name: str) -> None:
        """Warns if the first completions contain their prompts."""
        padding = {self._host.processing_class.pad_token_id, *self._host.eos_token_ids}
        if not self._has_completed and begin_with_prompts(completions, prompt_ids, padding):
            logger.warning(
                f"Every completion returned by {name} starts with its whole prompt, which would be trained on: return "
                "only the tokens after the prompt, `ids[len(prompt):]`."
            )
        self._has_completed = True

    # ---- Off-policy completions ---------------------------------------------------------------------------------

    @contextmanager
    def substituted(self, substitute: Any) -> Iterator[None]:
        """Has the method `complete` of a substitute write all turns, in place of the rollout."""
        with replaced(self, _substitute=substitute):
            yield

    def teacher_rollout(self, teacher: Any, limits: PromptLimits) -> TeacherRollout:
        """A teacher that completes prompts; a `ValueError` if it cannot."""
        from trl_opsd.rollout.teacher_rollout import TeacherRollout

        if self._host.cross is None:
            return TeacherRollout(self._host, teacher, limits)
        return TeacherRollout(self._host, teacher.teacher, limits, teacher)

    def check_is_own(self, method: str) -> None:
        """Refuses what would train on completions of another model, or log them as the student's."""
        if self._substitute is not None:
            raise ValueError(f"`{method}` within `generating_with`, where another model generates: use `predict`.")

    def use_teachers(self, teachers: Mapping[str, Any]) -> None:
        """Prepares each teacher to generate for its rows with `seq_kd`; a `ValueError` if one cannot."""
        limits = self._host.teaching.readers.teacher_limits
        self._teacher_rollouts = {
            name: self.teacher_rollout(teacher, limits[name]) for name, teacher in teachers.items()
        }

    def _of_teachers(self, rows: Sequence[BatchRow]) -> list[list[int]]:
        reader = self._host.teaching.readers.teacher
        requests = [row.request for row in rows]
        reader.check_kind([one.of_teacher for one in requests])
        prompts = reader.token_ids([one.of_teacher for one in requests])
        for one, ids in zip(requests, prompts, strict=True):
            reader.limits_of(one).check(len(ids), max(ids, default=0), one.of_teacher.where)
        found: dict[int, list[int]] = {}
        for name in dict.fromkeys(one.teacher for one in requests):
            theirs = [number for number, one in enumerate(requests) if one.teacher == name]
            written = self._teacher_rollouts[name].complete([prompts[number] for number in theirs])
            found.update(zip(theirs, written, strict=True))
        return [found[number] for number in range(len(rows))]

    def begun(self, rows: Sequence[BatchRow], prompt_ids: list[PromptIds]) -> list[list[int]]:
        """Prompts with what the student goes on with in each: the beginning of its completion, if it has one."""
        contexts = list[list[int]](prompt_ids)
        for number, row in enumerate(rows):
            if row.request.columns.get(PREFIX) is not None and row.by_student:
                row.given = self.of_dataset(row, prompt_ids[number], PREFIX)
                contexts[number] = prompt_ids[number] + row.given.ids
        return contexts

    def of_dataset(self, row: BatchRow, prompt_ids: list[int], column: str) -> Given:
        """The tokens of a row's completion, or of its beginning, by the column."""
        host, tokenizer, request = self._host, self._host.processing_class, row.request
        template = {**host.chat_template_kwargs, **host.template_of(request.student.environment)}

        def see(messages: list[Any], **options: Any) -> list[int]:
            whole = replace(request.student, value=[*map(in_parts, messages)])
            return host.tokenize_with_images(whole, **{"add_generation_prompt": False, **options})

        read, ends = (see if request.student.has_images else None), host.eos_token_ids
        told = request.where, column, request.student.value, prompt_ids
        given = recorded(request, *told, tokenizer, template, ends, read)
        if column == COMPLETION:
            most = host.args.max_completion_length
            given = replace(given, ids=given.ids[:most], authors=given.authors[:most])
        where = f"The {column} in {request.where}"
        host.limits.check_known(max(given.ids, default=0), where)
        if unknown := set(given.ids) & set(host.placeholders):
            mark = tokenizer.decode([min(unknown)])
            raise ValueError(f"{where} contains {mark!r}, which stands for images: drop it")
        return given
