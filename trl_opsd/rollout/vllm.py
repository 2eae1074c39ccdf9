"""Lets a vLLM engine in this process write for the student; it knows when weights moved, and what a prompt is not."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import DistributedType
from accelerate.utils.memory import clear_device_cache
from torch import Tensor
from transformers import AutoConfig

from trl_opsd._compat.peft import is_peft
from trl_opsd._compat.vllm import LORA_RANKS, Engine, EngineOptions, sampling_options, why_no_sleep_mode
from trl_opsd.backbone import context_of
from trl_opsd.rng import preserved_rng
from trl_opsd.rollout.base import RolloutBackend
from trl_opsd.rollout.sync_proof import SyncProof
from trl_opsd.rollout.weight_sync import (
    Stream,
    adapter_of,
    adapter_rank,
    base_weights_of,
    chosen_sync,
    weights_of,
)

logger = get_logger(__name__)

_SHAPES = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "tie_word_embeddings")
"""What the checkpoint's config and the student's must agree on for the engine to hold the student's weights."""


class VLLMRollout(RolloutBackend):
    """Generates with vLLM in the training process. Before it writes, the engine is sent the student's weights if they
    moved since the last time, and has to prove that it speaks for the student.

    Args:
        args ([`OPSDConfig`]):
            The options; those that cannot work are refused here, before a model is loaded.

    Raises:
        ValueError: An option, or several together, cannot work.
    """

    def __init__(self, args: Any) -> None:
        self._args = args
        _check_options(args)

    def bind(self, trainer: Any) -> None:
        """Builds the engine.

        Raises:
            ValueError: The student, the processes or the platform do not go together with vLLM.
        """
        self._trainer = trainer
        _check_student(trainer)
        self._dtype = _dtype_of(trainer)
        self._mode, why = chosen_sync(self._args.vllm_weight_sync, trainer.model, LORA_RANKS)
        logger.info(f"Weight sync with vLLM: {self._mode!r}, because {why}.")
        self._sampling = sampling_options(self._args, list(trainer.eos_token_ids))
        self._tokenizer_folder = tempfile.TemporaryDirectory(prefix="trl_opsd-tokenizer-")
        trainer.processing_class.save_pretrained(self._tokenizer_folder.name)
        trainer.model.config.save_pretrained(self._tokenizer_folder.name)  # vLLM looks for one there, twice
        with preserved_rng(trainer.accelerator.device):
            self._engine = Engine(self._engine_options())
        trainer.accelerator.wait_for_everyone()  # else a process still building holds up the others' collectives
        self._asleep: set[str] = set()
        self._proof = SyncProof(trainer, self._engine, self._dtype, is_peft(trainer.model))
        self._sent: tuple[Any, ...] | None = None
        self._base_sent: tuple[Any, ...] | None = None
        self._proved = False

    def complete(self, prompt_ids: list[list[int]], step: int) -> list[list[int]]:
        self._wake("weights")
        if self._moved():
            self.sync_weights()
        self._wake("kv_cache")
        limits = self._trainer.limits
        rows = self._engine.write(
            prompt_ids, [{**self._sampling, "max_tokens": limits.room(len(ids))} for ids in prompt_ids]
        )
        for number, (sent, row) in enumerate(zip(prompt_ids, rows, strict=True)):
            if row.prompt_ids != sent:
                raise RuntimeError(
                    f"vLLM answered another prompt than row {number} of this batch: sent {len(sent)} tokens beginning "
                    f"{sent[:8]}, got {len(row.prompt_ids)} beginning {row.prompt_ids[:8]}. Nothing was trained on it."
                )
        self._rest()
        return [row.completion_ids for row in rows]

    def sync_weights(self) -> None:
        """Sends the student's weights as they are now, and proves that they arrived.

        Called before a rollout whenever weights moved. Call it yourself after a change that leaves no trace, such as
        writing to the shards of a student under ZeRO-3. Every process has to call it.

        Raises:
            SyncError: vLLM does not write as the student does afterwards.
        """
        with self._trainer.phase("sync"):
            self._sync()

    def _sync(self) -> None:
        trainer, check = self._trainer, self._args.vllm_sync_check
        self._wake("weights")
        proves = check == "every" or (check == "first" and not self._proved)
        if proves and not self._proved:
            self._wake("kv_cache")
            self._proof.observe()
            self._engine.wipe_cache()
        self._sent = None  # whatever happens now, the engine holds something else than before
        with _timed(trainer, "sync/seconds"), torch.no_grad():
            trainer.record("sync/bytes", float(self._send()))
            self._engine.forget_prefixes()
        if proves:
            self._wake("kv_cache")
            with _timed(trainer, "sync/proof_seconds"):
                trainer.record("rollout/logprob_gap", self._proof.check())
            self._proved = True
        self._sent = self._version()

    # ---- Weights ------------------------------------------------------------------------------------------------

    def _send(self) -> int:
        """Sends what moved, and returns the bytes."""
        model, gathered = self._trainer.model, self._trainer.gathered
        if self._mode == "full":
            return self._load(Stream(weights_of(model), self._dtype, gathered))
        sent = 0
        base = _version_of(weight.base for weight in base_weights_of(model))
        if base != self._base_sent:
            self._base_sent = None
            sent = self._load(Stream(base_weights_of(model), self._dtype, gathered))
            self._base_sent = base
        layers, size = adapter_of(model, self._dtype, gathered)
        self._engine.load_adapter(layers)
        return sent + size

    def _load(self, stream: Stream) -> int:
        weights = iter(stream)
        try:
            self._engine.load(weights)
        finally:
            for _ in weights:  # the others gather what is left together with this process
                pass
        return stream.bytes

    def _moved(self) -> bool:
        """Whether weights moved since they were sent, in any process; all of them send, or none."""
        here = torch.tensor([int(self._version() != self._sent)], device=self._trainer.accelerator.device)
        return bool(self._trainer.accelerator.gather(here).any())

    def _version(self) -> tuple[Any, ...]:
        """Differs whenever the student may have changed.

        torch counts every write to a tensor, and a tensor that was exchanged lies elsewhere. Neither sees what an
        optimizer writes to shards or flat buffers, or what a checkpoint writes there: those the trainer counts.
        """
        trainer = self._trainer
        adapters = tuple(trainer.model.active_adapters) if is_peft(trainer.model) else ()
        return trainer.state.global_step, trainer.loads, adapters, _version_of(trainer.model.parameters())

    # ---- Sleep --------------------------------------------------------------------------------------------------

    def _rest(self) -> None:
        """Gives the engine's memory back until the next rollout."""
        if self._args.vllm_enable_sleep_mode:
            # Where only the adapter is sent, the base has to outlive the sleep, in host memory.
            self._engine.sleep(1 if self._mode == "adapter" else 2)
            self._asleep = {"weights", "kv_cache"}

    def _wake(self, what: str) -> None:
        if what not in self._asleep:
            return
        clear_device_cache()
        self._engine.wake(what)
        self._asleep.remove(what)
        if what == "weights" and self._mode == "full":
            self._sent = None

    # ---- Construction -------------------------------------------------------------------------------------------

    def _engine_options(self) -> EngineOptions:
        trainer, args = self._trainer, self._args
        rank = adapter_rank(trainer.model) if self._mode == "adapter" else None
        return EngineOptions(
            model=trainer.model.name_or_path,
            revision=_revision(args),
            tokenizer=self._tokenizer_folder.name,
            dtype=self._dtype,
            context=trainer.limits.context,
            vocabulary=trainer.limits.vocabulary,
            sequences=max(
                args.per_device_train_batch_size * args.gradient_accumulation_steps, args.per_device_eval_batch_size
            ),
            seed=trainer.accelerator.process_index,
            gpu_memory_utilization=args.vllm_gpu_memory_utilization,
            model_impl=args.vllm_model_impl,
            trust_remote_code=args.trust_remote_code,
            sleep_mode=args.vllm_enable_sleep_mode,
            lora_rank=None if rank is None else next(size for size in LORA_RANKS if size >= rank),
        )


def _check_options(args: Any) -> None:
    if args.vllm_mode == "server":
        raise ValueError(
            "`vllm_mode='server'` is not supported by this version: set `vllm_mode='colocate'`, or train with "
            "`trl.DistillationTrainer`, which has it."
        )
    if args.vllm_tensor_parallel_size != 1:
        raise ValueError(
            f"`vllm_tensor_parallel_size={args.vllm_tensor_parallel_size}` is not supported by this version, each "
            "process has an engine of its own: set it to 1."
        )
    if args.vllm_enable_sleep_mode and (why := why_no_sleep_mode()):
        raise ValueError(f"`vllm_enable_sleep_mode=True`: {why}; set it to False.")
    sampling_options(args, end_ids=[])


def _check_student(trainer: Any) -> None:
    args, model = trainer.args, trainer.model
    if trainer.accelerator.distributed_type == DistributedType.FSDP:
        raise ValueError(
            "`use_vllm=True` with FSDP is not supported by this version: use DeepSpeed ZeRO or data parallelism."
        )
    if getattr(model, "is_quantized", False):
        raise ValueError(
            "`use_vllm=True` with a quantized student is not supported by this version: load it without "
            "`quantization_config`, or set `use_vllm=False`."
        )
    room, context = args.vllm_max_model_length, context_of(model)
    if room is not None and context is not None and room > context:
        raise ValueError(
            f"`vllm_max_model_length={room}`, but the student's context is {context}: lower it, or leave it out."
        )
    path = model.name_or_path
    try:
        found = AutoConfig.from_pretrained(path, revision=_revision(args), trust_remote_code=args.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"vLLM builds its model from a checkpoint, and the student's `name_or_path` {path!r} does not load as one: "
            "pass the student by its path, or save it with `model.save_pretrained(folder)` and set "
            "`model.name_or_path = folder`."
        ) from error
    for name in _SHAPES:
        ours, theirs = (getattr(config.get_text_config(), name, None) for config in (model.config, found))
        if ours != theirs:
            raise ValueError(
                f"The checkpoint at the student's `name_or_path` {path!r} has {name}={theirs!r}, the student has "
                f"{ours!r}: save the student as it is now with `model.save_pretrained(folder)` and set "
                "`model.name_or_path = folder`."
            )


def _revision(args: Any) -> str | None:
    revision: str | None = (args.model_init_kwargs or {}).get("revision")
    return revision


def _dtype_of(trainer: Any) -> torch.dtype:
    """What the student computes in, which under mixed precision is not what its weights are kept in."""
    mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}
    if trainer.accelerator.mixed_precision in mixed:
        return mixed[trainer.accelerator.mixed_precision]
    dtype: torch.dtype = trainer.model.dtype
    return dtype


def _version_of(tensors: Iterable[Tensor]) -> tuple[tuple[int, int], ...]:
    """Where tensors lie and how often each was written to; those that ZeRO-3 has split are left out."""
    return tuple((one.data_ptr(), one._version) for one in tensors if not hasattr(one, "ds_id"))


@contextmanager
def _timed(trainer: Any, name: str) -> Iterator[None]:
    """Records the seconds of what runs inside, if it succeeds."""
    start = perf_counter()
    yield
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    trainer.record(name, perf_counter() - start)
