"""Estimates memory of a device by part and phase, and seconds of a step; finds the placement that fits best."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from trl_opsd.cli.plan.shapes import Shape, traced_activations
from trl_opsd.losses.byte_ranges import _POSITION_BYTES, _RANGE_BYTES
from trl_opsd.losses.elementwise import EVERY
from trl_opsd.losses.streamed import _GROUP_TILES, _STRIDE_ELEMENTS, tile_of
from trl_opsd.teacher.bytewise import _ROWS
from trl_opsd.teacher.frozen import PASS_BYTES
from trl_opsd.types.bytewise import BACK, OUTCOMES
from trl_opsd.types.targets import CACHE_BYTES

BUCKETS = "gradient buckets"
_BUCKET, _LIVE = 500_000_000, 1_000_000_000
"""Defaults of DeepSpeed, in numbers: `reduce_bucket_size`, and `stage3_max_live_parameters`, up to which weights stay
gathered for the backward pass."""

_BATCHED_TOKENS, _OWN = 4096, 2_000_000_000
"""Of an engine: maximum tokens in a forward pass, and bytes of CUDA graphs and workspace, an assumption."""
_SENT = 256_000_000
"""Bytes of weights that are gathered at once to be sent to it."""
_PROBED = 2 * 80
"""Tokens that a student reads to prove that they arrived."""
_RANGES, _BYTES = 310, 4.4
"""Ranges of a sorted vocabulary, and bytes of text, of a token of Qwen2.5 on average."""

Parts = dict[str, int]
"""Bytes by part."""

TRANSFORMERS, AWAKE, ASLEEP, SERVER = "transformers", "vllm", "vllm, sleeping", "server"
"""What generates: transformers, vLLM in the same process, without and with sleep mode, or a server."""

SHARE = 0.9
"""Share of a device that may be used; the rest is for the CUDA context, buffers and fragmentation."""

ENGINES = {"transformers": (TRANSFORMERS,), "vllm": (AWAKE, ASLEEP), "server": (SERVER,)}
"""What may generate, by its name on the command line, those with less traffic first."""
_STEP = 0.05
"""Granularity of an engine's share of a device."""


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
    by_bytes: bool = False
    """Whether the teacher has a tokenizer of its own."""

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
    """A value of `teacher_offload`, `"served"`, or `"itself"`: the student without its adapter."""
    micro: int
    """Rows of a micro-batch."""
    engine: str = TRANSFORMERS
    """What generates."""

    @property
    def sleeps(self) -> bool:
        """Whether an engine leaves the device while the student is trained."""
        return self.engine == ASLEEP


def phases(
    student: Shape, teacher: Shape, load: Load, choice: Choice, activations: Callable[..., int], engine: int = 0
) -> dict[str, Parts]:
    """Bytes by phase and part on one device; `engine` is what one in the same process takes while it is awake."""
    weights, gradients, optimizer, gathered = states(student, load, choice)
    row, itemsize = load.row(student), load.itemsize
    between = {"idle teacher": resident(teacher, choice.teacher, itemsize)}
    active = {"active teacher": reading(teacher, choice.teacher, itemsize)}
    if load.origin:  # one reads after the other
        idle = {"idle origin": resident(student, kept_as := _of_origin(load, choice), 4)}
        second = {**between, "active origin": reading(student, kept_as, 4)}
        active, between = max(active | idle, second, key=lambda parts: sum(parts.values())), between | idle
    always = {"weights": weights, "optimizer": optimizer}
    kept, reduced = buckets(student, load, choice.sharding)
    by_zero3 = choice.sharding.startswith("zero3")
    if by_zero3:  # which never frees them
        always |= {"gradients": gradients}
    if kept:
        always |= {BUCKETS: kept}
    whole = choice.sharding in ("single", "ddp")
    # Autocast keeps copies of trained weights; frozen ones are cast anew, and DeepSpeed casts once.
    copies = student.parameters * 2 if load.half and whole and load.lora is None else 0
    # `teacher_cache_device='auto'` keeps a larger batch of targets in host memory.
    of_token = int(_BYTES * 4 * OUTCOMES) if load.by_bytes else teacher.width * itemsize
    each = [of_token] * (1 + load.contrast) + [student.width * 4] * load.origin
    kept_rows = [load.batch if load.batch * load.length * size <= CACHE_BYTES else choice.micro for size in each]
    targets = {"targets": sum(rows * load.length * size for rows, size in zip(kept_rows, each, strict=True))}
    awake = {} if choice.sleeps or not engine else {"engine": engine}
    writing = {
        "gathered or cast weights": copies or (student.parameters * itemsize if by_zero3 else gathered),
        "KV cache": load.batch * student.cached(row) * itemsize,
        "activations": load.batch * ((row - load.length) * student.width * itemsize * 8 + student.vocabulary * 12),
        **seen(student, load.batch, load),
    }
    if choice.engine != TRANSFORMERS:  # weights are sent to it in buckets, and proved by a pass of the student
        sent = min(_SENT, itemsize * student.parameters)
        proof = _PROBED * student.vocabulary * (itemsize + 8)
        writing = {"gathered or cast weights": max(sent, copies or gathered), "engine": engine, "proof": proof}
    rollout = {**always, **between, **writing}
    teach = {
        **always,
        **awake,
        **active,
        **passes(teacher, load),
        **targets,
    }
    if load.by_bytes:
        tokens = min(load.batch, _ROWS) * load.length
        teach["byte ranges"] = byte_ranges(teacher, tokens, load)[1] + tokens * teacher.width * itemsize
    products = ("autocast" if copies else "bfloat16") if load.half else "float32"
    tile, head = loss(student, teacher, choice.micro * load.length, load)
    learn = {
        **always,
        **awake,
        "gradients": gradients,
        "gathered or cast weights": gathered or (2 * student.head if copies else 0),
        BUCKETS: kept + reduced,
        **between,
        "activations": activations(choice.micro, products),
        **seen(student, choice.micro, load, load.checkpointing),
        "loss tile": tile,
        "gradient of the head": head,
        **targets,
    }
    return {"rollout": rollout, "scoring": teach, "training": learn}


def _of_origin(load: Load, choice: Choice) -> str:
    """Where the student as it was passed is kept: as a teacher in this process is, if it is a copy."""
    return "itself" if load.lora is not None else "none" if choice.teacher == "served" else choice.teacher


def states(student: Shape, load: Load, choice: Choice) -> tuple[int, int, int, int]:
    """Weights, gradients, optimizer and gathered weights of the student, in bytes.

    An adapter is trained in float32, on weights that are frozen in half precision. DeepSpeed keeps weights in the dtype
    of products, gradients in that and in float32, and float32 weights and Adam's moments in its optimizer. FSDP2
    divides what a single process has, and gathers a layer while it computes and the one after it, and the head until
    the backward pass has ended.
    """
    count, gpus, trained = student.parameters, load.gpus, load.trained(student)
    frozen = (2 if load.half else 4) * (count if load.lora else 0)
    if choice.sharding in ("single", "ddp"):
        return frozen + 4 * trained, 4 * trained, 8 * trained, 0
    if choice.sharding == "fsdp2":
        gathered = load.itemsize * (2 * student.layer + student.head)
        return (frozen + 4 * trained) // gpus, 4 * trained // gpus, 8 * trained // gpus, gathered
    working = load.itemsize * trained
    if choice.sharding == "zero2":
        return frozen + working, working + 4 * trained // gpus, 12 * trained // gpus, 0
    gathered = load.itemsize * min(count, _LIVE + max(student.layer, student.head))
    if choice.sharding == "zero3":
        return (frozen + working) // gpus, 4 * trained // gpus, 12 * trained // gpus, gathered
    return 0, 0, 0, gathered


def buckets(student: Shape, load: Load, sharding: str) -> tuple[int, int]:
    """Bytes of gradient buckets: those that DDP and ZeRO-3 keep, and those that only a backward pass needs.

    FSDP2 keeps none: it has the head's gradient until the backward pass ends, that of one more unit, and a float32
    copy to reduce.
    """
    trained = load.trained(student)
    if sharding == "ddp":
        return 4 * trained, 0
    if sharding == "zero2":
        return 0, load.itemsize * _BUCKET
    if sharding == "fsdp2":
        unit = min(trained, max(student.layer, student.head, student.embeddings))
        of_head = load.itemsize * student.head if load.lora is None else 0
        return 0, of_head + (load.itemsize + 4) * unit + 4 * unit // load.gpus
    if not sharding.startswith("zero3"):
        return 0, 0
    # A copy in the order of the processes, and the share of it that this one receives.
    reduced = load.itemsize * min(trained, _BUCKET)
    return load.itemsize * _BUCKET, reduced + reduced // load.gpus


def resident(teacher: Shape, kept: str, itemsize: int) -> int:
    """Bytes of a teacher that stay on the device between forward passes."""
    return {"none": itemsize * teacher.parameters, "zero3": 0, "itself": 0}.get(kept, itemsize * teacher.head)


def reading(teacher: Shape, kept: str, itemsize: int) -> int:
    """Bytes of a teacher on the device during a forward pass."""
    numbers = {
        "stream": teacher.head + teacher.embeddings + teacher.rest + 2 * teacher.layer,
        "itself": 0,
        "zero3": max(3 * teacher.layer, teacher.head),
        "served": teacher.head,
    }
    return itemsize * numbers.get(kept, teacher.parameters)


def passes(teacher: Shape, load: Load) -> Parts:
    """Activations of the teacher's largest pass: at least one row, and what fits its budget beyond that."""
    row = load.row(teacher)
    of_row = row * (teacher.half_bytes_per_token + row) * load.itemsize // 2
    found = max(of_row, min(PASS_BYTES, load.batch * of_row))
    return {"activations": found, **seen(teacher, found // of_row, load)}


def seen(shape: Shape, rows: int, load: Load, checkpointing: bool | None = None) -> Parts:
    """What images of these rows take in a pass; with a graph (`checkpointing` is not `None`) the tower is trained.

    A LoRA adapter on all linear layers is on the tower's, too.
    """
    of_tower = shape.images.activations(load.itemsize, checkpointing)
    return {"pixels": rows * shape.images.pixels, "vision tower": rows * of_tower} if shape.images.positions else {}


def loss(student: Shape, teacher: Shape, tokens: int, load: Load) -> tuple[int, int]:
    """Bytes of logit tiles and of float32 gradients of head and hidden states, for `tokens` in a micro-batch."""
    itemsize, learns_head = load.itemsize, load.lora is None
    if load.by_bytes:
        of_head = (4 * student.head + 256 * student.vocabulary) * learns_head
        return byte_ranges(student, tokens, load)[1], of_head + 8 * tokens * student.width
    tile, stride = loss_tile(student, teacher, tokens, load), _stride(student, teacher)
    group = min(tokens, tile * _GROUP_TILES) * stride * itemsize if itemsize < 4 else 0
    ranked = -(-min(tokens, tile * _GROUP_TILES) // EVERY) * stride * 8
    return tile * stride * 4 * _tiles(load) + group + ranked, 4 * (student.head * learns_head + tokens * student.width)


def byte_ranges(shape: Shape, tokens: int, load: Load) -> tuple[int, int]:
    """Tokens of a tile of distributions over bytes, and its bytes with the sorted head."""
    stride = -(-shape.vocabulary // _STRIDE_ELEMENTS) * _STRIDE_ELEMENTS
    group = _GROUP_TILES * load.itemsize if load.itemsize < 4 else 0
    of_token = stride * (4 + group) + int(_RANGES * _RANGE_BYTES + _BYTES * _POSITION_BYTES)
    tile = tile_of(tokens, of_token, load.memory)
    return tile, (tile + BACK) * of_token + load.itemsize * shape.head


def loss_tile(student: Shape, teacher: Shape, tokens: int, load: Load) -> int:
    """Tokens whose logits the loss forms at once, of `tokens` in a micro-batch."""
    if load.by_bytes:
        return byte_ranges(student, tokens, load)[0]
    group = _GROUP_TILES * load.itemsize if load.itemsize < 4 else 0
    of_token = _stride(student, teacher) * (4 * _tiles(load) + group)
    return tile_of(tokens, of_token, load.memory)


def _tiles(load: Load) -> int:
    """Tiles of logits: of student and teacher, of a contrast, and with an anchor of its origin, and a copy of the
    student's.
    """
    return 2 + load.contrast + 2 * load.origin


def _stride(student: Shape, teacher: Shape) -> int:
    """Logits of a token, padding included."""
    return -(-min(student.vocabulary, teacher.vocabulary) // _STRIDE_ELEMENTS) * _STRIDE_ELEMENTS


def engine_bytes(student: Shape, load: Load) -> int:
    """Memory of an engine in the same process that generates all rows at once: weights, keys and values, activations.

    It computes in half precision or float32, as products are computed, and keeps the rows of a step at their full
    length.
    """
    row, itemsize = load.row(student), load.itemsize
    of_token = student.half_bytes_per_token * itemsize // 2
    logits = load.batch * student.vocabulary * 12
    held = itemsize * student.parameters + load.batch * student.cached(row) * itemsize
    return held + _BATCHED_TOKENS * of_token + logits + _OWN


def of_servers(student: Shape, teacher: Shape, load: Load, choice: Choice, memory: float) -> int:
    """Devices that the servers of a placement need: each a power of two, as tensor parallelism divides heads."""
    served = [teacher] * (choice.teacher == "served") + [student] * (choice.engine == SERVER)
    return sum(1 << math.ceil(math.log2(max(engine_bytes(one, load) / (SHARE * memory), 1))) for one in served)


def host_bytes(student: Shape, teacher: Shape, load: Load, choice: Choice) -> int:
    """Host memory of a machine with all devices: what its processes offload.

    DeepSpeed pins each process's part of each tensor, for which torch takes a power of two of bytes. Pixels of a step
    and the next are pinned there, too; models that read images alike share them, and so do the completions of a prompt.
    """
    each = (images.pixels for images in {student.images, teacher.images} if images.pixels)
    pixels = 2 * load.gpus * load.batch * sum(1 << (one - 1).bit_length() for one in each)
    of_teacher = _offloaded(teacher, choice.teacher, load.itemsize, load.gpus)
    if load.origin:
        of_teacher += _offloaded(student, _of_origin(load, choice), 4, load.gpus)
    of_engine = load.itemsize * student.parameters * load.gpus if choice.sleeps and load.lora else 0
    if choice.sharding != "zero3_offload":
        return of_teacher + of_engine + pixels
    trained = load.trained(student)
    weights = load.itemsize * (student.parameters + (0 if load.lora is None else trained))
    # In float32: weights, Adam's moments, and gradients twice, as they are added up and as Adam takes them.
    return of_teacher + of_engine + pixels + weights + 20 * trained


def _offloaded(teacher: Shape, kept: str, itemsize: int, gpus: int) -> int:
    parts = (itemsize * -(-numbers // gpus) for numbers in teacher.tensors)
    pinned = gpus * sum(1 << (nbytes - 1).bit_length() for nbytes in parts)
    whole = itemsize * teacher.parameters * gpus
    return {"cpu": whole, "stream": whole, "zero3": pinned}.get(kept, 0)


def tracer(student: Shape, load: Load) -> Callable[[int, str], int]:
    """Activations by rows and products, each traced once."""
    tokens = load.row(student)
    return cache(lambda rows, products: traced_activations(student.config, rows, tokens, products, load.checkpointing))


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


def seconds(student: Shape, teacher: Shape, load: Load, choice: Choice, rates: Rates) -> dict[str, float]:
    """By phase, on one device; devices work concurrently. Traffic between devices is not counted.

    Completions are generated token by token: each step reads all weights once, and the keys and values so far. With
    transformers the device waits for a Python loop where that takes longer; engines replay CUDA graphs. A forward pass
    takes 2 operations for each weight and token, training 6, or 4 where the weights are frozen, and 2 more with
    gradient checkpointing.
    """
    itemsize, rows = load.itemsize, load.batch
    row = load.row(student)
    prompt = row - load.length
    cache = rows * student.cached(prompt + load.length // 2) * itemsize
    looping = load.kernels(student) * rates.launch if choice.engine == TRANSFORMERS else 0.0
    writing = load.length * max((itemsize * student.parameters + cache) / rates.memory, looping)
    passes = (6 if load.lora is None else 4) + (2 if load.checkpointing else 0)
    heads = 2 * rows * load.length * (3 * student.head + (1 + load.contrast) * teacher.head)
    moved = itemsize * teacher.parameters if choice.teacher in ("cpu", "stream") else 0
    reading = 2 * teacher.parameters * rows * load.row(teacher) * (1 + load.contrast) / rates.flops
    if load.origin:
        heads += 2 * rows * load.length * student.head
        moved += 4 * student.parameters if _of_origin(load, choice) in ("cpu", "stream") else 0
        reading += 2 * student.parameters * rows * row / rates.flops
    return {
        "rollout": 2 * student.parameters * rows * prompt / rates.flops + writing,
        "scoring": max(reading, moved / rates.link),  # layers are fetched while others compute
        "training": (passes * student.parameters * rows * row + heads) / rates.flops,
    }


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
        name = max(self.phases, key=lambda phase: sum(self.phases[phase].values()))
        return name, sum(self.phases[name].values())

    @property
    def largest(self) -> tuple[str, int]:
        """The largest part of that phase."""
        parts = self.phases[self.peak[0]]
        name = max(parts, key=lambda part: parts[part])
        return name, parts[name]


def _placements(load: Load, host: float | None, shares_weights: bool) -> Iterator[tuple[str, str]]:
    """All placements, those with less traffic first; offloading the student needs a known `host` memory in bytes."""
    shardings = ["single"] if load.gpus == 1 else ["ddp", "zero2", "zero3", "fsdp2"]
    for sharding in [*shardings, *(["zero3_offload"] if host is not None else [])]:
        kept = ["none", "cpu", "stream", *(["zero3"] if sharding.startswith("zero3") else []), "served"]
        yield from ((sharding, teacher) for teacher in (["itself"] if shares_weights else kept))


def considered(
    student: Shape,
    teacher: Shape,
    load: Load,
    memory: float,
    host: float | None,
    activations: Callable[..., int],
    shares_weights: bool = False,
    engine: str = "transformers",
) -> list[Plan]:
    """A plan for each placement, with the largest micro-batch that fits, or that of one row.

    One that does not fit without the student's activations in training is left without them.
    """
    # Of a device, for an engine in the same process: a multiple of `_STEP`, or more than 1 if it does not fit.
    share = math.ceil(engine_bytes(student, load) / memory / _STEP) * _STEP if engine == "vllm" else 0.0
    share = round(share, 2)

    def plan(choice: Choice, activations: Callable[..., int]) -> Plan:
        needed = host_bytes(student, teacher, load, choice)
        parts = phases(student, teacher, load, choice, activations, int(share * memory))
        peak = max(sum(of_phase.values()) for of_phase in parts.values())
        # An unknown host memory is taken as enough for an offloaded teacher.
        fits = peak <= SHARE * memory and (host is None or needed <= SHARE * host)
        return Plan(choice, parts, needed, fits, share, of_servers(student, teacher, load, choice, memory))

    found = []
    for sharding, kept in _placements(load, host, shares_weights):
        for writes in ENGINES[engine]:
            for rows in (rows for rows in range(load.batch, 0, -1) if load.batch % rows == 0):
                choice = Choice(sharding, kept, rows, writes)
                last = plan(choice, lambda *_: 0)
                if last.fits and (last := plan(choice, activations)).fits:  # a trace takes seconds
                    break
            found.append(last)
    return found


def best(plans: Sequence[Plan]) -> Plan:
    """The first that fits without a teacher server, else with one, else the smallest."""
    here = [plan for plan in plans if plan.choice.teacher != "served"]
    return next((plan for plan in [*here, *plans] if plan.fits), None) or min(here, key=lambda plan: plan.peak[1])
