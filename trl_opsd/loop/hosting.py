"""What the trainer provides to rollouts and teachers: token ids, and the student with its weights gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from trl_opsd._compat.deepspeed import forwards_apart, register_external_parameters, with_current_autocast
from trl_opsd._compat.peft import CausalLM
from trl_opsd._compat.sharding import is_split_model
from trl_opsd._compat.trl import DistillationTrainer, pad, unwrap_model_for_generation
from trl_opsd.loop.shared_rows import SharedRows
from trl_opsd.models.head import model_shape
from trl_opsd.models.tokenizers import ensure_special_tokens, known_end_tokens, placeholders
from trl_opsd.options.sampling import end_tokens
from trl_opsd.parallel.precision import autocast


class Hosting(SharedRows):
    """The part of [`~host.Host`] that needs TRL's trainer."""

    chat_template_kwargs: dict[str, Any]
    eos_token_ids: list[int]
    placeholders: list[int]
    _tag_names: ClassVar = [*DistillationTrainer._tag_names, "opsd"]

    @property
    def strategy(self) -> str:
        """Number of processes, parallelism of the launch, and device, in words."""
        number, device = self.accelerator.num_processes, self.accelerator.device.type
        if self._dist.zero_stage:
            kind = f", DeepSpeed ZeRO-{self._dist.zero_stage}"
        elif self._dist.is_fsdp:
            kind = f", FSDP{self._dist.fsdp_version}"
            sizes = self.accelerator.parallelism_config
            if sizes is not None and sizes.dp_replicate_enabled:
                kind += f", {sizes.dp_replicate_size} replicas of {sizes.dp_shard_size} shards"
        else:
            kind = ", data parallelism (DDP)" if number > 1 else ""
        if self.row_group is not None:
            kind += f", {self.row_group.size} share each row in training"
        return f"{number}{kind}, on {device}"

    def tokenize(self, prompts: list[Any], **chat_template_kwargs: Any) -> list[list[int]]:
        """Token ids of unchecked prompts, as the rollout reads them; keyword arguments go to the chat template."""
        ours = self.chat_template_kwargs
        # TRL's method reads the attribute and has no argument for it.
        self.chat_template_kwargs = {**ours, **chat_template_kwargs}
        try:
            prompt_ids, _, _ = super()._tokenize_prompts(prompts)
        finally:
            self.chat_template_kwargs = ours
        return list(prompt_ids)

    def pad_prompts(self, prompt_ids: list[list[int]]) -> dict[str, Tensor]:
        """Left-pads prompts by their length, never by the value of a token, on the accelerator's device."""
        rows = [torch.tensor(ids) for ids in prompt_ids]
        tensors = {
            "input_ids": pad(rows, self._tokenizer.pad_token_id, "left", self.pad_to_multiple_of),
            "attention_mask": pad([torch.ones_like(row) for row in rows], 0, "left", self.pad_to_multiple_of),
        }
        return {name: tensor.to(self.accelerator.device) for name, tensor in tensors.items()}

    def padded(self, prompt_ids: Sequence[list[int]], completions: Sequence[list[int]]) -> dict[str, Tensor]:
        """TRL's keys for rows, padded as TRL pads them; an empty completion is one masked token of padding."""
        prompts = self.pad_prompts(list(prompt_ids))
        rows = [torch.tensor(ids or [self._tokenizer.pad_token_id]) for ids in completions]
        masks = [torch.full_like(row, bool(ids)) for row, ids in zip(rows, completions, strict=True)]
        device, multiple = self.accelerator.device, self.pad_to_multiple_of
        return {
            "prompt_ids": prompts["input_ids"],
            "prompt_mask": prompts["attention_mask"],
            "completion_ids": pad(rows, self._tokenizer.pad_token_id, "right", multiple).to(device),
            "completion_mask": pad(masks, 0, "right", multiple).to(device),
        }

    def use_special_tokens(self) -> None:
        """Restricts padding, end and placeholder tokens to ids within the student's embedding."""
        rows = model_shape(self.model)[0]
        ensure_special_tokens(self._tokenizer, rows)
        self.placeholders = placeholders(self.model.config, rows)
        self.eos_token_ids = end_tokens(self.args, known_end_tokens(self.eos_token_ids, rows), rows)
        of_both: dict[str, Any] = {"pad_token_id": self._tokenizer.pad_token_id, "eos_token_id": self.eos_token_ids}
        self.generation_kwargs.update(of_both)
        self.generation_config.update(**of_both)
        self.model.config.get_text_config().pad_token_id = self._tokenizer.pad_token_id
        self.model.generation_config.pad_token_id = self._tokenizer.pad_token_id

    def gathered(self, parameters: list[Tensor]) -> AbstractContextManager[Any]:
        """Gathers parameters that ZeRO-3 has sharded, for reading only, within the context. Collective."""
        context: AbstractContextManager[Any] = self._dist.gather_params(parameters)
        return context

    def in_student(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(student, *args)`; inside the wrapper's forward, and collective, if the student is sharded.

        ZeRO-3 and FSDP2 gather weights only there. A student that is not sharded needs no wrapper.
        """
        student = self.model_wrapped
        if not isinstance(student, CausalLM):  # else accelerate looks at what is installed to find nothing to unwrap
            student = self.accelerator.unwrap_model(student)
        if not is_split_model(student):
            return function(student, *args)
        head = student.get_output_embeddings()  # its parameters include those of an adapter that is disabled now
        register_external_parameters(student, head.parameters())
        function = with_current_autocast(partial(function, student, *args), self.accelerator.device)
        with torch.autocast(self.accelerator.device.type, enabled=False):  # DeepSpeed would warn of it
            return self._forward_redirection(self.model_wrapped, student, function)

    @contextmanager
    def student_for_generation(self) -> Iterator[Any]:
        """The bare student in eval mode, gathered where it is sharded and the options allow it.

        Mode, gradient checkpointing and hooks are restored on exit, also after an exception.
        """
        was_training = self.model.training
        self.model.eval()
        error = None
        try:
            with (
                unwrap_model_for_generation(
                    self.model_wrapped,
                    self.accelerator,
                    gather_deepspeed3_params=self.args.ds3_gather_for_generation,
                    generation_kwargs=self.generation_kwargs,
                    gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
                ) as student,
                forwards_apart(self.model_wrapped) if self.args.ds3_gather_for_generation else nullcontext(),
                torch.no_grad(),
                # One context for all tokens, so that each weight is cast once and not for each token.
                autocast(self.accelerator),
                self._dist.summon_full_params(self.model_wrapped, recurse=False),
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
