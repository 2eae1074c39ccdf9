"""Divergences over the next byte: against loops over all tokens, finite differences, and languages that are known."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from support.byte_languages import Language, byte_pairs, small_vocabulary, wide_vocabulary
from test_cost import counted_flops
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trl_opsd.data.byte_vocabulary import ByteVocabulary
from trl_opsd.losses import ForwardKL, GeneralizedJSD, NegativeLogAcceptance, ReverseKL, byte_ranges, bytewise, side
from trl_opsd.losses.byte_ranges import _FLOOR
from trl_opsd.losses.bytewise import MOST_ESCAPE, byte_logarithms, bytewise_divergence
from trl_opsd.losses.dense import dense_byte_logarithms
from trl_opsd.types import LazyLogits, OutputHead, Sampled
from trl_opsd.types.bytewise import OUTCOMES, Spelled, byte_head


def drawn(vocabulary, tokens, seed=0, bias=False, softcap=None, width=7, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    rows = len(vocabulary.texts) + 3  # padded, as heads are
    ids = torch.randint(0, len(vocabulary.texts), (tokens,), generator=generator)
    weight = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    hidden = spread * torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    offset = torch.randn(rows, generator=generator, dtype=torch.float64) if bias else None
    return ids, LazyLogits(hidden, OutputHead(weight, offset, 0.8, softcap), 1.3)


def logits_of(model):
    head = model.head
    product = model.hidden @ head.weight.T * head.scale + (0 if head.bias is None else head.bias * head.scale)
    if head.softcap is not None:
        product = head.softcap * (product / head.softcap).tanh()
    return product / model.temperature


@pytest.mark.parametrize("chunk_tokens", [None, 1, 3])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_masses_equal_those_of_a_loop_over_all_tokens(chunk_tokens, softcap):
    vocabulary = small_vocabulary()
    ids, model = drawn(vocabulary, 12, softcap=softcap)
    token, reads = vocabulary.reads(vocabulary.spelled(ids.tolist()))
    found, escape = byte_logarithms(model, vocabulary.table, ids, token, reads, chunk_tokens)
    expected, escaped = dense_byte_logarithms(logits_of(model), vocabulary.texts, ids.tolist(), _FLOOR)
    assert (found - expected).abs().max() < 2e-5
    assert (escape - escaped).abs().max() < 1e-6
    assert escape.max() > MOST_ESCAPE > escape.min()


def dense_of(student, teacher_logs, vocabulary, ids, divergence, weights, held, pull):
    logs, escape = dense_byte_logarithms(logits_of(student), vocabulary.texts, ids.tolist(), _FLOOR)
    token, _ = vocabulary.reads(vocabulary.spelled(ids.tolist()))
    held = held & (escape <= MOST_ESCAPE)
    per_byte = divergence.value(logs.log_softmax(-1), teacher_logs.log_softmax(-1))
    own = logits_of(student)[:, : len(vocabulary.texts)].log_softmax(-1).gather(1, ids[:, None])[:, 0]
    value = torch.zeros(len(ids), dtype=torch.float64).index_add(0, token, per_byte * held)
    return (value + (0 if pull is None else -pull * own)) * weights


@pytest.mark.parametrize("chunk_tokens", [None, 1, 4])
@pytest.mark.parametrize(
    "divergence", [ReverseKL(), ForwardKL(), GeneralizedJSD(0.3), NegativeLogAcceptance()], ids=str
)
@pytest.mark.parametrize(("bias", "softcap", "pulls"), [(False, None, False), (True, 2.0, True)])
def test_values_and_gradients_equal_the_dense_ones(divergence, chunk_tokens, bias, softcap, pulls):
    vocabulary = small_vocabulary()
    ids, student = drawn(vocabulary, 14, 1, bias, softcap)
    assert_equals_dense(vocabulary, ids, student, divergence, chunk_tokens, pulls)


@pytest.mark.parametrize("chunk_tokens", [None, 3])
@pytest.mark.parametrize("spread", [1.0, 12.0])
def test_ranges_of_many_blocks_are_exact_however_improbable(chunk_tokens, spread):
    vocabulary = wide_vocabulary()
    ids, student = drawn(vocabulary, 10, 10, spread=spread)
    least = logits_of(student)[:, : len(vocabulary.texts)].log_softmax(-1).gather(1, ids[:, None]).min()
    assert (least < -40) == (spread > 1)
    assert_equals_dense(vocabulary, ids, student, ReverseKL(), chunk_tokens, pulls=True)


def test_borders_reach_back_three_tokens():
    """The longest token, `abcab`, began four tokens before its last byte."""
    _, reads = small_vocabulary().reads([b"a", b"b", b"c", b"a", b"b"])
    assert [reads[reads[:, 0] == place][:, 2].tolist() for place in (3, 4)] == [[3, 2, 1, 0], [2, 1, 0]]


def assert_equals_dense(vocabulary, ids, student, divergence, chunk_tokens, pulls):
    token, reads = vocabulary.reads(vocabulary.spelled(ids.tolist()))
    generator = torch.Generator().manual_seed(2)
    teacher_logs = torch.randn(len(token), 257, generator=generator, dtype=torch.float64).log_softmax(-1)
    held = torch.rand(len(token), generator=generator) > 0.2
    weights = torch.rand(len(ids), generator=generator)
    pull = torch.randn(len(ids), generator=generator) if pulls else None
    leaves = [one for one in (student.hidden, student.head.weight, student.head.bias) if one is not None]

    def gradients(function):
        for leaf in leaves:
            leaf.requires_grad_()
        value = function()
        (value.sum() / 3).backward()
        found = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return value.detach(), found

    def streamed():
        found = bytewise_divergence(
            student, LazyLogits(teacher_logs.float(), byte_head(ids.device)), divergence, vocabulary.table,
            Spelled(token, held, reads.long(), torch.arange(len(token)), torch.arange(len(ids))),
            Sampled(ids, pull), weights, chunk_tokens,
        )  # fmt: skip
        assert found.outcomes.sum() == len(token)
        assert 0 < found.compared.sum() < held.sum()
        assert (found.compared + found.escaped == found.outcomes).all()
        return found.divergence

    value, found = gradients(streamed)
    expected, wanted = gradients(
        lambda: dense_of(student, teacher_logs, vocabulary, ids, divergence, weights, held, pull)
    )
    assert (value - expected).abs().max() < 1e-5 * expected.abs().max()
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() < 3e-5 * other.abs().max()
        assert other.abs().max() > 1e-3


def test_the_dense_gradient_is_that_of_finite_differences():
    vocabulary = small_vocabulary()
    ids, student = drawn(vocabulary, 4, 3)
    token, _ = vocabulary.reads(vocabulary.spelled(ids.tolist()))
    teacher_logs = torch.randn(len(token), 257, dtype=torch.float64).log_softmax(-1)
    held, weights = torch.ones(len(token), dtype=torch.bool), torch.ones(len(ids))

    def loss(hidden):
        moved = LazyLogits(hidden, student.head, student.temperature)
        return dense_of(moved, teacher_logs, vocabulary, ids, ReverseKL(), weights, held, None).sum()

    assert torch.autograd.gradcheck(loss, student.hidden.requires_grad_(), eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_one_language_in_two_tokenizers_has_little_divergence(seed):
    """Two models that are one distribution over texts; token by token, the same language has more."""
    language = Language(seed=seed)
    both = [ByteVocabulary.of(byte_pairs(200), "one"), ByteVocabulary.of(byte_pairs(120, start=5000), "other")]
    texts, draw = list(language.texts), random.Random(1)
    total, positions, used, apart, naive = 0.0, 0, 0, [], 0.0
    for text in draw.choices(texts, list(language.texts.values()), k=25):
        true, logs, escapes = language.next_bytes(text), [], []
        for vocabulary in both:
            ids, logits = language.logits(text, vocabulary)
            model = LazyLogits(logits, OutputHead(torch.eye(logits.size(1))))
            token, reads = vocabulary.reads(vocabulary.spelled(ids))
            log, escape = byte_logarithms(model, vocabulary.table, torch.tensor(ids), token, reads)
            assert len(log) == len(true)
            logs.append(log.double().log_softmax(-1))
            escapes.append(escape)
            apart.append((logs[-1].exp() - true).abs().sum(-1)[escape <= MOST_ESCAPE] / 2)
            # what tokens of the first byte say at a border, without those that began before it
            first = torch.tensor([at for at in range(len(token)) if at == 0 or token[at] != token[at - 1]])
            here = torch.stack([_first_bytes(one, vocabulary) for one in logits.double().softmax(-1)])
            naive = max(naive, float((here - true[first]).abs().sum(-1).max() / 2))
        held = (escapes[0] <= MOST_ESCAPE) & (escapes[1] <= MOST_ESCAPE)
        divergence = (logs[0].exp() * (logs[0] - logs[1])).sum(-1) * held
        total, positions, used = total + float(divergence.sum()), positions + len(held), used + int(held.sum())
    assert total / positions < 0.05
    assert used / positions > 0.9
    assert torch.cat(apart).mean() < 5e-3
    assert naive > 0.5


def _first_bytes(probs, vocabulary):
    found = torch.zeros(257, dtype=torch.float64)
    for token, text in enumerate(vocabulary.texts):
        found[256 if text is None else text[0]] += probs[token]
    return found


@pytest.mark.parametrize("chunk_tokens", [None, 16])
def test_step_costs_three_student_products_and_one_teacher_product(chunk_tokens):
    vocabulary = small_vocabulary()
    tokens, width, rows = 64, 512, len(vocabulary.texts)
    ids = torch.randint(1, rows - 1, (tokens,), generator=torch.Generator().manual_seed(0))
    token, reads = vocabulary.reads(vocabulary.spelled(ids.tolist()))
    head = OutputHead(torch.randn(rows, width, requires_grad=True))
    student = LazyLogits(torch.randn(tokens, width, requires_grad=True), head)
    held = torch.ones(len(token), dtype=torch.bool)
    product, tiles = 2 * tokens * width * rows, 1 if chunk_tokens is None else tokens // chunk_tokens
    again = 1 + 3 * (tiles - 1) / tokens  # each tile but the first reads three states more
    with counted_flops() as counter, torch.no_grad():
        logs, _ = byte_logarithms(student, vocabulary.table, ids, token, reads, chunk_tokens)
    assert counter.get_total_flops() == product * again
    spelled = Spelled(token, held, reads.long(), torch.arange(len(token)), torch.arange(tokens))
    with counted_flops() as counter:
        pair = student, LazyLogits(logs, byte_head(ids.device))
        given = ReverseKL(), vocabulary.table, spelled, Sampled(ids), None, chunk_tokens
        bytewise_divergence(*pair, *given).divergence.sum().backward()
    assert counter.get_total_flops() == 3 * product * again


class BetweenDevices(TorchDispatchMode):
    """Counts operations on tensors of two devices, by whether the host would wait for them."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [one for one in tree_leaves((args, kwargs, out)) if isinstance(one, torch.Tensor) and one.dim()]
        if len({one.device for one in tensors}) > 1:
            self.found[func._schema.name, bool((kwargs or {}).get("non_blocking"))] += 1
        return out


@pytest.mark.parametrize("chunk_tokens", [20, 64])
def test_indices_are_copied_once_for_all_tiles_without_waiting(monkeypatch, chunk_tokens):
    """A device without numbers raises where the host needs one."""
    monkeypatch.setattr(byte_ranges, "has_streams", lambda device: False)
    monkeypatch.setattr(byte_ranges, "product_dtype", lambda side: torch.float32)  # there is no autocast on it
    vocabulary, device = small_vocabulary(), torch.device("meta")
    vocabulary.table.to(device)
    ids = torch.randint(1, len(vocabulary.texts) - 1, (64,), generator=torch.Generator().manual_seed(0))
    token, reads = vocabulary.reads(vocabulary.spelled(ids.tolist()))
    spelled = Spelled(token, token > 0, reads, torch.arange(len(token)), torch.arange(64))
    with device:
        student = LazyLogits(torch.ones(64, 5, requires_grad=True), OutputHead(torch.ones(40, 5, requires_grad=True)))
        teacher = LazyLogits(torch.ones(len(token), OUTCOMES), byte_head(device))
        sampled, weights = Sampled(torch.ones(64, dtype=torch.long), torch.ones(64)), torch.ones(64)
    with BetweenDevices() as watch:
        given = ReverseKL(), vocabulary.table, spelled, sampled, weights, chunk_tokens
        bytewise_divergence(student, teacher, *given).divergence.sum().backward()
    assert watch.found == {("aten::_to_copy", True): 1}


def test_gradients_of_several_tiles_meet_the_heads_at_once(monkeypatch):
    """As where products of low precision end in float32: here both are float64, which no rounding hides behind."""
    products = []

    def addmm(total, a, b, *, alpha, beta):
        products.append(total.shape)
        total.copy_(beta * total.double() + alpha * a @ b)

    monkeypatch.setattr(side, "operand", lambda tensor, dtype: tensor.detach().double())
    monkeypatch.setattr(side, "addmm_", addmm)
    monkeypatch.setattr(bytewise, "addmm_", addmm)
    vocabulary = wide_vocabulary()
    ids, student = drawn(vocabulary, 10, 5)
    assert_equals_dense(vocabulary, ids, student, ReverseKL(), 1, pulls=True)
    assert products.count((len(vocabulary.texts), 7)) == 3
    assert len(products) == 10 + 2 * 3
