"""The cost of the streamed divergence: matrix products and memory."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from heads import lower
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from trl_opsd.losses import (
    DIVERGENCES,
    ForwardKL,
    LazyLogits,
    OutputHead,
    Sampled,
    reduce,
    streamed,
    streamed_divergence,
)
from trl_opsd.losses.divergence import Entrywise

pytestmark = pytest.mark.quick

every_divergence = pytest.mark.parametrize("divergence", [make() for make in DIVERGENCES.values()], ids=repr)
TOKENS, VOCABULARY = 24, 53
SAMPLED = Sampled(torch.arange(TOKENS), nll_weight=torch.linspace(-1, 1, TOKENS), logprobs=-torch.ones(TOKENS))
STUDENT, TEACHER = (2 * TOKENS * VOCABULARY * width for width in (5, 8))
"""FLOP of one product with each head."""


@contextmanager
def counted_flops():
    addmm = {torch.ops.aten.addmm_: lambda total, a, b, *_, **__: 2 * a[0] * a[1] * b[1]}
    with FlopCounterMode(display=False, custom_mapping=addmm) as counter:
        yield counter


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor that an operation returned, in elements."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


class Operations(TorchDispatchMode):
    """Counts operations by name, and notes the shapes of products."""

    def __init__(self):
        super().__init__()
        self.count, self.shapes = Counter(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[str(func)] += 1
        if func is torch.ops.aten.addmm_.default:
            self.shapes.append(args[0].shape)
        return func(*args, **(kwargs or {}))


class TestProducts:
    @every_divergence
    @pytest.mark.parametrize("chunk", [None, 5])
    @pytest.mark.parametrize("rich", [False, True], ids=["plain", "bias-scale-cap-temperature"])
    @pytest.mark.parametrize(
        ("frozen", "products"),
        [((), 3), (("weight",), 2), (("hidden",), 2)],
        ids=["trainable head: 3S+1T", "frozen head: 2S+1T", "frozen backbone: 2S+1T"],
    )
    @pytest.mark.parametrize("clip", [None, 0.01])
    def test_no_product_is_computed_twice(self, make_pair, gradients, divergence, chunk, rich, frozen, products, clip):
        pair = make_pair(TOKENS, VOCABULARY, rich=rich)
        clip = clip if isinstance(divergence, Entrywise) else None
        options = {"chunk_tokens": chunk, "kl_clip": clip, "sampled": SAMPLED}
        with counted_flops() as counter:
            gradients(streamed_divergence, pair, divergence, frozen=frozen, **options)
        assert counter.get_total_flops() == products * STUDENT + TEACHER

    @every_divergence
    @pytest.mark.parametrize("reason", ["no_grad", "nothing requires a gradient"])
    def test_evaluation_forms_only_the_logits(self, make_pair, divergence, reason):
        student, teacher = make_pair(TOKENS, VOCABULARY)
        student.hidden.requires_grad_(reason == "no_grad")
        with counted_flops() as counter, torch.set_grad_enabled(reason != "no_grad"):
            streamed_divergence(student, teacher, divergence, sampled=SAMPLED)
        assert counter.get_total_flops() == STUDENT + TEACHER

    @pytest.mark.parametrize(
        ("upstream", "expected"),
        [
            (lambda d: d.sum() / 3, 3 * STUDENT + TEACHER),
            (lambda d: d.mean(), 3 * STUDENT + TEACHER),
            (lambda d: d.square().sum(), 5 * STUDENT + 2 * TEACHER),
        ],
        ids=["sum", "mean", "nonlinear"],
    )
    def test_only_a_nonuniform_upstream_gradient_repeats_products(self, make_pair, gradients, upstream, expected):
        with counted_flops() as counter:
            gradients(streamed_divergence, make_pair(TOKENS, VOCABULARY), ForwardKL(), upstream=upstream)
        assert counter.get_total_flops() == expected

    def test_reduce_keeps_the_upstream_gradient_recognisable_without_comparing_values(self, make_pair):
        seen: list[tuple[int, ...]] = []
        student, teacher = make_pair(6)
        student.head.weight.requires_grad_()
        per_token = streamed_divergence(student, teacher, ForwardKL())
        per_token.divergence.register_hook(lambda upstream: seen.append(upstream.stride()))
        reduce(per_token, torch.ones(2, 3), num_items=torch.tensor(11)).loss.backward()
        assert seen == [(0,)]

    def test_head_is_cast_once_per_call_not_per_tile(self, make_pair):
        casts = []

        class Casts(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if func is torch.ops.aten._to_copy.default and args[0].shape == (VOCABULARY, 5):
                    casts.append(kwargs["dtype"])
                return func(*args, **(kwargs or {}))

        student, teacher = make_pair(TOKENS, VOCABULARY)
        head = replace(student.head, weight=student.head.weight.bfloat16())
        with Casts():
            streamed_divergence(
                replace(student, hidden=student.hidden.bfloat16(), head=head), teacher, ForwardKL(), None, 2
            )
        assert casts == [torch.float32]


class TestMemory:
    @every_divergence
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("chunk", [3, None], ids=["3 tokens", "a budget of 10"])
    def test_no_tensor_is_as_large_as_all_logits(self, make_pair, gradients, divergence, dtype, chunk, monkeypatch):
        monkeypatch.setattr("trl_opsd.losses.streamed.TILE_BYTES", 8 * 53 * 10)
        pair = [lower(side, dtype) for side in make_pair(300, 53)]
        with LargestTensor() as largest:
            sampled = Sampled(torch.arange(300) % 53, nll_weight=torch.ones(300))
            gradients(streamed_divergence, pair, divergence, chunk_tokens=chunk, sampled=sampled)
        assert largest.elements <= 300 * 10  # the statistics of each token; all logits would be 300 * 53

    @pytest.mark.parametrize(("memory", "tiles"), [(0, [493] * 4 + [28]), (80 * 10**9, [976, 976, 48])])
    def test_the_default_tile_follows_the_memory_of_an_accelerator(self, monkeypatch, memory, tiles):
        """Twice as many tokens on 80 GB, in multiples of 16, for half as many passes over both heads."""
        monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (0, 80 * 10**9))
        found = [streamed.memory_of.__wrapped__(torch.device(kind)) for kind in ("cpu", "cuda:7")]
        assert found == [0, 80 * 10**9]
        monkeypatch.setattr(streamed, "memory_of", lambda device: memory)
        monkeypatch.setattr(streamed, "_BLOCK_ELEMENTS", {})  # not one row at a time
        with FakeTensorMode(), Operations() as ran:
            student = LazyLogits(torch.empty(2000, 8, requires_grad=True), OutputHead(torch.empty(152064, 8)))
            teacher = LazyLogits(torch.empty(2000, 9), OutputHead(torch.empty(152064, 9)))
            streamed_divergence(student, teacher, ForwardKL())
        products = [shape[0] for shape in ran.shapes if shape[1] == 152064]
        assert products == [tile for tile in tiles for _ in range(2)]

    def test_frozen_head_keeps_no_teacher_tensor_for_backward(self, make_pair):
        student, teacher = make_pair()
        student.hidden.requires_grad_()
        divergence = streamed_divergence(student, teacher, ForwardKL()).divergence
        assert not hasattr(divergence.grad_fn, "fold")
        assert divergence.grad_fn.saved_tensors == ()
