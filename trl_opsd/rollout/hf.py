"""Generates with `generate` of `transformers`, in a batch whose rows leave as they end."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar, TypeAlias

import torch
from accelerate.logging import get_logger
from torch import Tensor
from torch.nn import Parameter
from tqdm import tqdm
from transformers import CompileConfig, GenerationConfig, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from trl_opsd._compat.peft import CausalLM, changes_generate, without_peft
from trl_opsd._compat.sharding import in_zero3_model, splits_student
from trl_opsd._compat.versions import set_known
from trl_opsd.models.backbone import seen, together
from trl_opsd.models.padding import PADDED
from trl_opsd.options.normalize import check_drawn
from trl_opsd.options.rules import refuse
from trl_opsd.parallel.precision import cast_weights
from trl_opsd.parallel.rng import preserved_rng
from trl_opsd.progress import PHASES
from trl_opsd.rollout.base import RolloutBackend
from trl_opsd.rollout.decode import KnownTokensOnly, RaggedDecoding, custom_generate, obstacle
from trl_opsd.rollout.generate import BY_LENGTH, Batching, completions_of, generate, prove_batching
from trl_opsd.rollout.generation_config import of_model
from trl_opsd.rollout.host import Host
from trl_opsd.rollout.static_caches import StaticCaches
from trl_opsd.types.rollout import images_of

logger = get_logger(__name__)

Rows: TypeAlias = Generator[tuple[int, list[int]], None, None]
"""Numbers of prompts and their completions."""

_CACHE_STEP = 256
"""The length of a static cache is a multiple of this many tokens, to avoid recompilation for each prompt length."""


class HFRollout(RolloutBackend):
    """Generates with `transformers` and the trainer's generation options, from the random numbers that TRL would draw.

    Rows leave the batch as they end. Options that this decoding loop does not support (beams, assisted decoding,
    offloaded or quantised caches and the like) fall back to plain `generate`, with one warning.

    Args:
        compile (`bool` or [`~transformers.CompileConfig`], *optional*, defaults to `False`):
            Whether decoding runs as a compiled graph on a static cache, on any device, where the student can be
            compiled and is not sharded; a [`~transformers.CompileConfig`] configures it. Its tokens have been tested on
            the CPU. It has not been run on a GPU yet, which is why it is off by default.

    Attributes:
        batching ([`~rollout.generate.Batching`]): how this student generates, determined before the first rollout.
        of_student (`dict`): what `generate` takes from the student's own generation config, as it does in TRL.
    """

    reads_images: ClassVar[bool] = True
    has_whole_copies: bool = False
    """Whether each process holds a full copy of the generator, even of a sharded student, and generates by itself."""
    generator: str = "the student"
    """Who generates, for messages."""

    def __init__(self, compile: bool | CompileConfig = False) -> None:
        self._compile = compile
        self.batching: Batching | None = None
        self._caches = StaticCaches()
        self._casts: dict[Tensor, Parameter] = {}
        self._warned_of: set[str] = set()

    def __str__(self) -> str:
        return f"transformers{', compiled' if self._compile else ''}"

    def bind(self, trainer: Host) -> None:
        """Binds the trainer.

        Raises:
            ValueError: The student's generation config is not supported.
        """
        self._trainer, self.batching = trainer, None
        self._warned_of.clear()
        self.of_student = of_model(trainer.model, trainer.generation_config, self.generator)
        self._bound = trainer.generation_config.to_dict()
        if trainer.learns_from_draws:
            check_drawn(self.of_student, trainer.args.temperature, "model.generation_config.{name} = {value!r}")
        self.close()
        self._is_split = not self.has_whole_copies and splits_student(trainer.accelerator)

    def close(self) -> None:
        self._caches.clear()
        self._casts.clear()

    def prove(self) -> None:
        """Determines [`batching`] now instead of in the first rollout."""
        with self._trainer.student_for_generation() as student:
            self.batching = self._proved(student)

    def complete(self, prompt_ids: list[list[int]], step: int) -> list[list[int]]:
        completions = dict(self._rows(prompt_ids, self._max_new_tokens(prompt_ids), lazily=False))
        return [completions[row] for row in range(len(prompt_ids))]

    def stream(self, prompt_ids: list[list[int]], step: int) -> Iterator[tuple[int, list[int]]]:
        """As for every rollout; each row is decoded on demand, in the calling thread. A sharded student, whose forward
        pass is collective or whose gathered weights must be released, completes all rows at once.
        """
        if self._is_split:
            return super().stream(prompt_ids, step)
        rows = self._rows(prompt_ids, self._max_new_tokens(prompt_ids), lazily=not self._compile)
        return _with_own_modes(rows, self._trainer.accelerator.device.type)

    # ---- Options of this rollout, which may be assigned to `trainer.generation_config` between two ----------------

    def _max_new_tokens(self, prompt_ids: list[list[int]]) -> list[int]:
        """Maximum tokens of each completion; an assigned option may lower it."""
        config, limits = self._trainer.generation_config, self._trainer.limits
        changes = {name: value for name, value in config.to_dict().items() if value != self._bound.get(name)}
        ends = "the end of a completion is that of the whole training; set it before the trainer is made"
        refuse([({"eos_token_id", "pad_token_id"} & {*changes}, "`trainer.generation_config`: end or padding", ends)])
        if self._trainer.learns_from_draws:
            check_drawn(changes, self._trainer.args.temperature, "trainer.generation_config.{name} = {value!r}")
        most = changes.get("max_new_tokens", limits.completion)
        return [min(limits.room(len(ids)), most, limits.completion) for ids in prompt_ids]

    def _sampling(self) -> GenerationConfig:
        """The sampling options: in an evaluation with `eval_temperature`, if set."""
        config = copy.copy(self._trainer.generation_config)
        # What is unset here would come from the checkpoint's own generation config.
        config.num_return_sequences, config.return_dict_in_generate = 1, False
        temperature = self._trainer.args.eval_temperature
        if temperature is None or self._trainer.model.training:
            return config
        config.do_sample = temperature > 0
        if config.do_sample:
            config.temperature = temperature
        else:
            config.temperature = config.top_p = config.top_k = config.min_p = None
        return config

    # ---- Batches --------------------------------------------------------------------------------------------------

    def _rows(self, prompt_ids: list[list[int]], max_new_tokens: list[int], lazily: bool) -> Rows:
        """The number of each prompt and its completion; `lazily` when it has ended, else when all of its batch have."""
        sampling = self._sampling()  # before the student is in eval mode
        with self._trainer.student_for_generation() as student:
            self.batching = self.batching or self._proved(student)
            lazily = lazily and not changes_generate(student)
            groups = self.batching.together.groups_to_continue(
                list(map(len, prompt_ids)), max_new_tokens, self._is_collective()
            )
            yield from self._in_groups(groups, prompt_ids, max_new_tokens, student, self.batching, sampling, lazily)

    def _in_groups(
        self, groups: list[list[int]], prompt_ids: list[list[int]], max_new_tokens: list[int], *how: Any
    ) -> Rows:
        """Continues groups of prompts; with collective forwards, processes with fewer groups generate single tokens."""
        for rows in [*groups, *[[]] * (self._most(len(groups)) - len(groups))]:
            some, theirs = [prompt_ids[row] for row in rows] or [[0]], [max_new_tokens[row] for row in rows] or [1]
            for place, completion in self._batch(some, theirs, *how):
                if place < len(rows):
                    yield rows[place], completion

    def _batch(
        self,
        prompt_ids: list[list[int]],
        max_new_tokens: list[int],
        student: CausalLM,
        batching: Batching,
        sampling: GenerationConfig,
        lazily: bool,
    ) -> Rows:
        """Continues prompts in one batch, each by as many tokens as it has room for."""
        trainer = self._trainer
        config = copy.copy(sampling)
        if not batching.cached:
            config.use_cache = False
        # Checked anew for each batch: `trainer.generation_config` may be assigned to.
        reason = obstacle(student, config) or batching.rows_stay
        # Plain `generate` has one length for all; in a later turn with tools a prompt may fill most of the context.
        if self._most(bool(reason) and len(set(max_new_tokens)) > 1):
            groups = BY_LENGTH.groups(max_new_tokens, self._is_collective())
            yield from self._in_groups(groups, prompt_ids, max_new_tokens, student, batching, sampling, lazily)
            return
        beside = trainer.batching.dummy_image_prompt if self._is_collective() else None
        if beside is not None and images_of(prompt_ids) is None:  # the prefill of others runs the vision tower
            prompt_ids, max_new_tokens = [*prompt_ids, beside], [*max_new_tokens, max(max_new_tokens) if reason else 0]
        inputs, loop = self._padded(prompt_ids, batching, student), None
        config.max_new_tokens = max(*max_new_tokens, 1)
        if reason:
            if reason not in self._warned_of:
                logger.warning(f"Completions of {self.generator} use plain `generate`, until all rows end: {reason}.")
            self._warned_of.add(reason)
            if config.cache_implementation == "static" and torch.is_autocast_enabled(trainer.accelerator.device.type):
                config.cache_implementation = "dynamic"  # a static one has one dtype, autocast gives two
        else:
            loop = RaggedDecoding(
                max_new_tokens=max_new_tokens,
                context=trainer.limits.context,
                collective=self._is_collective(),
                caches=self._caches,
                lazily=lazily,
                generator=self.generator,
            )
            if self._compile and not self._is_split and student._can_compile_fullgraph:
                self._set_up_compilation(config, inputs["input_ids"].size(1))
        known = KnownTokensOnly(trainer.limits.vocabulary, trainer.placeholders)
        # Between two rows of a lazy iterator others use the student, which needs its own weights then.
        casts = self._cast(student) if loop and not lazily else nullcontext()
        with _TokenProgress(config.max_new_tokens, trainer.show_progress) as progress, casts:
            returned = generate(
                student,
                inputs,
                config,
                logits_processor=LogitsProcessorList([known]),
                stopping_criteria=StoppingCriteriaList([progress]),
                **({"custom_generate": loop} if loop else {}),
                **({"synced_gpus": False} if self.has_whole_copies else {}),
            )
            if loop and lazily and isinstance(returned, Iterator):
                yield from returned
                return
        if not (loop and isinstance(returned, list)):
            completions = completions_of(returned, inputs["input_ids"], config.max_new_tokens, type(student).__name__)
            returned = [ids[: max(room, 0)] for ids, room in zip(completions, max_new_tokens, strict=True)]
        yield from enumerate(returned)

    def _padded(self, prompt_ids: list[list[int]], batching: Batching, student: CausalLM) -> dict[str, Tensor]:
        inputs: dict[str, Tensor] = self._trainer.pad_prompts(prompt_ids)
        if batching.together != PADDED:
            longest = max(map(len, prompt_ids))  # `pad_to_multiple_of` may have added more
            inputs = {name: tensor[:, -longest:] for name, tensor in inputs.items()}
        ids_BP, taken = inputs["input_ids"], inspect.signature(without_peft(student).forward).parameters
        starts = [ids_BP.size(1) - len(ids) for ids in prompt_ids]
        images = together(images_of(prompt_ids), starts, ids_BP.size(1), ids_BP.device)
        return {**inputs, **seen(images, taken, ids_BP.device)}

    # ---- What the student is like ---------------------------------------------------------------------------------

    def _proved(self, student: CausalLM) -> Batching:
        reading, vocabulary = self._trainer.batching, self._trainer.limits.vocabulary
        if reason := custom_generate(student):  # its options and results are not known
            return Batching(reading, rows_stay=reason)
        with preserved_rng(self._trainer.accelerator.device), self._cast(student):
            found = prove_batching(student, reading, vocabulary, self._is_collective())
        if replace(found, rows_stay=None) != Batching(reading):
            logger.warning(
                f"`generate` of {type(student).__name__}, in a padded batch or with a cache, computes different logits "
                f"than a forward pass, so it is called for {found}, which is slower."
            )
        return found

    def _cast(self, student: CausalLM) -> AbstractContextManager[None]:
        """Rounds weights once for all calls inside. Compiled graphs keep the copies, whose addresses they contain."""
        if self._is_split:  # FSDP2 and DeepSpeed cast by themselves
            return nullcontext()
        return cast_weights(student, self._trainer.accelerator.device.type, self._casts if self._compile else {})

    def _is_collective(self) -> bool:
        """Whether each forward pass of the student is collective during generation."""
        trainer = self._trainer
        gathered = in_zero3_model(trainer.model) and trainer.args.ds3_gather_for_generation
        return self._is_split and not gathered and trainer.accelerator.num_processes > 1

    def _most(self, here: int) -> int:
        """The maximum over processes, if forwards are collective; else this process's number."""
        if not self._is_collective():
            return here
        accelerator = self._trainer.accelerator
        return int(accelerator.gather(torch.tensor([here], device=accelerator.device)).max())

    def _set_up_compilation(self, config: GenerationConfig, prompt_tokens: int) -> None:
        """Makes `transformers` compile the step: TRL disables it, and `generate` needs a static cache for it."""
        config.disable_compile = False
        config.cache_implementation = "static"
        tokens = prompt_tokens + config.max_new_tokens
        config.max_cache_len = -(-tokens // _CACHE_STEP) * _CACHE_STEP
        config.compile_config = (
            copy.copy(self._compile) if isinstance(self._compile, CompileConfig) else CompileConfig()
        )
        set_known(config.compile_config, _compile_all_devices=True)


class _TokenProgress(StoppingCriteria):
    """A progress bar over decode steps, shown only when decoding takes long; it never stops a row."""

    def __init__(self, total: int, show: bool) -> None:
        self._bar = tqdm(total=total, desc=PHASES["complete"], unit="token", delay=5, leave=False, disable=not show)

    def __enter__(self) -> _TokenProgress:
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        self._bar.update()
        return torch.zeros(input_ids.size(0), dtype=torch.bool, device=input_ids.device)


def _with_own_modes(rows: Rows, kind: str) -> Rows:
    """Rows of a generator that yields inside of `no_grad` and `autocast`, which must not apply to who takes them."""

    def swap(modes: Sequence[Any] = ()) -> Sequence[Any]:
        """Sets these modes, and returns those before."""
        on, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        before = torch.is_grad_enabled(), on, dtype, torch.is_autocast_cache_enabled()
        if modes:
            torch.set_grad_enabled(modes[0])
            torch.set_autocast_enabled(kind, modes[1])
            torch.set_autocast_dtype(kind, modes[2])
            torch.set_autocast_cache_enabled(modes[3])
        return before

    own = swap()
    try:
        while True:
            outer = swap(own)
            try:
                row = next(rows, None)
            finally:
                own = swap(outer)
            if row is None:
                return
            yield row
    finally:
        outer = swap(own)
        rows.close()
        swap(outer)
