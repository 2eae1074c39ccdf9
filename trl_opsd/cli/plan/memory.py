"""Estimates memory of a device by part and phase, and seconds of a step; finds the placement that fits best."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from trl_opsd.cli.plan.shapes import Shape, traced_activations
from trl_opsd.losses.streamed import tile_of
from trl_opsd.teacher.frozen import PASS_BYTES
from trl_opsd.types.targets import CACHE_BYTES

BUCKETS = "gradient buckets"
_BUCKET, _LIVE = 500_000_000, 1_000_000_000
"""Defaults of DeepSpeed, in numbers: `reduce_bucket_size`, and `stage3_max_live_parameters`, up to which weights stay
gathered for the backward pass."""
_BATCHED_TOKENS, _OWN = 4096, 2_000_000_000
"""Of an engine: maximum tokens in a forward pass, and bytes of CUDA graphs and workspace, an assumption."""
_SENT, _PROBED = 256_000_000, 2 * 80
"""Bytes of weights gathered at once to be sent to it, and tokens that a student reads to prove that they arrived."""
TRANSFORMERS, AWAKE, ASLEEP, SERVER = "transformers", "vllm", "vllm, sleeping", "server"
"""What generates: transformers, vLLM in the same process, without and with sleep mode, or a server."""
ENGINES = {"transformers": (TRANSFORMERS,), "vllm": (AWAKE, ASLEEP), "server": (SERVER,)}
"""What may generate, by its name on the command line; of several the first that fits."""
SHARE = 0.9
"""Share of a device that may be used; the rest is for the CUDA context, buffers and fragmentation."""
_STEP = 0.05
"""Granularity of an engine's share of a device."""
_LINK = 32e9
"""Bytes per second from the host's memory to the device: half of what PCIe 5 x16 can carry."""
_KERNELS, _OF_ADAPTER, _LAUNCH = 52, 49, 15e-6
"""Kernels of a decoding step in a layer of Qwen2, what LoRA adds to them, and seconds of host time of each in an eager
step: between 7.6 microseconds measured on a CPU, which has no driver to call, and about 27 of the eager model with 32
layers and 25.5 tokens per second on an A100 in pytorch.org/blog/accelerating-generative-ai-2."""
_TOKEN = 3e-3
"""Seconds of each step of an engine besides reading memory, for scheduler, graphs and sampler: an assumption."""


@dataclass(frozen=True, slots=True)
class Load:
    """The load of training: rows of an optimizer step on one device, their tokens, and what the device can do."""

    gpus: int
    batch: int
    prompt: int
    """Tokens of its text."""
    length: int
    half: bool
    checkpointing: bool
    lora: int | None = None
    """Rank of an adapter on all linear layers; `None` where all weights are trained."""
    memory: int = 0
    """Bytes of a device, which determine the tiles of the loss; 0 for a CPU."""
    origin: bool = False
    """Whether the loss also reads the student as it was passed: without an adapter a copy in float32."""
    contrast: bool = False
    """Whether the teacher also reads a contrast, with a bound of its push."""
    flops: float = 400e12
    """Per second: 40 % of the dense bfloat16 products in NVIDIA's data sheet of the H100 SXM."""
    bandwidth: float = 2000e9
    """Bytes per second from the device's memory: 60 % of what that states."""

    @property
    def itemsize(self) -> int:
        """Bytes of a number in products, and in a teacher's weights and states."""
        return 2 if self.half else 4

    def row(self, shape: Shape) -> int:
        """Tokens of a row of a model, with those of its images."""
        return self.prompt + shape.images.tokens + self.length

    def trained(self, student: Shape) -> int:
        """Parameters that are trained."""
        return student.parameters if self.lora is None else self.lora * student.linear


@dataclass(frozen=True, slots=True)
class Choice:
    """A placement."""

    sharding: str
    """`"single"`, `"ddp"`, `"zero2"`, `"zero3"`, `"fsdp2"` or `"zero3_offload"`: the name of an accelerate file."""
    teacher: str
    """A value of `teacher_offload`, `"served"`, `"itself"`: the student without its adapter, or `"shared"`: with one
    of its own."""
    micro: int
    """Rows of a micro-batch."""
    engine: str = TRANSFORMERS
    """What generates."""

    def origin(self, load: Load) -> str:
        """Where the student as it was passed is kept: as a teacher in this process is, if it is a copy."""
        return "itself" if load.lora is not None else "none" if self.teacher == "served" else self.teacher


# ---- Memory, in bytes ------------------------------------------------------------------------------------------------


def states(student: Shape, load: Load, sharding: str) -> tuple[int, int, int, int, int, int]:
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
        "shared": (0, 0),
    }[kept]
    return itemsize * idle, itemsize * active


def phases(
    student: Shape, teacher: Shape, load: Load, choice: Choice, activations: Callable[..., int], engine: int = 0
) -> dict[str, dict[str, int]]:
    """Bytes by phase and part on one device; `engine` is what one in the same process takes while it is awake."""
    size, micro, sharding = load.itemsize, choice.micro, choice.sharding
    weights, gradients, optimizer, gathered, kept, reduced = states(student, load, sharding)
    by_zero3, by_loop = sharding.startswith("zero3"), choice.engine == TRANSFORMERS
    # Autocast keeps copies of trained weights; frozen ones are cast anew, and DeepSpeed casts once.
    copies = student.parameters * 2 * (load.half and sharding in ("single", "ddp") and load.lora is None)
    products = ("autocast" if copies else "bfloat16") if load.half else "float32"
    # The teacher's largest pass: at least one row, and what fits its budget beyond that.
    row = load.row(teacher)
    of_row = row * (teacher.half_bytes_per_token + row) * size // 2
    passes = max(of_row, min(PASS_BYTES, load.batch * of_row))
    # `teacher_cache_device='auto'` keeps a larger batch of targets in host memory.
    each = [teacher.width * size] * (1 + load.contrast) + [student.width * 4] * load.origin
    targets = sum(
        load.length * one * (load.batch if load.batch * load.length * one <= CACHE_BYTES else micro) for one in each
    )
    tile, head = loss(student, teacher, micro * load.length, load)
    # Models that are not trained read one after the other, so the others are idle meanwhile.
    frozen = {"teacher": _of_frozen(teacher, choice.teacher, size)}
    if load.origin:
        frozen["origin"] = _of_frozen(student, choice.origin(load), 4)
    idle = {f"idle {name}": resting for name, (resting, _) in frozen.items()}
    reads = max(frozen, key=lambda name: frozen[name][1] - frozen[name][0])
    scoring = {**idle, f"idle {reads}": 0, f"active {reads}": frozen[reads][1]}
    always = {"weights": weights, "optimizer": optimizer}
    if by_loop:
        whole = copies or (student.parameters * size if by_zero3 else gathered)
        generates = {
            "gathered or cast weights": whole,
            "KV cache": load.batch * student.cached(load.row(student)) * size,
            "activations": load.batch
            * ((load.row(student) - load.length) * student.width * size * 8 + student.vocabulary * 12),
            **student.images.of(load.batch, size),
        }
    else:
        sent = max(min(_SENT, size * student.parameters), copies or gathered)
        proof = _PROBED * student.vocabulary * (size + 8)
        generates = {"gathered or cast weights": sent, "engine": engine, "proof": proof}
    awake = {} if choice.engine == ASLEEP else {"engine": engine}
    before = {"gradients": gradients * by_zero3, BUCKETS: kept}  # ZeRO-3 never frees the first
    found = {
        "rollout": {**always, **idle, **generates, **before},
        "scoring": {
            **always,
            **scoring,
            "activations": passes,
            **teacher.images.of(passes // of_row, size),
            **awake,
            "targets": targets,
            **before,
        },
        "training": {
            **always,
            **idle,
            "gathered or cast weights": gathered or (2 * student.head if copies else 0),
            "activations": activations(micro, products),
            **student.images.of(micro, size, load.checkpointing),
            **awake,
            "targets": targets,
            "gradients": gradients,
            BUCKETS: kept + reduced,
            "loss tile": tile,
            "gradient of the head": head,
        },
    }
    return {phase: {part: int(size) for part, size in parts.items() if size} for phase, parts in found.items()}


def loss_tile(student: Shape, teacher: Shape, tokens: int, load: Load) -> tuple[int, int]:
    """Tokens whose logits the loss forms at once, of `tokens` in a micro-batch, and bytes of them.

    One tile for student, teacher and contrast each; with an anchor one of its origin, and a copy of the student's. In
    half precision four are collected for the gradient of the head; the vocabulary is ranked at every 16th token.
    """
    vocabulary, tiles = min(student.vocabulary, teacher.vocabulary), 2 + load.contrast + 2 * load.origin
    tile = tile_of(tokens, vocabulary * (4 * tiles + 8 * load.half), load.memory)
    group = min(tokens, 4 * tile)
    return tile, vocabulary * (4 * tiles * tile + 2 * load.half * group + group // 2)


def loss(student: Shape, teacher: Shape, tokens: int, load: Load) -> tuple[int, int]:
    """Bytes of logit tiles and of float32 gradients of head and hidden states, for `tokens` in a micro-batch."""
    head = 4 * student.head * (load.lora is None)
    return loss_tile(student, teacher, tokens, load)[1], head + 4 * tokens * student.width


def engine_bytes(student: Shape, load: Load) -> int:
    """Memory of an engine in the same process that generates all rows at once: weights, keys and values, activations.

    It computes in half precision or float32, as products are computed, and keeps the rows of a step at their full
    length.
    """
    of_token = student.half_bytes_per_token * load.itemsize // 2
    held = load.itemsize * (student.parameters + load.batch * student.cached(load.row(student)))
    return held + _BATCHED_TOKENS * of_token + load.batch * student.vocabulary * 12 + _OWN


def host_bytes(student: Shape, teacher: Shape, load: Load, choice: Choice) -> int:
    """Host memory of a machine with all devices: what its processes offload.

    DeepSpeed pins each process's part of each tensor, for which torch takes a power of two of bytes. Pixels of a step
    and the next are pinned there, too; models that read images alike share them, and so do the completions of a prompt.
    """
    gpus, size, trained = load.gpus, load.itemsize, load.trained(student)
    held = 2 * gpus * load.batch * sum(map(_pinned, {one.pixels for one in {student.images, teacher.images}}))
    frozen = [(teacher, choice.teacher, size)] + [(student, choice.origin(load), 4)] * load.origin
    for model, kept, itemsize in frozen:
        if kept in ("cpu", "stream"):
            held += itemsize * model.parameters * gpus
        elif kept == "zero3":
            held += gpus * sum(_pinned(itemsize * -(-numbers // gpus)) for numbers in model.tensors)
    if choice.engine == ASLEEP and load.lora:
        held += size * student.parameters * gpus
    if choice.sharding == "zero3_offload":
        # In float32: weights, Adam's moments, and gradients twice, as they are added up and as Adam takes them.
        held += size * (student.parameters + trained * (load.lora is not None)) + 20 * trained
    return held


def _pinned(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def tracer(student: Shape, load: Load) -> Callable[[int, str], int]:
    """Activations by rows and products, each traced once."""
    tokens = load.row(student)
    return cache(lambda rows, products: traced_activations(student.config, rows, tokens, products, load.checkpointing))


# ---- Seconds ---------------------------------------------------------------------------------------------------------


def seconds(student: Shape, teacher: Shape, load: Load, choice: Choice) -> dict[str, float]:
    """By phase, on one device; devices work concurrently. Traffic between devices is not counted.

    Completions are generated token by token: each step reads all weights once, and the keys and values so far. With
    transformers the device waits for a Python loop where that takes longer; an engine adds `_TOKEN`. A forward pass
    takes 2 operations for each weight and token, training 6, or 4 where the weights are frozen, and 2 more with
    gradient checkpointing. Layers of a teacher are fetched while others compute.
    """
    size, rows, row, weights = load.itemsize, load.batch, load.row(student), student.parameters
    prompt, contexts = row - load.length, 1 + load.contrast
    cached = rows * student.cached(prompt + load.length // 2)
    traffic = size * (weights + cached) / load.bandwidth
    looping = student.layers * (_KERNELS + _OF_ADAPTER * (load.lora is not None)) * _LAUNCH
    of_token = max(traffic, looping) if choice.engine == TRANSFORMERS else traffic + _TOKEN
    passes = (6 if load.lora is None else 4) + 2 * load.checkpointing
    heads = 2 * rows * load.length * ((3 + load.origin) * student.head + contexts * teacher.head)
    reading = 2 * rows * (teacher.parameters * load.row(teacher) * contexts + weights * row * load.origin)
    moved = size * teacher.parameters * (choice.teacher in ("cpu", "stream"))
    moved += 4 * weights * (load.origin and choice.origin(load) in ("cpu", "stream"))
    return {
        "rollout": 2 * weights * rows * prompt / load.flops + load.length * of_token,
        "scoring": max(reading / load.flops, moved / _LINK),
        "training": (passes * weights * rows * row + heads) / load.flops,
    }


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
    share = round(math.ceil(engine_bytes(student, load) / load.memory / _STEP) * _STEP, 2) if engine == "vllm" else 0.0
    usable = SHARE * load.memory

    def plan(choice: Choice, activations: Callable[..., int]) -> Plan:
        needed = host_bytes(student, teacher, load, choice)
        parts = phases(student, teacher, load, choice, activations, int(share * load.memory))
        served = [teacher] * (choice.teacher == "served") + [student] * (choice.engine == SERVER)
        # A power of two for each server, as tensor parallelism divides heads.
        devices = (math.ceil(math.log2(max(engine_bytes(one, load) / usable, 1))) for one in served)
        made = Plan(choice, parts, needed, host is None or needed <= SHARE * host, share, sum(1 << n for n in devices))
        return made if made.peak[1] <= usable else replace(made, fits=False)

    teachers = places or ["none", *["zero3"] * (load.gpus > 1), "cpu", "stream", "served"]
    shardings = ["single"] if load.gpus == 1 else ["ddp", "zero2", "zero3", "fsdp2"]  # those with less traffic first
    found = []
    # On the devices, then in host memory once for all processes, then a copy for each.
    for kept, sharding in [*product(teachers, shardings), *product(teachers, ["zero3_offload"] * (host is not None))]:
        if sharding not in {"zero3": ("zero3", "zero3_offload"), "shared": ("single", "ddp")}.get(kept, (sharding,)):
            continue
        rows = [rows for rows in range(load.batch, 0, -1) if load.batch % rows == 0]
        for choice in (Choice(sharding, kept, micro, generates) for generates in ENGINES[engine] for micro in rows):
            last = plan(choice, lambda *_: 0)
            if last.fits and (last := plan(choice, activations)).fits:  # a trace takes seconds
                break
        found.append(last)
    return sorted(found, key=lambda one: (not one.fits, one.choice.teacher == "served", not one.fits and one.peak[1]))
