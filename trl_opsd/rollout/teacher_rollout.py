"""Generates completions with a teacher, by transformers' `generate` and the student's sampling options."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from accelerate.logging import get_logger
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from trl_opsd._compat.peft import CausalLM
from trl_opsd._compat.sharding import splits_student
from trl_opsd.data.readers import PromptLimits
from trl_opsd.models.backbone import preserved_mode
from trl_opsd.models.padding import BatchPolicy
from trl_opsd.parallel.precision import autocast
from trl_opsd.rollout.hf import HFRollout
from trl_opsd.rollout.host import Host
from trl_opsd.rollout.returned import checked_completions

logger = get_logger(__name__)


class TeacherRollout:
    """Generates with a teacher that is a model, in each process by itself; `limits` are of its prompts, with its name.

    The teacher has a `model`, which may be the student, its `batching`, and lends the model to be called (`lent`).
    Where tokenizers differ, `translator` has its own, and tells completions in the student's tokens.
    """

    def __init__(self, host: Host, teacher: Any, limits: PromptLimits, translator: Any = None) -> None:
        is_student = getattr(teacher, "model", None) is host.model
        # Processes have different numbers of rows for a teacher, so its forward passes may not be collective.
        is_whole = not splits_student(host.accelerator) if is_student else getattr(teacher, "is_whole", False)
        if not is_whole:
            who = f"{limits.reader[0].upper()}{limits.reader[1:]}, a {type(teacher).__name__},"
            raise ValueError(
                f"{who} cannot generate completions, which needs a whole model in each process (`seq_kd=True`, "
                "`generating_with`): use `teacher_offload='none'` or 'cpu' without a server, or generate them "
                "beforehand, into a column 'completion'."
            )
        words = None if translator is None else translator.tokenizer
        self._translator = translator
        self._host = cast(Host, _AsStudent(host, teacher, limits, words))
        self._rollout = HFRollout()
        self._rollout.has_whole_copies, self._rollout.generator = True, limits.reader
        self._rollout.bind(self._host)
        self._rollout.prove()  # now: under DeepSpeed all processes must take part
        # Its own generation config may end completions elsewhere.
        ends = None if is_student else teacher.model.generation_config.eos_token_id
        theirs = {ends} if isinstance(ends, int) else set(ends or ())
        if others := sorted(theirs - set(self._host.eos_token_ids)):
            logger.warning(
                f"`seq_kd=True`: {limits.reader} ends with {sorted(theirs)}, the student with {host.eos_token_ids}, so "
                f"its completions continue after {others}. If all these are end tokens, set "
                f"`generation_kwargs={{'eos_token_id': {sorted(theirs | set(host.eos_token_ids))}}}`."
            )

    def complete(self, prompts: list[list[int]]) -> list[list[int]]:
        """A completion for each prompt, cut after the first end token; empty if none of it can be told."""
        written = self._rollout.complete(prompts, self._host.state.global_step)
        completions = checked_completions(written, self._host, prompts, self._host.limits.reader)
        if self._translator is None:
            return completions
        return [self._translator.told(ids, self._host.eos_token_ids) for ids in completions]


class _AsStudent:
    """The trainer, with a teacher in place of its student."""

    reads_logprobs = learns_from_draws = False

    def __init__(self, host: Host, teacher: Any, limits: PromptLimits, words: PreTrainedTokenizerBase | None) -> None:
        self._host, self._teacher, self.limits = host, teacher, limits
        self.model, self._words = teacher.model, words
        self.eos_token_ids = host.eos_token_ids
        if words is not None:
            ends = getattr(teacher.model.generation_config, "eos_token_id", None)
            known = [words.eos_token_id, *(ends if isinstance(ends, list) else [ends])]
            self.eos_token_ids = [one for one in dict.fromkeys(known) if one is not None]
            self.placeholders: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    @property
    def batching(self) -> BatchPolicy:
        return replace(self._teacher.batching, packed=False, multiple_of=1)

    @property
    def generation_config(self) -> GenerationConfig:
        """That of the trainer, with the end and padding of the teacher's tokenizer."""
        found: GenerationConfig = self._host.generation_config
        if self._words is not None:
            found = copy.deepcopy(found)
            found.eos_token_id, found.bos_token_id = self.eos_token_ids, self._words.bos_token_id
            found.pad_token_id = self.eos_token_ids[0] if self._words.pad_token_id is None else self._words.pad_token_id
        return found

    def pad_prompts(self, prompt_ids: list[list[int]]) -> dict[str, Tensor]:
        device = next(one.device for one in self.model.parameters() if not one.is_meta)
        return {name: tensor.to(device) for name, tensor in self._host.pad_prompts(prompt_ids).items()}

    @contextmanager
    def student_for_generation(self) -> Iterator[CausalLM]:
        is_student = self._teacher.model is self._host.model
        with (
            self._host.student_for_generation() if is_student else preserved_mode(self.model),
            torch.no_grad(),
            autocast(self._host.accelerator),
            self._teacher.lent() as model,
        ):
            yield model.eval()
