"""A frozen model as a teacher: where its weights are kept, and how it scores rows in few passes, each row once.

B rows · P prompt tokens · C completion tokens · L = P + C · H hidden width
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, distributed
from tqdm import tqdm

from trl_opsd._compat.peft import CausalLM
from trl_opsd._compat.sharding import is_split_model
from trl_opsd.models.backbone import (
    Run,
    call,
    completion_hidden,
    context_of,
    has_varlen,
    padded_hidden,
    preserved_mode,
)
from trl_opsd.models.checks import check_on_device, described
from trl_opsd.models.grouping import bytes_per_token, cheapest_groups, fewest_groups
from trl_opsd.models.padding import PADDED, BatchPolicy
from trl_opsd.models.probes import Probed, check_head, check_packing, find_batching
from trl_opsd.models.weights import Samples, sampled
from trl_opsd.teacher.base import Teacher
from trl_opsd.teacher.prefix import SharedPrefix
from trl_opsd.types import OutputHead, Rollout, TeacherTargets
from trl_opsd.types.rollout import PromptIds
from trl_opsd.types.targets import Keeper


def max_over_processes(passes: int, device: torch.device) -> int:
    """The maximum over all processes. Collective."""
    if not distributed.is_initialized():
        return passes
    largest = torch.tensor(passes, device=device)
    distributed.all_reduce(largest, op=distributed.ReduceOp.MAX)
    return int(largest)


def is_fixed(model: CausalLM) -> bool:
    """Whether weights cannot be moved: quantised ones have state tied to their device, accelerate moves mapped ones."""
    return bool(getattr(model, "hf_device_map", None) is not None or getattr(model, "is_quantized", False))


class Placement(ABC):
    """Holds one frozen model. In every placement, the same rows give the same hidden states.

    Between scorings the model's own parameters are the masters of its weights: changing them in place changes the
    teacher. What is on the device during a scoring is a copy, and is never copied back.
    """

    model: CausalLM
    """The causal language model, bare or wrapped by `peft`."""
    device: torch.device
    """The device that a rollout has to be on."""
    adapter: str | None = None
    """The path or model id of the adapter that is active while it scores, if it was loaded as one."""

    @property
    def where(self) -> str:
        """Where the weights are kept, in words."""
        return f"on {self.device}"

    @property
    @abstractmethod
    def head(self) -> OutputHead:
        """The head as of the last scoring, where the loss can use it at any time."""

    is_whole: bool = True
    """Whether the model can be called directly within [`loaded`], and not only through what that yields."""
    passes_are_costly: bool = False
    """Whether each pass copies or gathers the weights again."""

    @abstractmethod
    def loaded(self, passes: int) -> AbstractContextManager[Run]:
        """Brings the model to the device while the context lasts.

        Args:
            passes (`int`):
                Passes that follow; prefetching stops after the last.

        Returns:
            `ContextManager`: yields a [`~models.backbone.Run`], through which every pass has to go.
        """

    def passes_to_run(self, passes: int) -> int:
        """Passes to run: `passes`, or the maximum over processes if passes are collective."""
        return passes

    def samples(self) -> Samples:
        """Samples of the weights that it scores with. Collective."""
        return sampled(self.model)


class Resident(Placement):
    """`teacher_offload="none"`.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The teacher. One that is quantised or has a device map was loaded there.
        device (`torch.device`):
            Where it is kept.

    Raises:
        ValueError: A part of it is elsewhere or not in memory.
    """

    def __init__(self, model: CausalLM, device: torch.device) -> None:
        # The loss never calls the head, so nothing would fetch weights that are elsewhere.
        check_on_device(model, device, "teacher", "`teacher_offload='stream'` needs little device memory")
        self.model = model if is_fixed(model) else model.to(device)
        self.device = next(one.device for one in model.parameters() if not one.is_meta)

    @property
    def head(self) -> OutputHead:
        return OutputHead.of(self.model)

    @contextmanager
    def loaded(self, passes: int) -> Iterator[Run]:
        yield partial(call, self.model)


PASS_BYTES = 3_000_000_000
"""Bytes of the activations of one pass: of a 7B teacher, enough computation for an H100 to hide the copies of streamed
layers, and for the first one, which nothing hides, to be a small part."""
BUSY_TOKENS = {"cpu": 128, "accelerator": 4096}
"""Tokens of a pass below which padding is free, as fewer tokens take as long."""
MOST_TOKENS = {"cpu": 1024, "accelerator": math.inf}
"""Tokens of a pass beyond which a device gets slower: a CPU's caches no longer hold a layer's output."""


def score(
    placement: Placement,
    rollout: Rollout,
    policy: BatchPolicy = PADDED,
    prefix: SharedPrefix | None = None,
    read: Callable[..., Tensor] = completion_hidden,
    cache_device: str = "auto",
    progress: bool = False,
    pass_bytes: int = PASS_BYTES,
) -> TeacherTargets:
    """The last hidden states at the positions that predict the completion tokens that may count, kept by row.

    Each row is read once, up to the last of these tokens, and without a `prefix` that all rows share; `read` runs the
    passes.
    """
    rollout, model, device = rollout.ended(), placement.model, placement.device
    keeper = Keeper(rollout.weights, cache_device)
    with preserved_mode(model), torch.no_grad():
        if model.training:  # the caller may have set it to training mode since
            model.eval()
        if prefix is not None and prefix.works is None:
            with placement.loaded(passes=4) as run:
                prefix.prove(run, policy)
        shared, reading = ([], 0) if prefix is None else prefix.choose(rollout, policy)
        lengths = [size - len(shared) for size in rollout.sizes]
        groups = pass_groups(model, lengths, device, policy, pass_bytes, placement.passes_are_costly, len(shared))
        passes = placement.passes_to_run(len(groups) + reading)
        with placement.loaded(passes) as run:
            past = prefix.past(run, shared) if prefix is not None and shared else None
            for rows in tqdm(groups, desc="teach", unit="pass", delay=5, leave=False, disable=not progress):
                of_pass = rollout.select(rows).cut().to(device)
                if past is None:
                    keeper.put(rows, run(read, of_pass, policy))
                else:
                    before = past.get_seq_length()
                    keeper.put(rows, run(padded_hidden, of_pass, of_pass.measured(), policy, past, before))
            # Surplus passes re-read one row so that collectives stay matched between processes.
            for _ in range(passes - reading - len(groups)):
                run(completion_hidden, rollout.select([0]).cut().to(device), policy)
            return keeper.targets()


def pass_groups(
    model: CausalLM,
    lengths: Sequence[int],
    device: torch.device,
    policy: BatchPolicy = PADDED,
    pass_bytes: int = PASS_BYTES,
    passes_are_costly: bool = False,
    before: int = 0,
) -> list[list[int]]:
    """The rows of each pass, within `pass_bytes`; `passes_are_costly`: each copies or gathers the weights again.

    Of a prefix of `before` tokens a layer has keys and values for each row.
    """
    if not policy.padded_up_to and is_split_model(model):
        return [[row] for row in range(len(lengths))]  # one pass per row, as processes must run equally many
    kind = "cpu" if device.type == "cpu" else "accelerator"
    vectors, of_pair = bytes_per_token(model)  # once, as reading a config is slow

    def fits(tokens: int, width: int) -> bool:
        # Of a token of the prefix each row has keys and values, repeated for all heads: a quarter of a token's vectors.
        in_all = tokens * (vectors + of_pair * (before + width)) + tokens / width * before / 4 * vectors
        return tokens <= MOST_TOKENS[kind] and in_all <= pass_bytes

    if policy.packed:
        return fewest_groups(lengths, fits, packed=True)
    # On an accelerator copies of weights hide only behind passes as large as possible: the fewest passes win.
    return cheapest_groups(lengths, fits, math.inf if passes_are_costly and kind != "cpu" else BUSY_TOKENS[kind])


class FrozenTeacher(Teacher):
    """Freezes a model and scores rollouts with it, as many rows at a time as fit a memory budget.

    Args:
        placement ([`~teacher.Placement`]):
            Holds the model, for instance `Resident(model, device)`. The model is permanently put into eval mode, and
            its parameters no longer require gradients.
        cache_device (`str`, *optional*, defaults to `"auto"`):
            Where targets are kept until they are used: see `OPSDConfig.teacher_cache_device`.
        pass_bytes (`int`, *optional*, defaults to 3 GB):
            Memory limit for the activations of one pass.
        progress (`bool`, *optional*, defaults to `False`):
            Show a progress bar when scoring takes longer than a few seconds.
        padding_free (`bool`, *optional*, defaults to `False`):
            Pack the rows of a pass into one sequence: see `OPSDConfig.padding_free`.
        pad_to_multiple_of (`int`, *optional*):
            Rounds the width of padded rows up to a multiple of this.
        prefix_bytes (`float`, *optional*, defaults to 0):
            Size limit of the keys and values of a shared prefix: see `OPSDConfig.teacher_prefix_cache_gb`.

    Attributes:
        policy ([`~models.padding.BatchPolicy`]): which rows share a forward pass.

    Raises:
        TypeError: `placement` is no placement but, for instance, a model or its path.
        ValueError: The model's logits cannot be computed from its hidden states, or a row's hidden states depend on the
            other rows, padded or, with `padding_free`, packed.
    """

    reads_images: ClassVar[bool] = True

    def __init__(
        self,
        placement: Placement,
        cache_device: str = "auto",
        pass_bytes: int = PASS_BYTES,
        progress: bool = False,
        padding_free: bool = False,
        pad_to_multiple_of: int | None = None,
        prefix_bytes: float = 0,
    ) -> None:
        self.placement = placement
        self.model: CausalLM = placement.model.eval().requires_grad_(False)
        self._cache_device = cache_device
        self._pass_bytes = pass_bytes
        self._progress = progress
        # The passes that the probes make, so that an offloaded placement prefetches no more.
        with placement.loaded(passes=8 if padding_free else 4) as run:
            probes = [check_head, find_batching, *([check_packing] if padding_free else [])]
            found = Probed(self.model, "teacher", run).prove(*probes)
        # Small blocks would copy or gather the weights again; passes of rows of similar lengths have little padding.
        packed = padding_free and (has_varlen(self.model) or not placement.passes_are_costly)
        self.batching = replace(found.batching, packed=packed, multiple_of=pad_to_multiple_of or 1)
        self.prefix: SharedPrefix | None = None
        if prefix_bytes:
            self.prefix = SharedPrefix(self.model, prefix_bytes, placement.device, placement.passes_are_costly)
            with placement.loaded(passes=4) as run:
                self.prefix.prove(run, self.batching)

    def prove_images(self, prompts: Sequence[PromptIds]) -> None:
        """Verifies how it reads images, with [`~data.images.probe_prompts`]. Collective if it is sharded.

        Raises:
            ValueError: It reads them otherwise than the model itself does, or than each row alone.
        """
        if is_split_model(self.model):
            self.batching = replace(self.batching, dummy_image_prompt=prompts[0])
        with self.placement.loaded(passes=6) as run:
            Probed(self.model, "teacher", run).reads(prompts, self.batching)

    def __str__(self) -> str:
        return f"{described(self.model)}, {self.placement.where}"

    @property
    def head(self) -> OutputHead:
        return self.placement.head

    @property
    def context(self) -> int | None:
        return context_of(self.model)

    @property
    def is_whole(self) -> bool:
        """Whether [`lent`] gives a model that this process can call directly."""
        return self.placement.is_whole

    @contextmanager
    def lent(self) -> Iterator[CausalLM]:
        """The model on the device, for uses other than to score a rollout."""
        with self.placement.loaded(1):
            yield self.model

    def targets(self, rollout: Rollout) -> TeacherTargets:
        return self.states(rollout, self.batching, self.prefix)

    def states(
        self,
        rollout: Rollout,
        policy: BatchPolicy,
        prefix: SharedPrefix | None = None,
        read: Callable[..., Tensor] = completion_hidden,
    ) -> TeacherTargets:
        """The targets of a rollout, whose rows begin with a prefix that all share, if any; `read` runs its passes."""
        kept = self._cache_device, self._progress, self._pass_bytes
        return score(self.placement, rollout, policy, prefix, read, *kept)
