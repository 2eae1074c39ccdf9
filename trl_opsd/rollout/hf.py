"""Generates with `generate` of `transformers`, in a batch whose rows leave as they end."""

from __future__ import annotations

import copy
import inspect
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import torch
from accelerate.logging import get_logger
from torch import Tensor
from transformers import CompileConfig, GenerationConfig, LogitsProcessorList

from trl_opsd._compat.peft import CausalLM, without_peft
from trl_opsd._compat.sharding import in_zero3_model, splits_student
from trl_opsd._compat.versions import set_known
from trl_opsd.models.backbone import seen, together
from trl_opsd.models.padding import PADDED
from trl_opsd.options.normalize import FAIL_IN_GENERATE, check_drawn
from trl_opsd.options.rules import refuse
from trl_opsd.parallel.precision import cast_weights
from trl_opsd.parallel.rng import preserved_rng
from trl_opsd.rollout.base import RolloutBackend
from trl_opsd.rollout.decode import KnownTokensOnly, RaggedDecoding, custom_generate, obstacle
from trl_opsd.rollout.generate import BY_LENGTH, Batching, completions_of, generate, prove_batching
from trl_opsd.rollout.host import Host
from trl_opsd.types.rollout import images_of

logger = get_logger(__name__)

_CACHE_STEP = 256
"""Static caches have a multiple of so many tokens, so that rollouts of similar lengths share one."""

_CHANGES_NO_TOKEN = (
    *("transformers_version", "bos_token_id", "decoder_start_token_id", "max_length", "cache_implementation"),
    *("return_dict_in_generate", "num_return_sequences", "output_attentions", "output_hidden_states", "output_scores"),
    *("output_logits", "use_cache"),
)
"""Settings of a checkpoint's generation config that do not change a rollout."""


class HFRollout(RolloutBackend):
    """Generates with `transformers` and the trainer's generation options, from the random numbers that TRL would draw.

    Rows leave the batch as they end. Options that this decoding loop does not support (beams, assisted decoding,
    offloaded or quantised caches and the like) fall back to plain `generate`, with one warning.

    Args:
        compile (`bool` or [`~transformers.CompileConfig`], *optional*, defaults to `False`):
            Whether decoding runs as a compiled graph on a static cache, on any device, where the student can be
            compiled and is not sharded; a [`~transformers.CompileConfig`] configures it. The cache stays allocated
            between rollouts. Its tokens have been tested on the CPU. It has not been run on a GPU yet, which is why it
            is off by default.

    Attributes:
        batching ([`~rollout.generate.Batching`]): how this student generates, determined before the first rollout.
        of_student (`dict`): what `generate` takes from the student's own generation config, as it does in TRL.
    """

    reads_images: ClassVar[bool] = True
    in_blocks: ClassVar[bool] = True
    has_whole_copies: bool = False
    """Whether each process holds a full copy of the generator, even of a sharded student, and generates by itself."""
    generator: str = "the student"
    """Who generates, for messages."""

    def __init__(self, compile: bool | CompileConfig = False) -> None:
        self._compile = compile
        self._kept: dict[str, Any] = {}
        self.batching: Batching | None = None
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
        self.of_student = _of_checkpoint(trainer.model, trainer.generation_config, self.generator)
        self._bound = trainer.generation_config.to_dict()
        if trainer.learns_from_draws:
            check_drawn(self.of_student, trainer.args.temperature, "model.generation_config.{name} = {value!r}")
        self.close()
        self._is_split = not self.has_whole_copies and splits_student(trainer.accelerator)

    def close(self) -> None:
        self._kept.clear()

    def prove(self) -> None:
        """Determines [`batching`] now instead of in the first rollout."""
        with self._trainer.student_for_generation() as student:
            self.batching = self._proved(student)

    def complete(self, prompt_ids: list[list[int]], step: int) -> list[list[int]]:
        limits, most = self._trainer.limits, self._trainer.generation_config.max_new_tokens
        max_new_tokens = [min(limits.room(len(ids)), most) for ids in prompt_ids]
        sampling = self._sampling()  # before the student is in eval mode
        with self._trainer.student_for_generation() as student:
            self.batching = self.batching or self._proved(student)
            lengths = list(map(len, prompt_ids))
            groups = self.batching.together.groups_to_continue(lengths, max_new_tokens, self._is_collective())
            return self._in_groups(groups, prompt_ids, max_new_tokens, student, self.batching, sampling)

    def _sampling(self) -> GenerationConfig:
        """The sampling options: in an evaluation with `eval_temperature`, if set."""
        config = copy.copy(self._trainer.generation_config)
        # It may have been assigned to.
        changes = {name: value for name, value in config.to_dict().items() if value != self._bound.get(name)}
        ends = "both are fixed for a training; set them before the trainer is built"
        refuse([({"eos_token_id", "pad_token_id"} & {*changes}, "`trainer.generation_config`: end or padding", ends)])
        if self._trainer.learns_from_draws:
            check_drawn(changes, self._trainer.args.temperature, "trainer.generation_config.{name} = {value!r}")
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

    def _in_groups(
        self, groups: list[list[int]], prompt_ids: list[list[int]], max_new_tokens: list[int], *how: Any
    ) -> list[list[int]]:
        """Continues groups of prompts; with collective forwards, processes with fewer groups generate single tokens."""
        found: dict[int, list[int]] = {}
        for rows in [*groups, *[[]] * (self._most(len(groups)) - len(groups))]:
            some, theirs = [prompt_ids[row] for row in rows] or [[0]], [max_new_tokens[row] for row in rows] or [1]
            found.update(zip(rows, self._batch(some, theirs, *how), strict=False))
        return [found[row] for row in range(len(prompt_ids))]

    def _batch(
        self,
        prompt_ids: list[list[int]],
        max_new_tokens: list[int],
        student: CausalLM,
        batching: Batching,
        sampling: GenerationConfig,
    ) -> list[list[int]]:
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
            return self._in_groups(groups, prompt_ids, max_new_tokens, student, batching, sampling)
        beside = trainer.batching.dummy_image_prompt if self._is_collective() else None
        if beside is not None and images_of(prompt_ids) is None:  # the prefill of others runs the vision tower
            prompt_ids, max_new_tokens = [*prompt_ids, beside], [*max_new_tokens, max(max_new_tokens) if reason else 0]
        inputs, loop = self._padded(prompt_ids, batching, student), None
        config.max_new_tokens = max(*max_new_tokens, 1)
        if reason:
            if reason not in self._warned_of:
                logger.warning(f"Completions of {self.generator} use plain `generate`, also for ended rows: {reason}.")
            self._warned_of.add(reason)
            if config.cache_implementation == "static" and torch.is_autocast_enabled(trainer.accelerator.device.type):
                config.cache_implementation = "dynamic"  # a static one has one dtype, autocast gives two
        else:
            loop = RaggedDecoding(
                max_new_tokens=max_new_tokens,
                collective=self._is_collective(),
                context=trainer.limits.context,
                kept=self._kept,
                generator=self.generator,
            )
            if self._compile and not self._is_split and student._can_compile_fullgraph:
                self._set_up_compilation(config, inputs["input_ids"].size(1))
        known = KnownTokensOnly(trainer.limits.vocabulary, trainer.placeholders)
        with self._cast(student) if loop else nullcontext():
            returned = generate(
                student,
                inputs,
                config,
                logits_processor=LogitsProcessorList([known]),
                **({"custom_generate": loop} if loop else {}),
                **({"synced_gpus": False} if self.has_whole_copies else {}),
            )
        if loop and isinstance(returned, list):
            return returned
        completions = completions_of(returned, inputs["input_ids"], config.max_new_tokens, type(student).__name__)
        return [ids[: max(room, 0)] for ids, room in zip(completions, max_new_tokens, strict=True)]

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
        """Rounds weights once for all calls inside; a compiled graph contains the addresses of the student's own."""
        if self._is_split or self._compile:  # FSDP2 and DeepSpeed cast by themselves
            return nullcontext()
        return cast_weights(student, self._trainer.accelerator.device.type)

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
        config.disable_compile, config.cache_implementation = False, "static"
        tokens = prompt_tokens + config.max_new_tokens
        config.max_cache_len = -(-tokens // _CACHE_STEP) * _CACHE_STEP
        own = self._compile if isinstance(self._compile, CompileConfig) else CompileConfig()
        config.compile_config = copy.copy(own)
        set_known(config.compile_config, _compile_all_devices=True)


def _of_checkpoint(model: CausalLM, config: GenerationConfig, generator: str) -> dict[str, Any]:
    """What `generate` takes from the model's own config, as `config` lacks it; rejects what would fail in a run."""
    found = {
        name: value
        for name, value in model.generation_config.to_diff_dict().items()
        if getattr(config, name, None) is None and name not in _CHANGES_NO_TOKEN and not name.startswith("_")
    }
    for name in FAIL_IN_GENERATE.keys() & found.keys():
        what = f"`model.generation_config.{name}` of {generator} is {found[name]!r}"
        refuse([(True, what, f"it {FAIL_IN_GENERATE[name]}; set it to None before the trainer is built")])
    return found
