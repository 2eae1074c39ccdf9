"""Keeps an engine in sync with the student: this file knows when weights have changed, not how they are sent."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from trl_opsd._compat.peft import is_peft
from trl_opsd._compat.sharding import in_zero3, local, trained_parameters
from trl_opsd.config import OPSDConfig
from trl_opsd.models.backbone import context_of
from trl_opsd.rollout.base import Engine, RolloutBackend
from trl_opsd.rollout.host import Host
from trl_opsd.rollout.sync_proof import SyncProof
from trl_opsd.types import Completion
from trl_opsd.types.rollout import RowImages

Key: TypeAlias = tuple[tuple[int, ...], RowImages | None, tuple[int, ...]]
"""A prompt, its images, and the ids of a completion."""
Logprobs: TypeAlias = dict[Key, list[float]]
"""Log-probabilities of a completion's tokens."""
EVERY = 16
"""Where log-probabilities weigh no loss, the engine returns them for one row in so many: they cost it time."""


class SyncedRollout(RolloutBackend):
    """A rollout with an engine that gets the student's weights before it generates, if they have changed, and whose
    log-probabilities are then compared with the student's.

    `bind` of a subclass ends with `set_up`, and `send_weights` sends the weights. `wake` and `sleep` are for an engine
    that can free its memory while nothing is generated.

    Args:
        args ([`OPSDConfig`]):
            The options.
    """

    returns_logprobs = True
    of_student: ClassVar[Mapping[str, Any]] = {}
    """What it takes from the student's own generation config: nothing."""
    engine: Engine
    """What generates."""
    sees: bool = False
    """Whether the engine reads images in this run."""

    def __init__(self, args: OPSDConfig) -> None:
        self.args = args
        self._sent: tuple[Any, ...] | None = None
        self._proved = False
        self._sessions = 0
        # Of the batch trained on and the one being generated; and of an evaluation, which comes between these.
        self._logprobs: dict[bool, deque[Logprobs]] = {True: deque(maxlen=2), False: deque(maxlen=1)}

    # ---- What depends on the engine -----------------------------------------------------------------------------

    def set_up(self, trainer: Host, engine: Engine, sampling: dict[str, Any], dtype: torch.dtype) -> None:
        """Stores what `bind` has built.

        Args:
            trainer ([`~host.Host`]):
                The trainer.
            engine ([`~rollout.base.Engine`]):
                The engine that generates.
            sampling (`dict`):
                Options of every completion, without `max_tokens`.
            dtype (`torch.dtype`):
                The less precise of those that engine and student compute in.
        """
        self.trainer, self.engine, self._sampling = trainer, engine, sampling
        self._proof = SyncProof(trainer, engine, dtype, self.sees)
        self._sent, self._proved = None, False

    @abstractmethod
    def send_weights(self) -> int:
        """Sends the weights that have changed, and returns their bytes. Collective."""

    def wake(self, what: str) -> None:
        """Loads the engine's `"weights"` or `"kv_cache"` if it is asleep."""

    def sleep(self) -> None:
        """Lets the engine sleep, unless it does already, or is closed."""

    def close(self) -> None:
        self.engine.close()

    # ---- Generation ---------------------------------------------------------------------------------------------

    @contextmanager
    def session(self) -> Iterator[None]:
        """The engine sleeps when the outermost session ends, also after an exception."""
        self._sessions += 1
        try:
            yield
        finally:
            self._sessions -= 1
            if not self._sessions:
                self.sleep()

    def complete(self, prompt_ids: list[list[int]], step: int) -> list[list[int]]:
        with self.session():
            rows = self.engine.write(prompt_ids, self._prepared(prompt_ids))
        known = self._new_logprobs()
        for number, (sent, row) in enumerate(zip(prompt_ids, rows, strict=True)):
            self._check_prompt(number, sent, row)
            note(known, sent, row)
        return [row.completion_ids for row in rows]

    def logprobs(self, prompt_ids: list[int], completion_ids: list[int]) -> list[float] | None:
        key = key_of(prompt_ids, completion_ids)
        return next(
            (known[key] for known in reversed(self._logprobs[self.trainer.model.training]) if key in known), None
        )

    def _new_logprobs(self) -> Logprobs:
        """Those of a batch, to be filled; kept until the batch after the next if they are read."""
        known: Logprobs = {}
        if self.trainer.reads_logprobs:
            self._logprobs[self.trainer.model.training].append(known)
        return known

    def _prepared(self, prompt_ids: list[list[int]]) -> list[dict[str, Any]]:
        """Sends the weights if they have changed, and returns the options of each prompt. Collective."""
        self.wake("weights")
        self._proof.take_prompts(prompt_ids)
        if self._has_changed():
            self.sync_weights()
        self.wake("kv_cache")
        limits = self.trainer.limits
        options: dict[str, Any] = dict(self._sampling)
        if self.args.eval_temperature is not None and not self.trainer.model.training:
            options["temperature"] = self.args.eval_temperature
        every = EVERY if not self.trainer.learns_from_draws else 1
        asked = {"logprobs": 0} if self.trainer.reads_logprobs else {}
        return [
            {**options, **({} if number % every else asked), "max_tokens": limits.room(len(ids))}
            for number, ids in enumerate(prompt_ids)
        ]

    def _check_prompt(self, number: int, sent: list[int], row: Completion) -> None:
        if row.prompt_ids != sent:
            raise RuntimeError(
                f"For row {number} of this batch {self.engine.name} returned another prompt: sent {len(sent)} tokens "
                f"starting with {sent[:8]}, got {len(row.prompt_ids)} starting with {row.prompt_ids[:8]}. The batch "
                "was not trained on."
            )

    # ---- Weights ------------------------------------------------------------------------------------------------

    def sync_weights(self) -> None:
        """Sends the student's current weights, and verifies that they arrived.

        Called before a rollout whenever weights have changed. Call it yourself after a change that cannot be detected,
        such as writing to the shards of a student under ZeRO-3. Collective.

        Raises:
            SyncError: Engine and student disagree afterwards.
        """
        with self.session(), self.trainer.phase("sync"):
            self._sync()

    def _sync(self) -> None:
        trainer, check = self.trainer, self.args.vllm_sync_check
        self.wake("weights")
        proves = check == "every" or (check == "first" and not self._proved)
        self._sent = None  # if an exception follows, the engine's weights are unknown
        with _timed(trainer, "sync/seconds"), torch.no_grad():
            trainer.record("sync/bytes", float(self.send_weights()))
            self.engine.forget_prefixes()
        if proves:
            self.wake("kv_cache")
            with _timed(trainer, "sync/proof_seconds"):
                trainer.record("rollout/logprob_gap", self._proof.check())
            self._proved = True
        self._sent = self._version()

    def _has_changed(self) -> bool:
        """Whether weights have changed since they were sent, in any process. Collective, so that all or none send."""
        # Addresses differ between processes, so each compares with what it has sent.
        here = torch.tensor([int(self._version() != self._sent)], device=self.trainer.accelerator.device)
        return bool(self.trainer.accelerator.gather(here).any())

    def _version(self) -> tuple[Any, ...]:
        """A value that differs whenever the student may have changed."""
        # torch counts every write to a tensor, and a tensor that was replaced has another address. Neither shows what
        # an optimizer or a checkpoint writes to shards or flat buffers: the trainer counts steps and loads.
        trainer = self.trainer
        adapters = tuple(trainer.model.active_adapters) if is_peft(trainer.model) else ()
        tensors = trained_parameters(trainer.model).values()
        return trainer.state.global_step, trainer.loads, adapters, version_of(tensors)


def check_student(trainer: Host) -> None:
    """Rejects students whose weights cannot be sent to an engine."""
    if getattr(trainer.model, "is_quantized", False):
        raise ValueError(
            "An engine with a quantized student is not supported by this version: load it without "
            "`quantization_config`, or set `use_vllm=False` and no `sglang_server_url`."
        )
    room, context = trainer.args.vllm_max_model_length, context_of(trainer.model)
    if room is not None and context is not None and room > context:
        raise ValueError(
            f"`vllm_max_model_length={room}`, but the student's context is {context}: lower it, or remove it."
        )


def dtype_of(trainer: Host) -> torch.dtype:
    """The dtype the student computes in, which under mixed precision is not that of its weights."""
    mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}
    dtype: torch.dtype = mixed.get(trainer.accelerator.mixed_precision, trainer.model.dtype)
    return dtype


def version_of(tensors: Iterable[Tensor]) -> tuple[tuple[int, int], ...]:
    """Address and write count of each tensor; tensors that ZeRO-3 has sharded are left out."""
    # A tensor that FSDP2 has sharded counts its own writes; its address is that of the local shard.
    return tuple((local(one).data_ptr(), one._version) for one in tensors if not in_zero3(one))


def key_of(prompt_ids: list[int], completion_ids: list[int]) -> Key:
    return tuple(prompt_ids), getattr(prompt_ids, "images", None), tuple(completion_ids)


def note(known: Logprobs, prompt_ids: list[int], row: Completion) -> None:
    """Keeps the log-probabilities that the engine returned for a row."""
    if len(row.logprobs) == len(row.completion_ids):
        known[key_of(prompt_ids, row.completion_ids)] = row.logprobs


@contextmanager
def _timed(trainer: Host, name: str) -> Iterator[None]:
    """Records the seconds of the body, if it succeeds."""
    start = perf_counter()
    yield
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    trainer.record(name, perf_counter() - start)
