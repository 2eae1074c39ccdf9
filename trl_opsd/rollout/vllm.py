"""Generates with a vLLM engine in the training process, which can sleep while the student is trained."""

from __future__ import annotations

import math
import tempfile
from typing import Any, ClassVar

import torch
from accelerate.logging import get_logger
from accelerate.utils import DistributedType, gather_object, set_seed
from accelerate.utils.memory import clear_device_cache
from transformers import AutoConfig

from trl_opsd._compat.sharding import whole_numel
from trl_opsd._compat.trl import DistillationConfig
from trl_opsd._compat.versions import CHECKPOINTING
from trl_opsd._compat.vllm.engine import VLLMEngine, why_no_sleep_mode
from trl_opsd._compat.vllm.supported import LORA_RANKS, why_no_adapter
from trl_opsd.config import OPSDConfig
from trl_opsd.models.backbone import model_shape
from trl_opsd.models.grouping import bytes_per_token
from trl_opsd.models.weights import SHARE, cached_per_token, engine_bytes, training_pass_bytes
from trl_opsd.parallel.rng import preserved_rng
from trl_opsd.rollout.host import Host
from trl_opsd.rollout.synced import SyncedRollout, check_student, dtype_of, version_of
from trl_opsd.rollout.vllm_sampling import sampling_options
from trl_opsd.rollout.weight_sync import (
    Stream,
    adapter_layers,
    adapter_of,
    adapter_rank,
    base_weights_of,
    chosen_sync,
    saved_by,
    weights_of,
)

logger = get_logger(__name__)

_SHAPES = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "tie_word_embeddings")
"""Config fields of the checkpoint and the student that must agree, so that the weights fit the engine."""


class VLLMRollout(SyncedRollout):
    """Generates with vLLM in the training process; rejects options that cannot work before a model is loaded."""

    reads_images: ClassVar[bool] = True
    engine: VLLMEngine

    def __init__(self, args: OPSDConfig) -> None:
        super().__init__(args)
        if args.world_size % args.vllm_tensor_parallel_size:
            raise ValueError(
                f"`vllm_tensor_parallel_size={args.vllm_tensor_parallel_size}`: that many processes share an engine, "
                f"but there are {args.world_size}: set it to a divisor of their number."
            )
        if args.vllm_enable_sleep_mode and (why := why_no_sleep_mode()):
            raise ValueError(f"`vllm_enable_sleep_mode=True`: {why}; set it to False.")
        sampling_options(args, end_ids=[])

    def __str__(self) -> str:
        size = self.args.vllm_tensor_parallel_size
        return "vLLM in this process" if size == 1 else f"vLLM in these processes, {size} per engine"

    def bind(self, trainer: Host) -> None:
        """Builds the engine; rejects a student, processes or a platform that do not fit vLLM."""
        self.trainer = trainer
        check_student(trainer)
        checkpoint = _checked_checkpoint(trainer)
        self._is_multimodal = checkpoint.get_text_config() is not checkpoint
        self.sees = self._is_multimodal and trainer.reads_images is not False
        self._dtype = dtype_of(trainer)
        self._choose_sync(why_no_adapter(checkpoint, self.args.vllm_model_impl, adapter_layers(trainer.model)))
        sampling = sampling_options(self.args, list(trainer.eos_token_ids))
        self._tokenizer_folder = tempfile.TemporaryDirectory(prefix="trl_opsd-tokenizer-")
        trainer.processing_class.save_pretrained(self._tokenizer_folder.name)
        # Without one each engine retries for two seconds.
        trainer.model.config.save_pretrained(self._tokenizer_folder.name)
        with preserved_rng(trainer.accelerator.device):
            engine = self._started()
        engine.wipe_cache()  # its first weights are random, and NaNs in the cache would outlive a sync
        trainer.accelerator.wait_for_everyone()  # else the others wait in a later collective for one still building
        self.set_up(trainer, engine, sampling, self._dtype)
        self._asleep: set[str] = set()
        self._base_sent: tuple[Any, ...] | None = None
        self.sleep()  # until the first rollout; optimizer states and teachers may be made before

    def _started(self) -> VLLMEngine:
        """Starts the engine; falls back to sending all weights if it takes no adapter or does not start with LoRA."""
        against: str | None = None
        try:
            engine = VLLMEngine(**self._engine_arguments())
        except Exception as error:
            if self._mode == "full" or "LoRA" not in str(error):
                raise
            against = str(error)  # the error itself keeps the engine's weights, by its traceback
        if against is not None:
            self._choose_sync(against)
            clear_device_cache(garbage_collection=True)
            return self._started()
        if self._mode == "adapter" and (lost := engine.unknown_layers(adapter_layers(self.trainer.model))):
            self._choose_sync(f"vLLM's model of the student has no separate layer for {lost[0]}")
        return engine

    def _choose_sync(self, against: str | None) -> None:
        self._mode, why = chosen_sync(self.args.vllm_weight_sync, self.trainer.model, LORA_RANKS, against)
        logger.info(f"Weight sync with vLLM: {self._mode!r}, because {why}.")

    def complete(self, prompt_ids: list[list[int]], step: int) -> list[list[int]]:
        """As for every rollout. Processes that share an engine sample with a random state that the first one draws."""
        if self.args.vllm_tensor_parallel_size == 1:
            return super().complete(prompt_ids, step)
        drawn = int(torch.randint(2**32, ()))
        with preserved_rng(self.trainer.accelerator.device):
            # A seed for each row would do as well, but rules out vLLM's fused sampler for `top_p` and `top_k`.
            set_seed(self.engine.gathered(drawn)[0])
            return super().complete(prompt_ids, step)

    # ---- Weights ------------------------------------------------------------------------------------------------

    def send_weights(self) -> int:
        model, how = self.trainer.model, (self._dtype, self.trainer.accelerator.device, self.trainer.gathered)
        saved = saved_by(model)
        if self._mode == "full":
            return self._load(Stream(weights_of(model), *how, saved))
        sent = 0
        # Only an adapter is trained, but a user may have changed the base, too.
        base = version_of(weight.base for weight in base_weights_of(model))
        if base != self._base_sent:
            self._base_sent = None
            sent = self._load(Stream(base_weights_of(model), *how, saved))
            self._base_sent = base
        layers, size = adapter_of(model, *how)
        self.engine.load_adapter(layers)
        return sent + size

    def _load(self, stream: Stream) -> int:
        with stream as weights:
            self.engine.load(weights)
        return stream.bytes

    # ---- Sleep --------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Releases the engine's memory until the next session."""
        if self.args.vllm_enable_sleep_mode and "weights" not in self._asleep:
            # Where only the adapter is sent, the base has to be kept in host memory.
            self.engine.sleep(1 if self._mode == "adapter" else 2)
            self._asleep = {"weights", "kv_cache"}

    def close(self) -> None:
        super().close()
        self._asleep = {"weights", "kv_cache"}

    def wake(self, what: str) -> None:
        if what not in self._asleep:
            return
        clear_device_cache()
        self.engine.wake(what)
        self._asleep.remove(what)
        if what == "weights" and self._mode == "full":
            self._sent = None
        if what == "kv_cache":
            self.engine.wipe_cache()  # new memory may hold NaNs, and in attention 0·NaN is NaN

    # ---- Construction -------------------------------------------------------------------------------------------

    def _engine_arguments(self) -> dict[str, Any]:
        trainer, args, size = self.trainer, self.args, self.args.vllm_tensor_parallel_size
        rows = max(args.per_device_train_batch_size * args.gradient_accumulation_steps, args.per_device_eval_batch_size)
        adapter: dict[str, Any] = {}
        if self._mode == "adapter":
            rank = adapter_rank(trainer.model)
            # Only for the adapter's layers, because LoRA on the head breaks prompt scoring on the CPU.
            layers = sorted({name.rpartition(".")[2] for name in adapter_layers(trainer.model)})
            adapter = {
                "enable_lora": True,
                "max_loras": 1,
                "max_lora_rank": next(size for size in LORA_RANKS if size >= rank),
                "lora_target_modules": layers,
            }
        return {
            "vocabulary": trainer.limits.vocabulary,
            "placeholders": tuple(trainer.placeholders),
            "model": trainer.model.name_or_path,
            "revision": (args.model_init_kwargs or {}).get("revision"),
            "tokenizer": self._tokenizer_folder.name,
            "dtype": self._dtype,
            "max_model_len": trainer.limits.context,
            "max_num_seqs": rows * size,
            "tensor_parallel_size": size,
            # Else all engines would sample with the same random numbers.
            "seed": trainer.accelerator.process_index // size,
            "gpu_memory_utilization": self._memory_share(rows * size),
            "model_impl": args.vllm_model_impl,
            "language_model_only": self._is_multimodal and not self.sees,
            "processor": trainer.processors.get("") if self.sees else None,
            "trust_remote_code": args.trust_remote_code,
            "enable_sleep_mode": args.vllm_enable_sleep_mode,
            **adapter,
        }

    def _memory_share(self, rows: int) -> float:
        """The engine's share of a device: where the option has TRL's default, up to what all these rows need at once.

        Never less than the default, nor more than training leaves. Collective.
        """
        trainer, args, model, tokens = self.trainer, self.args, self.trainer.model, self.trainer.limits.context
        device, stated = trainer.accelerator.device, args.vllm_gpu_memory_utilization
        is_chosen = stated != DistillationConfig.vllm_gpu_memory_utilization
        if is_chosen or device.type == "cpu" or tokens is None:
            return stated
        size, sleeps = args.vllm_tensor_parallel_size, args.vllm_enable_sleep_mode
        heads = getattr(model.config.get_text_config(), "num_key_value_heads", None) or size
        needed = engine_bytes(
            sum(map(whole_numel, model.parameters())) // size,
            rows * tokens * cached_per_token(model.config) // min(size, heads),  # a device has a head at least
            bytes_per_token(model)[0],
            rows * model_shape(model)[0],
            self._dtype.itemsize,
        )
        clear_device_cache(garbage_collection=True)
        free, memory = torch.accelerator.get_memory_info(device)
        kind, shards = trainer.accelerator.distributed_type, trainer.accelerator.num_processes
        # In float32 gradients, two moments, and DeepSpeed's weights or DDP's copy; and weights that are to come here.
        states = 16 * sum(whole_numel(one) for one in model.parameters() if one.requires_grad)
        absent = sum(one.nbytes for one in model.parameters() if one.device.type != device.type)
        trains = states // (shards if kind in (DistributedType.DEEPSPEED, DistributedType.FSDP) else 1)
        trains += absent // (shards if kind == DistributedType.FSDP else 1)
        if not sleeps:
            micro_batch = args.per_device_train_batch_size * tokens
            trains += training_pass_bytes(model, micro_batch, bool(getattr(args, CHECKPOINTING)))
            free *= args.teacher_offload == "none"  # else it holds weights of another size, too
        wanted = math.ceil(100 * sum(needed.values()) / memory) / 100
        most = math.floor(100 * (min(gather_object([free])) - trains) / memory) / 100 - (1 - SHARE)
        share = max(stated, min(wanted, round(most, 2)))
        parts = ", ".join(f"{nbytes / 1e9:.1f} GB of {name}" for name, nbytes in needed.items())
        said = f"vLLM gets {share} of a device, and needs {wanted} for {rows} rows of {tokens} tokens at once: {parts}."
        if share < wanted:
            remedy = "fewer rows, or a lower `vllm_max_model_length`" if sleeps else "`vllm_enable_sleep_mode=True`"
            said += f" Rows will queue: set {remedy}."
        (logger.warning if share < wanted else logger.info)(said)
        return share


def _checked_checkpoint(trainer: Host) -> Any:
    """The config of the student's checkpoint, which vLLM builds its model from; it must fit the student."""
    args, model = trainer.args, trainer.model
    path, revision = model.name_or_path, (args.model_init_kwargs or {}).get("revision")
    where = f"The checkpoint at the student's `name_or_path` {path!r}"
    remedy = "save the student with `model.save_pretrained(folder)` and set `model.name_or_path = folder`."
    try:
        found = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=args.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"{where}, from which vLLM builds its model, cannot be loaded: {remedy}") from error
    if getattr(found, "quantization_config", None):
        raise ValueError(f"{where} is quantized, so vLLM would build a quantized model: {remedy}")
    for name in _SHAPES:
        ours, theirs = (getattr(config.get_text_config(), name, None) for config in (model.config, found))
        if ours != theirs:
            raise ValueError(f"{where} has {name}={theirs!r}, but the student has {ours!r}: {remedy}")
    return found
