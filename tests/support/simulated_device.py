"""An accelerator simulated in host memory, for one process: what would fail on a GPU fails, what would wait is counted.

Its tensors cannot be mixed with those of the CPU, whose kernels compute for it, so that results are the CPU's. Copies
are made at once, and streams do nothing: the order of copies is tested in `test_accelerators.py`. There is no Triton.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from transformers import training_args

NAME = "simulated"
DEVICE = torch.device("privateuseone", 0)
"""Its type is `NAME` once it is installed."""
MEMORY = 85_000_000_000
"""Bytes, of an H100."""
PACKAGES = ("/trl_opsd/", "/transformers/", "/trl/", "/accelerate/")

RESULTS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "bincount")
"""Operations whose results, or the shapes of these, the host needs."""
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
IN_HALF = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "scaled_dot_product_attention")
IN_FLOAT = ("softmax.int", "log_softmax.int", "layer_norm", "nll_loss", "pow.Tensor_Scalar", "rsqrt", "sum")
"""What autocast computes in half precision, and in float32."""


class Waits:
    """Counts what the host waits for while it is on: results that it reads, and copies from memory that is not pinned.

    `reads` and `copies` have the innermost line of a package that each comes from, with the phase before it.
    """

    def __init__(self) -> None:
        self.phase: str | None = None
        self.reads: Counter[tuple[str, str]] = Counter()
        self.copies: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def during(self, phase: str | None) -> Iterator[None]:
        """Counts for a phase, but what is inside another one within; `None` counts nothing."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def note(self, kind: Counter[tuple[str, str]]) -> None:
        if self.phase is not None:
            kind[self.phase, _line()] += 1


def _line() -> str:
    frame: Any = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if any(package in path for package in PACKAGES) and "/tests/" not in path:
            return f"{path.rpartition('site-packages/')[2].rpartition('/trl_opsd/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


waits = Waits()
_pinned: set[int] = set()
"""Addresses of pinned memory."""


class Memory:
    """Bytes of the device's tensors, now and at most."""

    now = peak = 0

    @classmethod
    def take(cls, storage: torch.UntypedStorage) -> None:
        if not hasattr(storage, "is_taken"):
            storage.is_taken = True
            cls.now += storage.nbytes()
            cls.peak = max(cls.peak, cls.now)
            weakref.finalize(storage, cls.free, storage.nbytes())

    @classmethod
    def free(cls, nbytes: int) -> None:
        cls.now -= nbytes

    @classmethod
    def reset(cls, device: Any = None) -> None:
        cls.peak = cls.now


class OnDevice(Tensor):
    """A tensor of the device, around the one in host memory that holds its numbers, `raw`."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> OnDevice:
        form = {"strides": raw.stride(), "storage_offset": raw.storage_offset(), "dtype": raw.dtype}
        made = Tensor._make_wrapper_subclass(cls, raw.size(), **form, device=DEVICE)
        made.raw = raw
        Memory.take(raw.untyped_storage())
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, *args, **(kwargs or {}))

    def __repr__(self) -> str:
        return f"OnDevice({self.raw!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return OnDevice, (self.raw.detach(),)

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.raw.untyped_storage()

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def record_stream(self, stream: Any) -> None:
        pass


def _is_here(value: Any) -> bool:
    return isinstance(value, OnDevice)


def _raw(value: Any) -> Any:
    """The same in host memory."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == NAME else value
    return value.raw if _is_here(value) else value


def _run(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operation with a tensor of the device, or that makes one."""
    name, given = function._schema.name.removeprefix("aten::"), tree_leaves((args, kwargs))
    to = next((one for one in given if isinstance(one, torch.device)), None)
    makes = any(map(_is_here, given)) if to is None else to.type == NAME
    raw_args, raw_kwargs = tree_map(_raw, (args, kwargs))
    if name == "copy_":
        return _copied(args[0], args[1], kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
    if name == "_to_copy" and not makes:
        if not kwargs.get("non_blocking"):
            waits.note(waits.reads)
        return function(*raw_args, **raw_kwargs)
    _check(name, args, given)
    found = function(*raw_args, **raw_kwargs)
    # An operation in place, or with `out`, returns the tensor that it was given.
    known = {id(one.raw): one for one in given if _is_here(one)}

    def wrapped(one: Any) -> Any:
        if not (makes and isinstance(one, Tensor)):
            return one
        if id(one) not in known:
            return OnDevice(one)
        if (found := known[id(one)]).shape != one.shape:  # `arange` makes an empty one and resizes it
            _DATA.__set__(found, OnDevice(one))
        return found

    return tree_map(wrapped, found)


def _copied(to: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
    (to.raw if _is_here(to) else to).copy_(source.raw if _is_here(source) else source)
    if _is_here(source) and not _is_here(to):
        if not (non_blocking and to.is_pinned()):
            waits.note(waits.reads)
    elif _is_here(to) and not _is_here(source) and source.numel() and not non_blocking:
        waits.note(waits.copies)
    return to


def _check(name: str, args: Any, given: list[Any]) -> None:
    """Raises if an operation has tensors of both devices, and counts if the host waits for it."""
    indices = [one for one in args[1] if one is not None] if name in INDEXING else []
    for one in indices:  # of the CPU, they are copied
        if not _is_here(one):
            waits.note(waits.copies)
        if one.dtype in (torch.bool, torch.uint8):
            waits.note(waits.reads)
    if name in RESULTS or (name == "repeat_interleave" and not any(isinstance(one, int) for one in given)):
        waits.note(waits.reads)
    others = [one for one in given if isinstance(one, Tensor) and not _is_here(one) and one.dim()]
    if indices and _is_here(args[0]):
        others = [one for one in others if not any(one is index for index in indices)]
    if others and any(map(_is_here, given)):
        shapes = [tuple(one.shape) for one in others]
        raise RuntimeError(f"{name}: Expected all tensors to be on the same device, but {shapes} are on the CPU")


# ---- Autocast and attention -----------------------------------------------------------------------------------------


def _autocast(function: Any, *args: Any, half: bool, **kwargs: Any) -> Any:
    dtype = torch.get_autocast_dtype(NAME) if half else torch.float32

    def cast(one: Any) -> Any:
        return one.to(dtype) if isinstance(one, Tensor) and one.is_floating_point() else one

    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
        return function(*tree_map(cast, args), **tree_map(cast, kwargs))


def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, dropout: float = 0.0, causal: bool = False,
    *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """The CPU's fused kernel, which torch does not look for on another device."""
    if enable_gqa:
        key, value = (one.repeat_interleave(query.size(-3) // one.size(-3), -3) for one in (key, value))
    if dropout or query.dim() != 4 or query.size(-1) != value.size(-1):
        attend = torch.ops.aten._scaled_dot_product_attention_math
        return attend(query, key, value, mask, dropout, causal, scale=scale)[0]
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return attend(query, key, value, dropout, causal, attn_mask=mask, scale=scale)[0]


# ---- What torch asks of a device ------------------------------------------------------------------------------------


class Module:
    """`torch.simulated`."""

    is_available = is_initialized = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    set_device = manual_seed = manual_seed_all = empty_cache = staticmethod(lambda *_: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16, torch.float32])
    get_rng_state = staticmethod(lambda device=None: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, device=None: torch.set_rng_state(state))
    device = staticmethod(lambda *_: nullcontext())
    synchronize = staticmethod(lambda *_: waits.note(waits.reads))


class Stream:
    """One after the other: what is queued has been done."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self) -> None: ...
    def synchronize(self) -> None:
        waits.note(waits.reads)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


def _named(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _pinned_now(tensor: Tensor) -> Tensor:
    _pinned.add(tensor.untyped_storage().data_ptr())
    weakref.finalize(tensor.untyped_storage(), _pinned.discard, tensor.untyped_storage().data_ptr())
    return tensor


def _empty(original: Any, *sizes: Any, pin_memory: bool = False, **given: Any) -> Tensor:
    found = original(*sizes, **given)
    return _pinned_now(found) if pin_memory else found


def _set_data(tensor: Tensor, new: Tensor) -> None:
    """As on a GPU, a tensor may get data of another device."""
    if _is_here(tensor) != _is_here(new):
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        same = torch.nn.Parameter(new.detach(), tensor.requires_grad) if is_parameter else new.detach()
        torch.utils.swap_tensors(tensor, same)
        return
    if _is_here(tensor):
        tensor.raw = new.raw
    _DATA.__set__(tensor, new)


_DATA = torch._C.TensorBase.data
_LIBRARIES: list[torch.library.Library] = []


def install() -> None:
    """Makes it the accelerator of this process, until it ends."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    everything, each = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    _LIBRARIES[:] = everything, each
    torch.serialization.add_safe_globals([OnDevice])
    torch.__future__.set_swap_module_params_on_conversion(True)  # a module that is moved keeps its parameters
    torch.utils.weakref = SimpleNamespace(getweakrefs=lambda tensor: ())  # it stays, whoever refers to it
    torch.utils._device._device_constructors()  # known before they are replaced
    everything.fallback(_run, "PrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    # `torch.tensor` calls these below the subclass and its modes, where a fallback is not looked for.
    for name in ("copy_", "_local_scalar_dense", "empty.memory_format", "empty_strided"):
        each.impl(name, partial(_run, _named(name)), "PrivateUse1")
    for half, names in ((True, IN_HALF), (False, IN_FLOAT)):
        for name in names:
            each.impl(name, partial(_autocast, _named(name), half=half), "AutocastPrivateUse1")
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        each.impl("scaled_dot_product_attention", _attention, key)
    torch.Stream = Stream  # type: ignore[misc, assignment]
    torch.empty = partial(_empty, torch.empty)
    torch.Tensor.data = property(_DATA.__get__, _set_data)  # type: ignore[assignment]
    torch.Tensor.pin_memory = _pinned_now  # type: ignore[assignment, method-assign]
    torch.Tensor.is_pinned = lambda tensor, *_: (  # type: ignore[method-assign]
        not _is_here(tensor) and tensor.untyped_storage().data_ptr() in _pinned
    )
    training_args.is_torch_bf16_gpu_available = lambda: True
    accelerator = torch.accelerator
    accelerator.current_stream = lambda device=None: Stream()
    accelerator.synchronize = Module.synchronize
    accelerator.get_memory_info = lambda device=None: (MEMORY - Memory.now, MEMORY)
    accelerator.memory_allocated = lambda device=None: Memory.now
    accelerator.max_memory_allocated = lambda device=None: Memory.peak
    accelerator.reset_peak_memory_stats = Memory.reset
    accelerator.empty_cache = lambda: None
