"""Estimates memory of a device by part and phase, and seconds of a step; finds the placement that fits best."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import NamedTuple

from trl_opsd.cli.plan.shapes import Shape, traced_activations
from trl_opsd.losses.elementwise import EVERY
from trl_opsd.losses.side import STRIDE_ELEMENTS
from trl_opsd.losses.streamed import _GROUP_TILES, tile_of
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
_PHASES = ("rollout", "scoring", "training")

Parts = dict[str, int]
"""Bytes by part."""


@dataclass(frozen=True, slots=True)
class Load:
    """The load of training: rows of an optimizer step on one device, and their tokens."""

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

    def kernels(self, student: Shape) -> int:
        """Kernels that transformers launches for a token."""
        alone, adapter = student.kernels()
        return alone + adapter * (self.lora is not None)


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

    @property
    def sleeps(self) -> bool:
        """Whether an engine leaves the device while the student is trained."""
        return self.engine == ASLEEP

    def origin(self, load: Load) -> str:
        """Where the student as it was passed is kept: as a teacher in this process is, if it is a copy."""
        return "itself" if load.lora is not None else "none" if self.teacher == "served" else self.teacher


# ---- Memory, in bytes ------------------------------------------------------------------------------------------------


class States(NamedTuple):
    """Bytes of the student on one device."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    """Weights of other devices while they are used."""
    kept: int
    """Gradient buckets that are kept between backward passes."""
    reduced: int
    """Those that only a backward pass needs."""


def states(student: Shape, load: Load, sharding: str) -> States:
    """What each way of sharding keeps of a student.

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
        "single": States(frozen + 4 * trained, 4 * trained, 8 * trained, 0, 0, 0),
        "ddp": States(frozen + 4 * trained, 4 * trained, 8 * trained, 0, 4 * trained, 0),
        "fsdp2": States((frozen + 4 * trained) // gpus, 4 * trained // gpus, 8 * trained // gpus, layers, 0, units),
        "zero2": States(frozen + mixed, mixed + 4 * trained // gpus, 12 * trained // gpus, 0, 0, bucket),
        "zero3": States((frozen + mixed) // gpus, 4 * trained // gpus, 12 * trained // gpus, zero3, bucket, reduced),
        "zero3_offload": States(0, 0, 0, zero3, bucket, reduced),
    }[sharding]


def _of_teacher(teacher: Shape, kept: str, itemsize: int) -> tuple[int, int]:
    """Bytes of a teacher on the device between its forward passes, and during one."""
    whole, head = teacher.parameters, teacher.head
    idle, active = {
        "none": (whole, whole),
        "cpu": (head, whole),
        "stream": (head, head + teacher.embeddings + teacher.rest + 2 * teacher.layer),
        "zero3": (0, max(3 * teacher.layer, head)),
        "served": (head, head),
        "itself": (0, 0),
        "shared": (0, 0),
    }[kept]
    return itemsize * idle, itemsize * active


def _frozen(student: Shape, teacher: Shape, load: Load, choice: Choice) -> tuple[Parts, Parts]:
    """Bytes of models that are not trained, outside of scoring and while it takes most: one reads after the other."""
    idle, active = _of_teacher(teacher, choice.teacher, load.itemsize)
    if not load.origin:
        return {"idle teacher": idle}, {"active teacher": active}
    its_idle, its_active = _of_teacher(student, choice.origin(load), 4)
    first = {"active teacher": active, "idle origin": its_idle}
    second = {"idle teacher": idle, "active origin": its_active}
    scoring = max(first, second, key=lambda parts: sum(parts.values()))
    return {"idle teacher": idle, "idle origin": its_idle}, scoring


def phases(
    student: Shape, teacher: Shape, load: Load, choice: Choice, activations: Callable[..., int], engine: int = 0
) -> dict[str, Parts]:
    """Bytes by phase and part on one device; `engine` is what one in the same process takes while it is awake."""
    size, micro, sharding = load.itemsize, choice.micro, choice.sharding
    of_student = states(student, load, sharding)
    by_zero3, by_loop = sharding.startswith("zero3"), choice.engine == TRANSFORMERS
    # Autocast keeps copies of trained weights; frozen ones are cast anew, and DeepSpeed casts once.
    copies = student.parameters * 2 * (load.half and sharding in ("single", "ddp") and load.lora is None)
    products = ("autocast" if copies else "bfloat16") if load.half else "float32"
    whole = copies or (student.parameters * size if by_zero3 else of_student.gathered)
    sent = max(min(_SENT, size * student.parameters), copies or of_student.gathered)
    prompts = load.batch * ((load.row(student) - load.length) * student.width * size * 8 + student.vocabulary * 12)
    # The teacher's largest pass: at least one row, and what fits its budget beyond that.
    row = load.row(teacher)
    of_row = row * (teacher.half_bytes_per_token + row) * size // 2
    passes = max(of_row, min(PASS_BYTES, load.batch * of_row))
    # `teacher_cache_device='auto'` keeps a larger batch of targets in host memory.
    each = [
        load.length * one for one in [teacher.width * size] * (1 + load.contrast) + [student.width * 4] * load.origin
    ]
    targets = sum(one * (load.batch if load.batch * one <= CACHE_BYTES else micro) for one in each)
    tile, head = loss(student, teacher, micro * load.length, load)
    awake = None if choice.sleeps or not engine else engine
    seen = [
        student.images.of(load.batch, size) if by_loop else (None, None),
        teacher.images.of(passes // of_row, size),
        student.images.of(micro, size, load.checkpointing),
    ]
    idle, active = _frozen(student, teacher, load, choice)
    before = of_student.gradients if by_zero3 else None  # which never frees them
    kept = of_student.kept or None
    table: dict[str, Sequence[int | None]] = {
        "weights": [of_student.weights] * 3,
        "optimizer": [of_student.optimizer] * 3,
        **{name: [idle.get(name), active.get(name), idle.get(name)] for name in {**idle, **active}},
        "gathered or cast weights": (
            whole if by_loop else sent,
            None,
            of_student.gathered or (2 * student.head if copies else 0),
        ),
        "KV cache": (load.batch * student.cached(load.row(student)) * size if by_loop else None, None, None),
        "activations": (prompts if by_loop else None, passes, activations(micro, products)),
        "pixels": [pixels for pixels, _ in seen],
        "vision tower": [tower for _, tower in seen],
        "engine": (None if by_loop else engine, awake, awake),
        "proof": (None if by_loop else _PROBED * student.vocabulary * (size + 8), None, None),
        "targets": (None, targets, targets),
        "gradients": (before, before, of_student.gradients),
        BUCKETS: (kept, kept, of_student.kept + of_student.reduced),
        "loss tile": (None, None, tile),
        "gradient of the head": (None, None, head),
    }
    columns = zip(*table.values(), strict=True)
    return {
        phase: {part: size for part, size in zip(table, column, strict=True) if size is not None}
        for phase, column in zip(_PHASES, columns, strict=True)
    }


def _tiles(student: Shape, teacher: Shape, tokens: int, load: Load) -> tuple[int, int]:
    """Tokens whose logits the loss forms at once, and bytes of their tiles.

    One tile for student, teacher and contrast each; with an anchor one of its origin, and a copy of the student's.
    """
    tiles = 2 + load.contrast + 2 * load.origin
    stride = -(-min(student.vocabulary, teacher.vocabulary) // STRIDE_ELEMENTS) * STRIDE_ELEMENTS
    group = _GROUP_TILES * load.itemsize if load.half else 0
    tile = tile_of(tokens, stride * (4 * tiles + group), load.memory)
    of_group = min(tokens, tile * _GROUP_TILES)
    rounded = of_group * load.itemsize if load.half else 0
    return tile, stride * (tile * 4 * tiles + rounded + -(-of_group // EVERY) * 8)


def loss_tile(student: Shape, teacher: Shape, tokens: int, load: Load) -> int:
    """Tokens whose logits the loss forms at once, of `tokens` in a micro-batch."""
    return _tiles(student, teacher, tokens, load)[0]


def loss(student: Shape, teacher: Shape, tokens: int, load: Load) -> tuple[int, int]:
    """Bytes of logit tiles and of float32 gradients of head and hidden states, for `tokens` in a micro-batch."""
    of_head = 4 * student.head * (load.lora is None)
    return _tiles(student, teacher, tokens, load)[1], of_head + 4 * tokens * student.width


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
    if choice.sleeps and load.lora:
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


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of a device, per second.

    The defaults are 40 % of the 989 dense bfloat16 TFLOP/s and 60 % of the 3.35 TB/s in NVIDIA's data sheet of the H100
    SXM, and half of what PCIe 5 x16 can carry.
    """

    flops: float = 400e12
    memory: float = 2000e9
    """Bytes read from the device's memory."""
    link: float = 32e9
    """Bytes from the host's memory to the device."""
    launch: float = 15e-6
    """Seconds of host time for each kernel of an eager decoding step: between 7.6 microseconds measured on a CPU, which
    has no driver to call, and about 27 of the eager model with 32 layers and 25.5 tokens per second on an A100 in
    pytorch.org/blog/accelerating-generative-ai-2."""
    engine: float = 3e-3
    """Seconds of each step of an engine besides that traffic, for scheduler, graphs and sampler: an assumption."""


def seconds(student: Shape, teacher: Shape, load: Load, choice: Choice, rates: Rates) -> dict[str, float]:
    """By phase, on one device; devices work concurrently. Traffic between devices is not counted.

    Completions are generated token by token: each step reads all weights once, and the keys and values so far. With
    transformers the device waits for a Python loop where that takes longer; an engine adds `Rates.engine`. A forward
    pass takes 2 operations for each weight and token, training 6, or 4 where the weights are frozen, and 2 more with
    gradient checkpointing. Layers of a teacher are fetched while others compute.
    """
    size, rows, row, weights = load.itemsize, load.batch, load.row(student), student.parameters
    prompt, contexts = row - load.length, 1 + load.contrast
    cached = rows * student.cached(prompt + load.length // 2)
    traffic, looping = size * (weights + cached) / rates.memory, load.kernels(student) * rates.launch
    of_token = max(traffic, looping) if choice.engine == TRANSFORMERS else traffic + rates.engine
    passes = (6 if load.lora is None else 4) + 2 * load.checkpointing
    heads = 2 * rows * load.length * ((3 + load.origin) * student.head + contexts * teacher.head)
    reading = 2 * rows * (teacher.parameters * load.row(teacher) * contexts + weights * row * load.origin)
    moved = size * teacher.parameters * (choice.teacher in ("cpu", "stream"))
    moved += 4 * weights * (load.origin and choice.origin(load) in ("cpu", "stream"))
    return {
        "rollout": 2 * weights * rows * prompt / rates.flops + load.length * of_token,
        "scoring": max(reading / rates.flops, moved / rates.link),
        "training": (passes * weights * rows * row + heads) / rates.flops,
    }


# ---- Placements ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """A placement, the memory it needs, and whether that is available."""

    choice: Choice
    phases: dict[str, Parts]
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
    memory: float,
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
    share = round(math.ceil(engine_bytes(student, load) / memory / _STEP) * _STEP, 2) if engine == "vllm" else 0.0

    def plan(choice: Choice, activations: Callable[..., int]) -> Plan:
        needed = host_bytes(student, teacher, load, choice)
        parts = phases(student, teacher, load, choice, activations, int(share * memory))
        served = [teacher] * (choice.teacher == "served") + [student] * (choice.engine == SERVER)
        # A power of two for each server, as tensor parallelism divides heads.
        devices = (math.ceil(math.log2(max(engine_bytes(one, load) / (SHARE * memory), 1))) for one in served)
        made = Plan(choice, parts, needed, host is None or needed <= SHARE * host, share, sum(1 << n for n in devices))
        return made if made.peak[1] <= SHARE * memory else replace(made, fits=False)

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
