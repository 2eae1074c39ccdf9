"""`trl-opsd plan`: memory of a training by part and phase, from configs alone, and the placement that fits best.

Knows no weights, and estimates everything. Bytes are those of one device, unless stated.

B rows · L tokens of a row
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import AutoConfig, PretrainedConfig

from trl_opsd._compat.versions import CHECKPOINTING
from trl_opsd.losses.streamed import tile_of
from trl_opsd.models.backbone import hidden_states
from trl_opsd.models.checks import adapter_at
from trl_opsd.models.grouping import bytes_per_token
from trl_opsd.models.weights import SHARE, cached_numbers, engine_bytes, training_pass_bytes, without_weights
from trl_opsd.teacher.frozen import PASS_BYTES
from trl_opsd.types.targets import CACHE_BYTES

_BUCKET, _LIVE = 500_000_000, 1_000_000_000
"""Defaults of DeepSpeed, in numbers: `reduce_bucket_size`, and `stage3_max_live_parameters`, up to which weights stay
gathered for the backward pass."""
_SENT, _PROBED = 256_000_000, 2 * 80
"""Bytes of weights gathered at once to be sent to it, and tokens that a student reads to prove that they arrived."""
TRANSFORMERS, AWAKE, ASLEEP, SERVER = "transformers", "vllm", "vllm, sleeping", "server"
"""What generates: transformers, vLLM in the same process, without and with sleep mode, or a server."""
ENGINES = {"transformers": (TRANSFORMERS,), "vllm": (AWAKE, ASLEEP), "server": (SERVER,)}
"""What may generate, by its name on the command line; of several the first that fits."""
_STEP = 0.05
"""Granularity of an engine's share of a device."""


@dataclass(frozen=True, slots=True)
class Load:
    """The load of training: rows of an optimizer step on one device, their tokens, and the devices."""

    gpus: int
    batch: int
    prompt: int
    length: int
    half: bool
    checkpointing: bool
    lora: int | None = None
    """Rank of an adapter on all linear layers; `None` where all weights are trained."""
    memory: int = 0
    """Bytes of a device, which determine the tiles of the loss; 0 for a CPU."""

    @property
    def itemsize(self) -> int:
        """Bytes of a number in products, and in a teacher's weights and states."""
        return 2 if self.half else 4

    @property
    def row(self) -> int:
        """Tokens of a row."""
        return self.prompt + self.length

    def trained(self, student: Shape) -> int:
        """Parameters that are trained."""
        return student.parameters if self.lora is None else self.lora * student.linear


@dataclass(frozen=True, slots=True)
class Choice:
    """A placement."""

    sharding: str
    """`"single"`, `"ddp"`, `"zero2"`, `"zero3"`, `"fsdp2"` or `"zero3_offload"`: the name of an accelerate file."""
    teacher: str
    """A value of `teacher_offload`, `"served"`, or `"itself"`: the student without its adapter."""
    micro: int
    """Rows of a micro-batch."""
    engine: str = TRANSFORMERS
    """What generates."""


# ---- Models, counted on the meta device ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shape:
    """A model by its numbers: counts of parameters, not bytes, unless stated."""

    config: PretrainedConfig
    tensors: tuple[int, ...]
    """Parameters of each."""
    head: int
    layer: int
    """Parameters of the largest."""
    embeddings: int
    """Parameters of input embeddings that are not tied to the head."""
    rest: int
    """Parameters outside of head, embeddings and layers: norms, and a vision tower."""
    vocabulary: int
    width: int
    linear: int
    """Inputs and outputs of all linear layers but the head: the size of a LoRA adapter of rank 1."""
    cached: Callable[[int], int]
    """Numbers in the key-value cache of a row, by its tokens."""
    half_bytes_per_token: int
    """Bytes of activations per token in a forward pass without a graph, in half precision, without the mask."""

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return sum(self.tensors)


def shape_of(source: str) -> Shape:
    """Counts the parameters of a causal language model: a local folder, `config.json` or Hub id."""
    config = AutoConfig.from_pretrained(Path(source) if Path(source).exists() else source)
    with torch.device("meta"):
        model = without_weights(config, torch.bfloat16)
    head, embeddings = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    lists = (list(module) for module in model.modules() if isinstance(module, nn.ModuleList))
    layers = max(lists, key=lambda layers: sum(map(_count, layers)), default=[])
    untied = 0 if embeddings is head else embeddings.numel()
    linear = [one for one in model.modules() if isinstance(one, nn.Linear) and one.weight is not head]
    return Shape(
        config=config,
        tensors=tuple(one.numel() for one in model.parameters()),
        head=head.numel(),
        layer=max(map(_count, layers), default=_count(model)),
        embeddings=untied,
        rest=_count(model) - head.numel() - untied - sum(map(_count, layers)),
        vocabulary=head.size(0),
        width=head.size(1),
        linear=sum(one.in_features + one.out_features for one in linear),
        cached=cache(partial(cached_numbers, model)),
        half_bytes_per_token=bytes_per_token(model)[0],
    )


def _count(module: nn.Module) -> int:
    return sum(one.numel() for one in module.parameters())


class Live(TorchDispatchMode):
    """Tracks the bytes of all storages that operations create, until they are freed."""

    def __init__(self, known: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: dict[int, object] = {id(one.untyped_storage()): one.untyped_storage() for one in known}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts the results of an operation."""
        if is_of_experts := str(function) == "aten._grouped_mm.default":  # of fake tensors torch supports bfloat16 only
            dtype, args = args[0].dtype, tree_map_only(Tensor, _rounded, args)
        result = function(*args, **(kwargs or {}))
        result = result.to(dtype) if is_of_experts else result
        for one in tree_leaves(result):
            # Views share a storage, which is counted once.
            if isinstance(one, Tensor) and id(storage := one.untyped_storage()) not in self._seen:
                self._seen[id(storage)] = size = storage.nbytes()
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, id(storage), size)
        return result

    def _free(self, key: int, size: int) -> None:
        self._seen.pop(key, None)
        self.now -= size


def _rounded(one: Tensor) -> Tensor:
    return one.bfloat16() if one.is_floating_point() else one


def tracer(student: Shape, load: Load) -> Callable[[int, str], int]:
    """Activations by rows and products, each traced once."""
    return cache(partial(_traced, student.config, load.row, load.checkpointing))


def _traced(config: PretrainedConfig, tokens: int, checkpointing: bool, rows: int, products: str) -> int:
    """Peak bytes of a training pass, besides weights and gradients, which exist already; the head is not applied."""
    # With copies of weights that autocast makes, and the gradient of the largest weight before it is added. `products`
    # is "float32"; "autocast", bfloat16 with float32 weights; or "bfloat16" with bfloat16 weights.
    with torch.device("meta"):
        model = without_weights(config, torch.bfloat16 if products == "bfloat16" else torch.float32).train()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            if checkpointing:
                getattr(model, f"{CHECKPOINTING}_enable")({"use_reentrant": False})
            parameters = list(model.parameters())
            for one in parameters:
                one.grad = torch.empty_like(one)  # exists already, so that only activations are counted
            known = [*parameters, *(one.grad for one in parameters), *model.buffers()]
            ids_BL, mask_BL = torch.zeros(rows, tokens, dtype=torch.long), torch.ones(rows, tokens, dtype=torch.long)
            with Live(known) as live:
                with torch.autocast("cpu", torch.bfloat16, enabled=products == "autocast"):
                    states_BLH = hidden_states(model, ids_BL, mask_BL)
                states_BLH.backward(torch.empty_like(states_BLH))
            return live.peak
    except Exception:  # some families read values while they run, and cannot be traced
        return training_pass_bytes(model, rows * tokens, checkpointing)


# ---- Memory, in bytes ------------------------------------------------------------------------------------------------


def _states(student: Shape, load: Load, sharding: str) -> tuple[int, int, int, int, int, int]:
    """Bytes of the student on one device: weights, gradients, optimizer, weights of other devices while they are used,
    gradient buckets that are kept between backward passes, and those that only a backward pass needs.

    An adapter is trained in float32, on weights that are frozen in half precision. DDP keeps a second copy of the
    gradients. DeepSpeed keeps weights in the dtype of products, gradients in that and in float32, and float32 weights
    and Adam's moments in its optimizer; a bucket is reduced from a copy in the order of the processes to the share that
    this one receives. FSDP2 divides what a single process has, gathers a layer while it computes, the one after it, and
    the head until the backward pass has ended, when it has the gradients of the head and of one more unit, and a
    float32 copy to reduce.
    """
    gpus, size, trained = load.gpus, load.itemsize, load.trained(student)
    frozen = 0 if load.lora is None else size * student.parameters
    zero3 = size * min(student.parameters, _LIVE + max(student.layer, student.head))
    layers = size * (2 * student.layer + student.head)
    bucket, reduced = size * _BUCKET, size * min(trained, _BUCKET)
    reduced += reduced // gpus
    unit = min(trained, max(student.layer, student.head, student.embeddings))
    units = size * student.head * (load.lora is None) + (size + 4) * unit + 4 * unit // gpus
    mixed = size * trained
    return {
        "single": (frozen + 4 * trained, 4 * trained, 8 * trained, 0, 0, 0),
        "ddp": (frozen + 4 * trained, 4 * trained, 8 * trained, 0, 4 * trained, 0),
        "fsdp2": ((frozen + 4 * trained) // gpus, 4 * trained // gpus, 8 * trained // gpus, layers, 0, units),
        "zero2": (frozen + mixed, mixed + 4 * trained // gpus, 12 * trained // gpus, 0, 0, bucket),
        "zero3": ((frozen + mixed) // gpus, 4 * trained // gpus, 12 * trained // gpus, zero3, bucket, reduced),
        "zero3_offload": (0, 0, 0, zero3, bucket, reduced),
    }[sharding]


def _of_frozen(model: Shape, kept: str, itemsize: int) -> tuple[int, int]:
    """Bytes of a model that is not trained on the device between its forward passes, and during one."""
    whole, head = model.parameters, model.head
    idle, active = {
        "none": (whole, whole),
        "cpu": (head, whole),
        "stream": (head, head + model.embeddings + model.rest + 2 * model.layer),
        "zero3": (0, max(3 * model.layer, head)),
        "served": (head, head),
        "itself": (0, 0),
    }[kept]
    return itemsize * idle, itemsize * active


def phases(
    student: Shape, teacher: Shape, load: Load, choice: Choice, activations: Callable[..., int], engine: int = 0
) -> dict[str, dict[str, int]]:
    """Bytes by phase and part on one device; `engine` is what one in the same process takes while it is awake."""
    size, micro, sharding = load.itemsize, choice.micro, choice.sharding
    weights, gradients, optimizer, gathered, kept, reduced = _states(student, load, sharding)
    by_zero3 = sharding.startswith("zero3")
    # Autocast keeps copies of trained weights; frozen ones are cast anew, and DeepSpeed casts once.
    copies = student.parameters * 2 * (load.half and sharding in ("single", "ddp") and load.lora is None)
    products = ("autocast" if copies else "bfloat16") if load.half else "float32"
    # The teacher's largest pass: at least one row, and what fits its budget beyond that.
    row = load.row
    of_row = row * (teacher.half_bytes_per_token + row) * size // 2
    passes = max(of_row, min(PASS_BYTES, load.batch * of_row))
    # `teacher_cache_device='auto'` keeps a larger batch of targets in host memory.
    of_target = load.length * teacher.width * size
    targets = of_target * (load.batch if load.batch * of_target <= CACHE_BYTES else micro)
    tile, head = loss(student, teacher, micro * load.length, load)
    idle, active = _of_frozen(teacher, choice.teacher, size)
    if choice.engine == TRANSFORMERS:
        prompts = load.prompt * student.width * size * 8
        generates = {
            "gathered or cast weights": copies or (student.parameters * size if by_zero3 else gathered),
            "KV cache": load.batch * student.cached(load.row) * size,
            "activations": load.batch * (prompts + student.vocabulary * 12),
        }
    else:
        sent = max(min(_SENT, size * student.parameters), copies or gathered)
        proof = _PROBED * student.vocabulary * (size + 8)
        generates = {"gathered or cast weights": sent, "engine": engine, "proof": proof}
    always = {"weights": weights, "optimizer": optimizer, "idle teacher": idle}
    learns = {**always, "targets": targets, "engine": 0 if choice.engine == ASLEEP else engine}
    before = {"gradients": gradients * by_zero3, "gradient buckets": kept}  # ZeRO-3 never frees the first
    found = {
        "rollout": {**always, **generates, **before},
        "scoring": {**learns, "idle teacher": 0, "active teacher": active, "activations": passes, **before},
        "training": {
            **learns,
            "gathered or cast weights": gathered or (2 * student.head if copies else 0),
            "activations": activations(micro, products),
            "gradients": gradients,
            "gradient buckets": kept + reduced,
            "loss tile": tile,
            "gradient of the head": head,
        },
    }
    return {phase: {part: int(size) for part, size in parts.items() if size} for phase, parts in found.items()}


def loss(student: Shape, teacher: Shape, tokens: int, load: Load) -> tuple[int, int]:
    """Bytes of logit tiles and of float32 gradients of head and hidden states, for `tokens` in a micro-batch.

    One tile for student and teacher each. In half precision four are collected for the gradient of the head; the
    vocabulary is ranked at every 16th token.
    """
    vocabulary = min(student.vocabulary, teacher.vocabulary)
    tile = tile_of(tokens, vocabulary * (8 + 8 * load.half), load.memory)
    group = min(tokens, 4 * tile)
    head = 4 * student.head * (load.lora is None)
    return vocabulary * (8 * tile + 2 * load.half * group + group // 2), head + 4 * tokens * student.width


def of_engine(student: Shape, load: Load) -> int:
    """Memory of an engine in the same process, which computes with the numbers of products."""
    rows, of_token = load.batch, student.half_bytes_per_token * load.itemsize // 2
    held = student.parameters, rows * student.cached(load.row), of_token, rows * student.vocabulary
    return sum(engine_bytes(*held, load.itemsize).values())


def host_bytes(student: Shape, teacher: Shape, load: Load, choice: Choice) -> int:
    """Host memory of a machine with all devices: what its processes offload.

    DeepSpeed pins each process's part of each tensor, for which torch takes a power of two of bytes.
    """
    gpus, size, trained = load.gpus, load.itemsize, load.trained(student)
    held = size * teacher.parameters * gpus if choice.teacher in ("cpu", "stream") else 0
    if choice.teacher == "zero3":
        held = gpus * sum(_pinned(size * -(-numbers // gpus)) for numbers in teacher.tensors)
    if choice.engine == ASLEEP and load.lora:
        held += size * student.parameters * gpus
    if choice.sharding == "zero3_offload":
        # In float32: weights, Adam's moments, and gradients twice, as they are added up and as Adam takes them.
        held += size * (student.parameters + trained * (load.lora is not None)) + 20 * trained
    return held


def _pinned(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


# ---- Placements ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """A placement, the memory it needs, and whether that is available."""

    choice: Choice
    phases: dict[str, dict[str, int]]
    host: int
    fits: bool
    engine_share: float = 0.0
    """Of a device, for an engine in the same process."""
    servers: int = 0
    """Devices of a teacher's server and of one that generates, in addition to those that train."""

    @property
    def peak(self) -> tuple[str, int]:
        """The phase that needs most memory, and its bytes on one device."""
        return max(((phase, sum(parts.values())) for phase, parts in self.phases.items()), key=lambda one: one[1])


def considered(
    student: Shape,
    teacher: Shape,
    load: Load,
    host: float | None,
    activations: Callable[..., int],
    places: Sequence[str] = (),
    engine: str = "transformers",
) -> list[Plan]:
    """A plan for each placement, the best first, with the largest micro-batch that fits, or that of one row.

    Those that fit without a teacher's server come first, then those with one, then the smallest. One that does not fit
    without the student's activations in training is left without them. An unknown `host` memory is taken as enough for
    an offloaded teacher, but not for an offloaded student.
    """
    # Of a device, for an engine in the same process: a multiple of `_STEP`, or more than 1 if it does not fit.
    share = round(math.ceil(of_engine(student, load) / load.memory / _STEP) * _STEP, 2) if engine == "vllm" else 0.0
    usable = SHARE * load.memory

    def plan(choice: Choice, activations: Callable[..., int]) -> Plan:
        needed = host_bytes(student, teacher, load, choice)
        parts = phases(student, teacher, load, choice, activations, int(share * load.memory))
        served = [teacher] * (choice.teacher == "served") + [student] * (choice.engine == SERVER)
        # A power of two for each server, as tensor parallelism divides heads.
        devices = (math.ceil(math.log2(max(of_engine(one, load) / usable, 1))) for one in served)
        made = Plan(choice, parts, needed, host is None or needed <= SHARE * host, share, sum(1 << n for n in devices))
        return made if made.peak[1] <= usable else replace(made, fits=False)

    teachers = places or ["none", *["zero3"] * (load.gpus > 1), "cpu", "stream", "served"]
    shardings = ["single"] if load.gpus == 1 else ["ddp", "zero2", "zero3", "fsdp2"]  # those with less traffic first
    found = []
    # On the devices, then in host memory once for all processes, then a copy for each.
    for kept, sharding in [*product(teachers, shardings), *product(teachers, ["zero3_offload"] * (host is not None))]:
        if kept == "zero3" and not sharding.startswith("zero3"):
            continue
        rows = [rows for rows in range(load.batch, 0, -1) if load.batch % rows == 0]
        for choice in (Choice(sharding, kept, micro, generates) for generates in ENGINES[engine] for micro in rows):
            last = plan(choice, lambda *_: 0)
            if last.fits and (last := plan(choice, activations)).fits:  # a trace takes seconds
                break
        found.append(last)
    return sorted(found, key=lambda one: (not one.fits, one.choice.teacher == "served", not one.fits and one.peak[1]))


# ---- What is printed -------------------------------------------------------------------------------------------------


def planned(student: str, teacher: str, load: Load, host: float | None, engine: str | None) -> dict[str, Any]:
    """The best placement of a training with the next best, in GB and as options; and what that comes to."""
    base, places = teacher, [*["itself"] * (load.lora is not None and student == teacher)]
    if (adapter := adapter_at(teacher, {})) is not None:
        adapter.check("teacher")
        base, places = adapter.base, ["none", "cpu", "stream"]
    shapes = shape_of(student), shape_of(base)
    activations = tracer(shapes[0], load)
    for tried in [engine] if engine else ["vllm", "transformers"]:
        best, *_ = plans = considered(*shapes, load, host, activations, places, tried)[:5]
        if best.fits and not best.servers:
            break
    processes = "" if best.choice.sharding == "single" else f" --num_processes {load.gpus}"
    phase, peak = best.peak
    largest = max(best.phases[phase], key=lambda name: best.phases[phase][name])
    verdict = "Fits: put these `options` and a `dataset_name` into run.yaml, then run `command`."
    if not best.fits:
        verdict = (
            f"Does not fit in any placement: the phase `{phase}` needs {_gigabytes(peak)} GB; the largest part is "
            f"`{largest}` with {_gigabytes(best.phases[phase][largest])} GB. Try more or larger devices, LoRA "
            "(`--lora 16`), fewer rows, fewer tokens, or `--host-memory` to allow offloading."
        )
    return {
        "placements": [_placed(one, load) for one in plans],
        "phases": {phase: {part: _gigabytes(of) for part, of in parts.items()} for phase, parts in best.phases.items()},
        "usable": _gigabytes(SHARE * load.memory),
        "options": options(best, student, teacher, load),
        "command": f"trl-opsd train --config run.yaml --accelerate_config {best.choice.sharding}{processes}",
        "fits": best.fits,
        "verdict": verdict,
    }


def _placed(plan: Plan, load: Load) -> dict[str, Any]:
    phase, peak = plan.peak
    needed = {"peak": _gigabytes(peak), "phase": phase, "host": _gigabytes(plan.host)}
    return {**asdict(plan.choice), **needed, "gpus": load.gpus + plan.servers, "fits": plan.fits}


def _gigabytes(nbytes: float) -> float:
    return float(f"{nbytes / 1e9:.4g}")


def options(plan: Plan, student: str, teacher: str, load: Load) -> dict[str, Any]:
    """A plan as the options of `trl-opsd train`."""
    choice, dtype = plan.choice, "bfloat16" if load.half else "float32"
    found: dict[str, Any] = {
        "model_name_or_path": student,
        "dtype": dtype if load.lora else "float32",
        "per_device_train_batch_size": choice.micro,
        "gradient_accumulation_steps": load.batch // choice.micro,
        "max_completion_length": load.length,
        CHECKPOINTING: load.checkpointing,
        "bf16": load.half,
    }
    if choice.engine != TRANSFORMERS:
        found |= {"use_vllm": True, "vllm_max_model_length": load.row}
        is_apart = choice.engine == SERVER
        found |= {"vllm_mode": "server"} if is_apart else {"vllm_gpu_memory_utilization": plan.engine_share}
        found |= {"vllm_enable_sleep_mode": True} if choice.engine == ASLEEP else {}
    if load.lora:
        found |= {"use_peft": True, "lora_r": load.lora, "lora_target_modules": ["all-linear"]}
    if choice.teacher == "itself":
        return {**found, "teacher_model_kind": "base"}
    if choice.teacher == "served":
        return {**found, "teacher_server_url": f"http://127.0.0.1:{8001 if choice.engine == SERVER else 8000}"}
    loading = {"teacher_model_init_kwargs": {"dtype": dtype}, "teacher_offload": choice.teacher}
    return {**found, "teacher_model_name_or_path": teacher, **loading}
