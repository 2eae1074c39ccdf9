"""One vLLM engine in this process: token ids in, token ids and log-probabilities out, weights as a stream."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, distributed
from transformers import PreTrainedModel
from vllm import LLM, SamplingParams
from vllm.distributed import parallel_state
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, get_layerwise_info
from vllm.multimodal.processing import InputProcessingContext
from vllm.platforms import current_platform

from trl_opsd._compat.versions import replaced
from trl_opsd._compat.vllm.process import launcher_environment, preserved_classes, preserved_process, retype
from trl_opsd._compat.vllm.supported import HEAD, has_head, vocabulary_mask
from trl_opsd.types import Completion

_DESTROYERS = ("destroy_model_parallel", "destroy_distributed_environment")
"""vLLM's functions that destroy its process groups, which the next engine reuses, and torch's default group."""


class VLLMEngine:
    """One vLLM engine inside this process, an [`~rollout.base.Engine`]; `llm` are arguments of `vllm.LLM`.

    Token ids from `vocabulary` on and `placeholders` are never sampled. With a `processor` it reads images. With a
    `tensor_parallel_size` above 1, as many consecutive processes hold a part of the model each: then `write` is
    collective among them, and each of the other methods has to be called by all of them, in the same order.
    """

    name = "vLLM"

    @preserved_process()
    def __init__(self, vocabulary: int, placeholders: Collection[int], processor: Any = None, **llm: Any) -> None:
        # A first engine without experts created no expert-parallel group; without data parallelism it is the same.
        if parallel_state._EP is None:
            parallel_state._EP = parallel_state._TP
        reading: Any = nullcontext()
        if processor is not None:
            # The checkpoint's may differ, or be missing.
            reading = replaced(InputProcessingContext, get_hf_processor=lambda *_, **__: processor)
            # Else vLLM normalises pixels by buffers that no checkpoint has, and that are random here.
            llm |= {"mm_device_do_normalize": False, "limit_mm_per_prompt": {"video": 0, "audio": 0}}
        # vLLM's transformers backend modifies the model classes of transformers, among them the student's.
        with (
            launcher_environment(),
            preserved_classes(PreTrainedModel) as changed,
            reading,
        ):
            self._llm = LLM(
                # Random weights, so that a weight the student has not sent cannot be right by accident.
                load_format="dummy",
                distributed_executor_backend="external_launcher",
                # As in TRL: memory profiling would reserve memory for the high default.
                max_num_batched_tokens=max(4096, llm["max_num_seqs"]),
                logprobs_mode="raw_logprobs",
                # Sampling options and end tokens come from the trainer, not from the checkpoint's generation config.
                generation_config="vllm",
                logits_processors=[vocabulary_mask(vocabulary, placeholders)],
                **llm,
            )
        self._sharing = parallel_state.get_tp_group()
        retype(self._worker.model_runner.get_model(), changed)
        if processor is not None:
            self._llm.llm_engine.renderer.get_mm_processor().info.get_hf_processor = lambda *_, **__: processor
        self._adapter: LoRARequest | None = None
        if llm.get("enable_lora"):  # vLLM itself loads adapters from files
            self._lora_manager._load_adapter = lambda request: self._arriving
        client = self._llm.llm_engine.engine_core
        # vLLM's own finalizer would destroy the launch's process groups; `_shut_down` replaces it.
        client._finalizer.detach()
        self._finalizer = weakref.finalize(self, _shut_down, client.engine_core)

    @preserved_process()
    def close(self) -> None:
        """Frees the device memory. Called automatically when the engine is garbage-collected."""
        self._finalizer()
        self.__dict__.pop("_llm", None)

    # ---- Generation ---------------------------------------------------------------------------------------------

    @preserved_process()
    def write(self, prompt_ids: list[list[int]], options: list[dict[str, Any]]) -> list[Completion]:
        """Generates one completion for each prompt, with arguments of `vllm.SamplingParams` for each.

        Processes that share an engine may have different numbers of prompts, but need one random state: each samples
        the rows of all.
        """
        by_process = self.gathered(list(zip(map(_prompt, prompt_ids), options, strict=True)))
        rows = [row for of_one in by_process for row in of_one]
        outputs = self._llm.generate(
            [prompt for prompt, _ in rows],
            [SamplingParams(**{"detokenize": False, **given}) for _, given in rows],
            use_tqdm=False,
            lora_request=self._adapter,
        )
        drawn = hash(tuple(tuple(output.outputs[0].token_ids) for output in outputs))
        if any(other != drawn for other in self.gathered(drawn)):
            raise RuntimeError(
                "Processes that share a vLLM engine sampled different tokens, so each continued other rows than the "
                "rest: set `vllm_tensor_parallel_size=1`, or `vllm_mode='server'`."
            )
        first = sum(map(len, by_process[: self._sharing.rank_in_group]))
        return [_written(output) for output in outputs[first : first + len(prompt_ids)]]

    def gathered(self, value: Any) -> list[Any]:
        """What each of the processes that share this engine has, by rank. Collective."""
        found = [value] * self._sharing.world_size
        if len(found) > 1:
            distributed.all_gather_object(found, value, group=self._sharing.cpu_group)
        return found

    @preserved_process()
    def forget_prefixes(self) -> None:
        """Clears the caches of prefixes and images, which were computed with earlier weights."""
        self._llm.llm_engine.reset_encoder_cache()
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache; completions would come from earlier weights.")

    def wipe_cache(self) -> None:
        """Zeroes the KV cache: random weights may have left NaNs."""
        # vLLM's attention on the CPU multiplies the unused end of a block by 0, and 0 * NaN is NaN.
        for cache in self._worker.model_runner.kv_caches:
            for part in cache if isinstance(cache, list | tuple) else (cache,):
                part.zero_()

    @property
    def block_size(self) -> int:
        size: int = self._llm.llm_engine.vllm_config.cache_config.block_size
        return size

    # ---- Weights ------------------------------------------------------------------------------------------------

    @preserved_process()
    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces all weights in one call; after an error some are old and some new, and all can be sent again."""
        self._adapter = None  # vLLM drops its adapters here
        model = self._worker.model_runner.get_model()
        # A tied head is sent under its own name, as vLLM rebuilds only what it is sent; models without a separate head
        # (Gemma 2, Bloom) reject it.
        keeps = has_head(model)
        kernels = _expert_kernels(model)
        # A missing kernel makes vLLM build it anew from the new weights.
        for method in kernels:
            method.moe_kernel = None
        try:
            # vLLM's reload path also repacks and quantises them.
            self._worker.reload_weights(weights_iterator=(one for one in weights if keeps or one[0] != HEAD))
        except BaseException:
            _end_reload(self._worker.model_runner)
            raise
        finally:
            for method, kernel in kernels.items():
                method.moe_kernel = method.moe_kernel or kernel

    @preserved_process()
    def load_adapter(self, layers: Mapping[str, tuple[Tensor, Tensor, float]]) -> None:
        """Replaces the adapter, from memory: A [r, in], B [out, r] and the scaling of B A, by the name of the layer."""
        named = {self._named(name): factors for name, factors in layers.items()}
        built = {  # of copies, because vLLM multiplies B by the scaling in place
            name: LoRALayerWeights(name, a.size(0), 0, _sent_to_host(a), _sent_to_host(b), scaling)
            for name, (a, b, scaling) in named.items()
        }
        if torch.accelerator.is_available():
            torch.accelerator.current_stream().synchronize()  # once, for all copies
        rank = max(weights.rank for weights in built.values())
        self._arriving = LoRAModel(1, rank, built)
        self._llm.llm_engine.add_lora(LoRARequest("student", 1, "memory", load_inplace=True))
        self._adapter = LoRARequest("student", 1, "memory")

    def unknown_layers(self, layers: Iterable[str]) -> list[str]:
        """Those of an adapter's layers that vLLM's model lacks and would silently ignore."""
        manager = self._lora_manager._adapter_manager
        packed = manager.packed_modules
        held = {*manager.modules} - {*packed} | {part for parts in packed.values() for part in parts}
        return [name for name in layers if self._named(name) not in held]

    def _named(self, layer: str) -> str:
        """vLLM's name of a checkpoint's layer."""
        mapper: Any = getattr(self._worker.model_runner.get_model(), "hf_to_vllm_mapper", None)
        mapper = None if mapper is None else mapper.get_rename_mapper()
        name: str = parse_fine_tuned_lora_name(f"base_model.model.{layer}.lora_A.weight", mapper)[0]
        return name

    # ---- Sleep --------------------------------------------------------------------------------------------------

    @preserved_process()
    def sleep(self, level: int) -> None:
        """Frees device memory: level 1 moves the weights to host memory, level 2 discards them."""
        self._llm.sleep(level=level)

    @preserved_process()
    def wake(self, what: str) -> None:
        """Allocates memory for `"weights"` or `"kv_cache"` again. After level 2 the weights are arbitrary."""
        self._llm.wake_up(tags=[what])

    # ---- Inside vLLM --------------------------------------------------------------------------------------------

    @property
    def _worker(self) -> Any:
        return self._llm.llm_engine.model_executor.driver_worker

    @property
    def _lora_manager(self) -> Any:
        return self._worker.model_runner.lora_manager


def _sent_to_host(part: Tensor) -> Tensor:
    """A copy in host memory; one from a device is pinned, and complete when the device's current stream is."""
    copy = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.device.type != "cpu")
    return copy.copy_(part, non_blocking=True)


def _expert_kernels(model: Any) -> dict[Any, Any]:
    """Kernels of mixtures of experts that must be rebuilt after new weights, by the method object that holds them."""
    # Only on the CPU does vLLM pack the experts' weights when it builds the kernel, and never repack them.
    methods = [getattr(layer, "quant_method", None) for layer in model.modules()] if current_platform.is_cpu() else []
    return {method: kernel for method in methods if (kernel := getattr(method, "moe_kernel", None)) is not None}


def _end_reload(runner: Any) -> None:
    """Ends an aborted reload; otherwise vLLM would count partially loaded layers toward the next one."""
    # Incomplete layers get their previous tensors back, in the layout that vLLM computes with.
    model = runner.get_model()
    for layer in model.modules():
        info = get_layerwise_info(layer)
        # vLLM counts loaded elements to know when a layer is complete.
        info.load_numel = 0
        info.loaded_weights.clear()
    finalize_layerwise_reload(model, runner.model_config)


def _shut_down(core: Any) -> None:
    """Shuts an engine down, but keeps the process groups: vLLM would destroy them all, the trainer's included."""
    with replaced(parallel_state, **dict.fromkeys(_DESTROYERS, lambda: None)):
        core.shutdown()


def why_no_sleep_mode() -> str | None:
    """Why this platform cannot put an engine to sleep, or `None` where it can."""
    if current_platform.is_sleep_mode_available():
        return None
    return f"vLLM cannot release the memory of an engine on the platform {current_platform.device_name!r}"


def _prompt(ids: list[int]) -> dict[str, Any]:
    """A prompt as vLLM takes it, which expands the placeholders of images itself."""
    images = getattr(ids, "images", None)
    if images is None:
        return {"prompt_token_ids": ids}
    return {"prompt_token_ids": list(images.unexpanded), "multi_modal_data": {"image": list(images.originals)}}


def _written(output: Any) -> Completion:
    completion = output.outputs[0]
    ids, prompt_ids = list(completion.token_ids), list(output.prompt_token_ids)
    return Completion(
        prompt_ids=prompt_ids,
        completion_ids=ids,
        prompt_logprobs=_token_logprobs(prompt_ids[1:], (output.prompt_logprobs or [])[1:]),
        logprobs=_token_logprobs(ids, completion.logprobs or []),
    )


def _token_logprobs(ids: list[int], found: Any) -> list[float]:
    return [one[token].logprob for token, one in zip(ids, found, strict=False)]
