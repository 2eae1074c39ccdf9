"""What users, rollouts and teachers see of a trainer: its attributes, and the members of `Host`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import ProcessorMixin

from trl_opsd._compat.deepspeed import forwards_apart, register_external_parameters, with_current_autocast
from trl_opsd._compat.sharding import is_split_model
from trl_opsd._compat.torchao import kept_quantized
from trl_opsd._compat.trl import pad, unwrap_model_for_generation
from trl_opsd._compat.values import Unit
from trl_opsd.config import OPSDConfig
from trl_opsd.data.images import probe_prompts, read_with_images, typed_placeholder
from trl_opsd.data.prompts import Prompt
from trl_opsd.data.tokenization import read_alone
from trl_opsd.loop.upstream_fixes import UpstreamFixes
from trl_opsd.losses import Divergence, ForwardKL, GeneralizedJSD, ReverseKL, divergence_of
from trl_opsd.methods.rows import BatchRow
from trl_opsd.models.backbone import model_shape
from trl_opsd.models.tokenizers import ensure_special_tokens, known_end_tokens, placeholders
from trl_opsd.options.normalize import end_tokens
from trl_opsd.options.table import checked
from trl_opsd.parallel.precision import autocast
from trl_opsd.types import Rollout
from trl_opsd.types.metrics import Mean, Metric, is_taken
from trl_opsd.types.rollout import Author, PromptIds

if TYPE_CHECKING:
    from trl_opsd.loop.generation import Generation
    from trl_opsd.loop.turns import Turns
    from trl_opsd.models.shared_rows import RowGroup

__all__ = ["TrainerMembers"]


class TrainerMembers(UpstreamFixes):
    """TRL's trainer with attributes of ours, and with the members of `Host`."""

    eos_token_ids: list[int]
    processors: Mapping[str, ProcessorMixin | None]
    """What reads images: the student's processor under an empty name, and those of teachers that have their own."""
    reads_images: bool | None = False
    """Whether prompts have images; `None` for a stream until one has."""
    args: OPSDConfig
    divergence: Divergence
    learns_from_draws: bool
    """Whether the loss is a policy gradient, which depends on the distribution that tokens were sampled from."""
    temperature: float
    """Softmax temperature of the loss, for models without an option of their own; rollouts have that of
    `generation_config`, as in TRL."""
    teacher: Any
    chat_template_kwargs: dict[str, Any]
    row_group: RowGroup | None = None
    """The processes that share rows with this one; `None` without sequence parallelism."""
    cross: Any = None
    """What compares teachers that have tokenizers of their own; else `None`."""
    known_metrics: Mapping[str, Metric]
    """All metrics by their names in the training log."""
    is_built: bool = False
    """Whether construction has ended."""
    turns: Turns | None
    """What tools and environments answer, and how completions go on after that; `None` where there are neither."""
    _generation: Generation

    # ---- Attributes -------------------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        is_final = self.is_built and name in ("teacher_model", "train_dataset", "eval_dataset")
        if is_final and value is not getattr(self, name):
            raise AttributeError(f"`trainer.{name}` is read when the trainer is built, and is final: build another.")
        super().__setattr__(name, value)

    @property
    def beta(self) -> float | None:
        """TRL's number for the divergence, `None` where it has none; assigning to it sets the divergence."""
        match self.divergence:
            case ForwardKL():
                return 0.0
            case ReverseKL():
                return 1.0
            case GeneralizedJSD(beta=beta):
                return beta
        return None

    @beta.setter
    def beta(self, beta: float) -> None:
        self.divergence = divergence_of(None, checked("beta", Unit, beta))

    @property
    def temperatures(self) -> tuple[float, float]:
        """Softmax temperatures of the student and of the teacher in the loss."""
        student, teacher = self.args.student_temperature, self.args.teacher_temperature
        return student or self.temperature, teacher or self.temperature

    @property
    def use_vllm(self) -> bool:
        """Whether vLLM generates."""
        return self.args.use_vllm

    @use_vllm.setter
    def use_vllm(self, use_vllm: bool) -> None:
        """Ignores what TRL assigns, whose value is hidden from it."""

    @property
    def environments(self) -> list[Any] | None:
        """The environment of each row of the batch; `None` without `environment_factory`."""
        acting = None if self.turns is None else self.turns.environments
        return None if acting is None else acting.current

    @property
    def teacher_model(self) -> Any:
        """The model of the only teacher."""
        return getattr(self.teacher, "model", None)

    @teacher_model.setter
    def teacher_model(self, teacher_model: Any) -> None:
        """Ignores the `None` that TRL assigns while it builds the student."""

    # ---- Host: numbers and words ------------------------------------------------------------------------------------

    def record(self, name: str, value: float, count: float = 1) -> None:
        """Adds a number to the next log, which shows the mean of all processes; in an evaluation, to its metrics.

        Args:
            name (`str`):
                Any that is not logged already.
            value (`float` or `torch.Tensor`):
                One number.
            count (`float`, *optional*, defaults to 1):
                What an evaluation's mean weighs it by: the rows or tokens that the number is a mean of.

        Raises:
            ValueError: The name is taken.
        """
        if is_taken(name, self.known_metrics):
            raise ValueError(f"`record({name!r}, ...)`: this name is already used in the log, so choose another.")
        number = Mean(value)
        number.count = float(count)
        self._metrics["train" if self.model.training else "eval"][name].append(number)

    @property
    def strategy(self) -> str:
        """Number of processes, parallelism of the launch, and device, in words."""
        number = self.accelerator.num_processes
        if self._dist.zero_stage:
            kind = f", DeepSpeed ZeRO-{self._dist.zero_stage}"
        elif self._dist.is_fsdp:
            kind = f", FSDP{self._dist.fsdp_version}"
        else:
            kind = ", data parallelism (DDP)" if number > 1 else ""
        if self.row_group is not None:
            kind += f", {self.row_group.size} per row in training"
        return f"{number}{kind}, on {self.accelerator.device.type}"

    # ---- Host: tokens -----------------------------------------------------------------------------------------------

    def _use_special_tokens(self) -> None:
        """Restricts padding, end and placeholder tokens to ids within the student's embedding."""
        rows, tokenizer = model_shape(self.model)[0], self.processing_class
        ensure_special_tokens(tokenizer, rows)
        self.placeholders = placeholders(self.model.config, rows)
        marks = {getattr(one, name, None) for one in self.processors.values() for name in ("image_token", "boi_token")}
        marks |= set(tokenizer.convert_ids_to_tokens(self.placeholders))
        self.image_marks = {mark for mark in marks if isinstance(mark, str)}
        self.eos_token_ids = end_tokens(self.args, known_end_tokens(self.eos_token_ids, rows), rows)
        of_both = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": self.eos_token_ids}
        self.generation_kwargs.update(of_both)
        self.generation_config.update(**of_both)
        self.model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
        self.model.generation_config.pad_token_id = tokenizer.pad_token_id

    def tokenize(self, prompts: list[Any], environment: str = "", **chat_template_kwargs: Any) -> list[list[int]]:
        """Token ids of unchecked prompts, as the rollout reads them; keyword arguments go to the chat template.

        The tools in them are those of one of several environments, or all.
        """
        with self.tokenizing:
            given = self.template_of(environment)
            kwargs = {**self.chat_template_kwargs, **chat_template_kwargs}
            if "add_generation_prompt" in kwargs:  # which TRL's method sets
                return read_alone(self.processing_class, prompts, "messages", {**kwargs, **given})
            # TRL's method reads the attributes and has no arguments for them.
            ours = self.chat_template_kwargs, self.tools
            self.chat_template_kwargs, self.__dict__["tools"] = kwargs, given["tools"]
            try:
                prompt_ids, _, _ = super()._tokenize_prompts(prompts)
            finally:
                self.chat_template_kwargs, self.__dict__["tools"] = ours
        return list(prompt_ids)

    def template_of(self, environment: str) -> dict[str, Any]:
        """The chat template and the tools in it: those of one of several environments, or all."""
        tools = self.tools
        if environment and self.turns is not None and self.turns.environments is not None:
            tools = self.turns.environments.tools_of(environment)
        return {"tools": tools or None, "chat_template": self.chat_template}

    def tokenize_with_images(self, prompt: Prompt, **chat_template_kwargs: Any) -> PromptIds:
        """Token ids of a prompt with images, by the processor of the model that reads it."""
        processor = self.processors.get(prompt.processor)
        if processor is None:
            raise ValueError(
                "it has images, but `processing_class` is a tokenizer: pass the student's processor, "
                "`AutoProcessor.from_pretrained(...)`."
            )
        if mark := typed_placeholder(prompt.value, self.image_marks):
            raise ValueError(f"its text contains {mark!r}, which stands for an image: remove it from the text.")
        return read_with_images(
            processor,
            prompt.value,
            self.pictures,
            tools=self.tools or None,
            chat_template=self.chat_template,
            **{**self.chat_template_kwargs, **chat_template_kwargs},
        )

    def probe_prompts(self, processor: str = "") -> list[PromptIds]:
        """Prompts with images to examine the model with that this processor belongs to."""
        where = "a prompt with an image, made to examine the model"
        return probe_prompts(lambda messages: self.tokenize_with_images(Prompt(messages, "messages", where, processor)))

    def prompt_ids_of(self, rows: Sequence[BatchRow]) -> list[list[int]]:
        """The student's prompts for checked rows, which get their images, and what they go on with."""
        prompts = [row.request.student for row in rows]
        has_images = any(one.has_images for one in prompts)
        if has_images and self.reads_images is False:
            raise ValueError(
                f"{self.teaching.batch_name} has images, but no dataset of this trainer had any when it was built: "
                "build another trainer with this one."
            )
        if has_images and self.reads_images is None:  # the first images of a stream
            self.reads_images = True
            self._generation.prove_images()
            self.teaching.prove_images()
        found = self.teaching.readers.student.token_ids(prompts)
        for row, ids in zip(rows, found, strict=True):
            row.images = getattr(ids, "images", None)
        known = [PromptIds(ids, row.images) for row, ids in zip(rows, found, strict=True)]
        contexts = self._generation.begun(rows, known)
        self.teaching.readers.check_batch(contexts, self.teaching.batch_name)
        return contexts

    def pad_prompts(self, prompt_ids: Sequence[list[int]]) -> dict[str, Tensor]:
        """Left-padded `input_ids` and `attention_mask`, [B, P], on the device."""
        return dict(zip(("input_ids", "attention_mask"), self._padded(prompt_ids, "left"), strict=True))

    def padded(
        self,
        prompt_ids: Sequence[list[int]],
        completions: Sequence[list[int]],
        authors: Sequence[list[int]] | None = None,
    ) -> Rollout:
        """Rows on the device; an empty completion is one masked token of padding. What an environment wrote is part of
        a completion, and has no weight; nor has what a dataset did, where tokens have to be drawn.
        """
        prompts, prompt_mask = self._padded(prompt_ids, "left")
        ids, mask = self._padded(completions, "right")
        rollout = Rollout(
            prompt_ids=prompts, prompt_mask=prompt_mask, completion_ids=ids, completion_mask=mask, weights=mask.float()
        )
        if authors is None:
            return rollout
        by = [torch.tensor(one or [int(Author.STUDENT)]) for one in authors]
        of_all = pad(by, int(Author.STUDENT), "right", self.pad_to_multiple_of)
        rollout = replace(rollout, authors=of_all.to(self.accelerator.device, non_blocking=True))
        counts = rollout.generated
        if self.learns_from_draws:
            counts = counts & (rollout.authors != Author.DATASET)
        return replace(rollout, weights=counts.float())

    def _padded(self, rows: Sequence[list[int]], side: str) -> tuple[Tensor, Tensor]:
        """Token ids and mask, [B, L], on the device; the mask by length, never by the value of a token."""
        pad_id, multiple, device = self.processing_class.pad_token_id, self.pad_to_multiple_of, self.accelerator.device
        ids = [torch.tensor(row or [pad_id]) for row in rows]
        masks = [torch.full_like(one, bool(row)) for one, row in zip(ids, rows, strict=True)]
        ids_BL, mask_BL = pad(ids, pad_id, side, multiple), pad(masks, 0, side, multiple)
        return ids_BL.to(device, non_blocking=True), mask_BL.to(device, non_blocking=True)

    # ---- Host: the student with its weights gathered ----------------------------------------------------------------

    def gathered(self, parameters: list[Tensor]) -> AbstractContextManager[Any]:
        """Gathers parameters that ZeRO-3 has sharded, for reading only, within the context. Collective."""
        context: AbstractContextManager[Any] = self._dist.gather_params(parameters)
        return context

    def in_student(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(student, *args)`; inside the wrapper's forward, and collective, if the student is sharded.

        ZeRO-3 and FSDP2 gather weights only there. A student that is not sharded needs no wrapper.
        """
        student = self.model
        if not is_split_model(student):
            return function(student, *args)
        head = student.get_output_embeddings()  # its parameters include those of an adapter that is disabled now
        register_external_parameters(student, head.parameters())
        function = with_current_autocast(partial(function, student, *args), self.accelerator.device)
        with torch.autocast(self.accelerator.device.type, enabled=False):  # DeepSpeed would warn of it
            return self._forward_redirection(self.model_wrapped, student, function)

    @contextmanager
    def student_for_generation(self) -> Iterator[Any]:
        """The bare student in eval mode, gathered where it is sharded and the options allow it. Collective.

        Mode, gradient checkpointing and hooks are restored on exit, also after an exception.
        """
        was_training, gathers = self.model.training, self.args.ds3_gather_for_generation
        self.model.eval()
        error = None
        try:
            with (
                unwrap_model_for_generation(
                    self.model_wrapped,
                    self.accelerator,
                    gather_deepspeed3_params=gathers,
                    generation_kwargs=self.generation_kwargs,
                    gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
                ) as student,
                forwards_apart(self.model_wrapped) if gathers else nullcontext(),
                torch.no_grad(),
                # One context for all tokens, so that each weight is cast once and not for each token.
                autocast(self.accelerator),
                self._dist.summon_full_params(self.model_wrapped, recurse=False),
                kept_quantized(self.model),
            ):
                try:
                    yield student
                except BaseException as caught:
                    # Kept from TRL's context, which restores nothing when an exception passes through it.
                    error = caught
            if error is not None:
                raise error
        finally:
            self.model.train(was_training)
            del error  # its traceback refers to this frame and would keep tensors alive
