"""Divergences over the next byte: against loops over all tokens, and languages that are known."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import product

import numpy
import pytest
import torch
from heads import logits_of, of_logits
from support.byte_languages import (
    Language,
    byte_pairs,
    dense_byte_logarithms,
    nodes_of,
    outcomes,
    small_languages,
    small_vocabulary,
    trained_pairs,
    wide_vocabulary,
)
from test_cost import counted_flops
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trl_opsd.bytes import ranges
from trl_opsd.bytes.divergence import Bytewise, byte_logarithms, forks_needed
from trl_opsd.bytes.ranges import _FLOOR
from trl_opsd.bytes.table import OUTCOMES, Spelled, byte_head
from trl_opsd.bytes.vocabulary import ByteVocabulary
from trl_opsd.losses import ForwardKL, GeneralizedJSD, NegativeLogAcceptance, ReverseKL
from trl_opsd.types import LazyLogits, OutputHead, PerToken, Sampled

SMALL = small_languages()
COLUMN = 10_000
"""Beyond all tokens of a row."""
TEXT = "abcab cab bcabb ab\N{LATIN SMALL LETTER E WITH ACUTE} ab"


def row_of(vocabulary, text=TEXT, read="all", more="abab"):
    """The tokens of a text with a special one in the middle, and their tree, of which some forks are read."""
    ids = [*vocabulary.ids_of(text), vocabulary.tokenizer.eos_token_id, *vocabulary.ids_of(more)]
    (tree,) = vocabulary.trees([ids])
    draw, chosen = random.Random(0), numpy.zeros(len(tree.fork), bool)
    for number, parent in enumerate((tree.fork[:, 1] - tree.tokens).tolist()):
        wanted = {"all": True, "none": False, "some": draw.random() < 0.6}[read]
        chosen[number] = wanted and (parent < 0 or bool(chosen[parent]))
    return ids, replace(tree, read=chosen, column=COLUMN)


def spelled_of(tree, missed=None, kept=None):
    places = torch.arange(tree.tokens) if kept is None else kept
    return Spelled.of([tree], [torch.zeros(len(tree.token)) if missed is None else missed], [0], places)


def ids_at(spelled, ids):
    return torch.tensor([ids[place] if place < COLUMN else 0 for place in spelled.places.tolist()])


def path_of(tree, ids, node):
    """The tokens up to a border: of the row, or of a fork."""
    if node < tree.tokens:
        return ids[:node]
    _, parent, token = tree.fork[node - tree.tokens].tolist()
    return [*path_of(tree, ids, parent), token]


def missed_by_hand(model, vocabulary, ids, tree):
    """[P], what enters forks that are not read but follow a state, as a share with what goes on from all states."""
    nodes, log_SV = nodes_of(tree, ids), logits_of(model)[:, : len(vocabulary.texts)].log_softmax(-1)
    path = [sum((log_SV[one, token] for one, token in path), torch.zeros(())) for _, path in nodes]
    number = {(*(token for _, token in path),): at for at, (_, path) in enumerate(nodes)}
    said = outcomes(vocabulary, ids)
    entered, read = torch.zeros(2, len(said), dtype=torch.float64)
    for position, fork in tree.leaves.tolist():
        state = number.get((*path_of(tree, ids, int(tree.fork[fork, 1])),))
        if not tree.read[fork] and state is not None:
            entered[position] += (path[state] + log_SV[state, int(tree.fork[fork, 2])]).exp()
    for position in range(len(said)):
        for state, (place, _) in enumerate(nodes):
            since = said[place:position]
            if place <= position and 256 not in since:
                goes_on = [
                    token for token, text in enumerate(vocabulary.texts)
                    if (not since if text is None else len(text) > len(since) and [*text[: len(since)]] == since)
                ]  # fmt: skip
                read[position] += (path[state] + log_SV[state, goes_on].logsumexp(0)).exp()
    return entered / (entered + read)


def drawn(vocabulary, states, seed=0, bias=False, softcap=None, width=7, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    rows = len(vocabulary.texts) + 3  # padded, as heads are
    weight = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    hidden = spread * torch.randn(states, width, generator=generator, dtype=torch.float64)
    offset = torch.randn(rows, generator=generator, dtype=torch.float64) if bias else None
    return LazyLogits(hidden, OutputHead(weight, offset, 0.8, softcap), 1.3)


def dense_logs(model, vocabulary, ids, tree):
    return dense_byte_logarithms(
        logits_of(model), vocabulary.texts, outcomes(vocabulary, ids), nodes_of(tree, ids), _FLOOR
    )


@pytest.mark.parametrize("read", ["none", "some", "all"])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_masses_equal_those_of_a_loop_over_all_tokens(read, softcap):
    vocabulary = small_vocabulary()
    ids, tree = row_of(vocabulary, read=read, more="abcabab")
    spelled = spelled_of(tree)
    assert len(spelled.places) == len(ids) + int(tree.read.sum())
    model = drawn(vocabulary, len(spelled.places), softcap=softcap)
    expected = dense_logs(model, vocabulary, ids, tree)
    for chunk_tokens in (None, 1, 3):
        found, missed = byte_logarithms(model, vocabulary.table, ids_at(spelled, ids), spelled, chunk_tokens)
        assert (found - expected).abs().max() < 2e-5
        assert (missed - missed_by_hand(model, vocabulary, ids, tree)).abs().max() < 1e-6
    assert (missed.max() == 0) == (read == "all")


EVERYTHING = "The license shall mean 1234,\r\n\tcaf\u00e9 \u4e2d\u6587\u5b57 \N{GRINNING FACE}  it's"


@pytest.mark.parametrize("name", ["license", "prose, code and scripts", "words, joined", "CJK"])
def test_forks_are_the_canonical_tokens_of_each_beginning(name):
    """Those that the tokenizer itself gives for it, also of long texts without a border that is certain."""
    text, step = EVERYTHING, 1
    if name in SMALL:
        language, vocabulary, _ = SMALL[name]
        text, step = " ".join(language.texts), 7
        text = text[:700] if name == "CJK" else text[:900].replace(" ", "")
    else:
        words = byte_pairs(300) if name == "license" else trained_pairs([EVERYTHING] * 3, 60, "GPT-2")
        vocabulary = ByteVocabulary.of(words, "it")
    ids = vocabulary.ids_of(text)
    (tree,) = vocabulary.trees([ids])
    forks = [path_of(tree, ids, tree.tokens + one) for one in range(len(tree.fork))]
    paths = [*(ids[:count] for count in range(len(ids))), *forks]
    assert all(vocabulary.ids_of(text[:size]) in paths for size in range(1, len(text), step))
    places = tree.fork[:, 0].tolist()
    assert places == [len(b"".join(vocabulary.spelled(path))) for path in forks]
    within = set(places) - {len(text[:size].encode()) for size in range(len(text))}
    assert name != "license" or len(within) <= 3
    assert name != "prose, code and scripts" or len(within) > 3  # within characters


def test_an_odd_token_does_not_double_a_long_text():
    """The canonical tokens beside the row's own are forks until both have the same borders again."""
    vocabulary = SMALL["strings"][1]
    draw = random.Random(0)
    ids = vocabulary.ids_of("".join(draw.choice("ab") for _ in range(3000)))
    at = next(one for one, token in enumerate(ids) if len(vocabulary.texts[token] or b"") > 1)
    odd = [*ids[:at], *(vocabulary.texts.index(bytes([byte])) for byte in vocabulary.texts[ids[at]]), *ids[at + 1 :]]
    (whole,), (other,) = vocabulary.trees([ids]), vocabulary.trees([odd])
    assert len(whole.token) == len(other.token) == 3000
    assert len(other.leaves) < 1.5 * len(whole.leaves)
    spelled = spelled_of(replace(other, read=numpy.ones(len(other.fork), bool), column=COLUMN))
    model = drawn(vocabulary, len(spelled.places))
    plan = ranges.Plan.of(model, 32, vocabulary.table, ids_at(spelled, odd), spelled)
    assert max(one.states.stop - one.states.start for one in plan.tiles) < 250


@pytest.mark.parametrize("cut", [1, 2])
def test_a_text_that_ends_within_a_character_keeps_its_forks(cut):
    vocabulary = SMALL["CJK"][1]
    text = "\u4e2d\u56fd\u6587\u5b57\u4e0f\u4e2d\u6587" * 3
    ids = [*vocabulary.ids_of(text), *(vocabulary.texts.index(bytes([byte])) for byte in "\u3400".encode()[:cut])]
    (whole,), (other,) = vocabulary.trees([vocabulary.ids_of(text)]), vocabulary.trees([ids])
    assert whole.fork[:, [0, 2]].tolist() == other.fork[: len(whole.fork), [0, 2]].tolist()
    assert len(whole.fork) > 5


def test_after_an_improbable_token_forks_are_needed_as_before():
    vocabulary = small_vocabulary()
    ids = vocabulary.ids_of("ab cab abcab bcabb ab" * 3)
    (tree,) = vocabulary.trees([ids])
    needed = []
    for nats in (0.0, 20.0, 45.0, 200.0):
        logits = 0.1 * torch.randn(len(ids), len(vocabulary.texts), generator=torch.Generator().manual_seed(0))
        logits[0, ids[0]] -= nats
        (read,) = forks_needed(of_logits(logits), vocabulary.table, torch.tensor(ids), [tree], 0.01)
        needed.append(read[tree.fork[:, 0] > 8].tolist())
    assert sum(needed[0]) > 5
    assert all(one == needed[0] for one in needed)


def test_tokens_that_no_tokenizer_would_write_are_read():
    vocabulary = small_vocabulary()
    ids = [*map(vocabulary.texts.index, (b"a", b"b", b"c", b"ab", b" ab"))]
    (tree,) = vocabulary.trees([ids])
    # Beside `a|b|c|ab`, `ab`, `abc` and `abc|a`, and `abcab` for the byte after it; within ` ab`, a space and ` a`.
    assert [vocabulary.texts[one] for one in tree.fork[:, 2]] == [b"ab", b"abc", b"a", b"abcab", b" ", b" a"]
    # Of all these up to the byte after `abcab`; then of those that the row's own tokens follow.
    for read, positions in (([True] * 6, slice(6)), ([True] * 3 + [False] + [True] * 2, slice(None))):
        some = replace(tree, read=numpy.array(read), column=COLUMN)
        spelled = spelled_of(some)
        model = drawn(vocabulary, len(spelled.places))
        found, _ = byte_logarithms(model, vocabulary.table, ids_at(spelled, ids), spelled)
        assert (found - dense_logs(model, vocabulary, ids, some)).abs()[positions].max() < 2e-5


@pytest.fixture
def assert_equals_dense(gradients):
    def check(vocabulary, ids, tree, student, divergence, chunk_tokens, pulls):
        generator = torch.Generator().manual_seed(2)
        missed = torch.rand(len(tree.token), generator=generator) * 0.7
        spelled = spelled_of(tree, missed)
        own = ids_at(spelled, ids)
        teacher_logs = torch.randn(len(tree.token), 257, generator=generator, dtype=torch.float64).log_softmax(-1)
        weights = torch.rand(len(own), generator=generator) * (spelled.places < COLUMN)
        nll_weight = torch.randn(len(own), generator=generator) if pulls else None
        _, mine = byte_logarithms(student, vocabulary.table, own, spelled)
        held = torch.maximum(missed, mine.float()) <= 0.5

        def streamed(student, teacher):
            given = vocabulary.table, spelled, Sampled(own, nll_weight), chunk_tokens, 0.5
            return Bytewise(student, teacher, divergence, *given).compared(weights)

        def dense(student, teacher):
            logs = dense_logs(student, vocabulary, ids, tree)
            per_byte = divergence.value(logs.log_softmax(-1), teacher_logs.log_softmax(-1)) * held
            log_own = logits_of(student)[:, : len(vocabulary.texts)].log_softmax(-1).gather(1, own[:, None])[:, 0]
            value = torch.zeros(len(own), dtype=torch.float64).index_add(0, spelled.token, per_byte)
            value = (value + (0 if nll_weight is None else -nll_weight * log_own)) * weights
            return PerToken(divergence=value, student_entropy=value, teacher_entropy=value)

        pair = student, LazyLogits(teacher_logs.float(), byte_head(own.device))
        (found, grads), (expected, right) = (
            gradients(compute, pair, upstream=lambda values: values.sum() / 3) for compute in (streamed, dense)
        )
        assert found.outcomes.sum() == len(tree.token)
        assert 0 < found.compared.sum() == held.sum() < len(tree.token)
        assert found.escaped.sum() == pytest.approx(float((torch.maximum(missed, mine.float()) * held).sum()), rel=1e-5)
        assert found.lost.abs().sum() == 0
        assert (found.divergence - expected.divergence).abs().max() < 1e-5 * expected.divergence.abs().max()
        for one, other in zip(grads, right, strict=True):
            assert (one - other).abs().max() < 3e-5 * other.abs().max()
            assert other.abs().max() > 1e-3

    return check


@pytest.mark.parametrize("chunk_tokens", [None, 1, 4])
@pytest.mark.parametrize(
    "divergence", [ReverseKL(), ForwardKL(), GeneralizedJSD(0.3), NegativeLogAcceptance()], ids=str
)
@pytest.mark.parametrize(("bias", "softcap", "pulls", "read"), [(False, None, False, "some"), (True, 2.0, True, "all")])
def test_values_and_gradients_equal_the_dense_ones(
    assert_equals_dense, divergence, chunk_tokens, bias, softcap, pulls, read
):
    vocabulary = small_vocabulary()
    ids, tree = row_of(vocabulary, read=read)
    student = drawn(vocabulary, len(spelled_of(tree).places), 1, bias, softcap)
    assert_equals_dense(vocabulary, ids, tree, student, divergence, chunk_tokens, pulls)


@pytest.mark.parametrize("chunk_tokens", [None, 3])
@pytest.mark.parametrize("spread", [1.0, 12.0])
def test_ranges_of_many_blocks_are_exact_however_improbable(assert_equals_dense, chunk_tokens, spread):
    vocabulary = wide_vocabulary()
    ids, tree = row_of(vocabulary, "abcabcaabbccabc", "some", "cab")
    student = drawn(vocabulary, len(spelled_of(tree).places), 10, spread=spread)
    least = logits_of(student)[:, : len(vocabulary.texts)].log_softmax(-1).amin()
    assert (least < -40) == (spread > 1)
    assert_equals_dense(vocabulary, ids, tree, student, ReverseKL(), chunk_tokens, pulls=True)


def said(language, vocabulary, text, most_missed):
    """What a model that is the language says of each next byte of a text, the bound, and the tokens that it reads."""
    ids = [*vocabulary.ids_of(text), vocabulary.tokenizer.eos_token_id]
    (tree,) = vocabulary.trees([ids])
    if most_missed < 1:
        own = of_logits(language.states(vocabulary, ids, tree))
        (read,) = forks_needed(own, vocabulary.table, torch.tensor(ids), [tree], most_missed)
        tree = replace(tree, read=read, column=COLUMN)
    spelled = spelled_of(tree)
    model = of_logits(language.states(vocabulary, ids, tree))
    logs, missed = byte_logarithms(model, vocabulary.table, ids_at(spelled, ids), spelled)
    return logs.double().log_softmax(-1), missed, len(ids), int(tree.read.sum())


@pytest.mark.parametrize("name", SMALL)
def test_one_language_in_two_tokenizers_has_no_divergence(name):
    language, *both = SMALL[name]
    texts = random.Random(1).choices(list(language.texts), list(language.texts.values()), k=12)
    for most_missed in (1.0, 0.1, 0.01, 0.001):
        total, positions, used, apart, tokens, added = 0.0, 0, 0, [], 0, 0
        for text in texts:
            true, sides = language.next_bytes(text), [said(language, one, text, most_missed) for one in both]
            held = torch.ones(len(true), dtype=torch.bool)
            for logs, missed, read, more in sides:
                variation = (logs.exp() - true).abs().sum(-1) / 2
                # An upper bound at every position, also where nothing is read beside the text.
                assert (variation <= missed + OUTCOMES * _FLOOR).all()
                held &= missed <= most_missed
                apart.append((variation, missed))
                tokens, added = tokens + read, added + more
            (mine, *_), (yours, *_) = sides
            total += float(((mine.exp() * (mine - yours)).sum(-1) * held).sum())
            positions, used = positions + len(held), used + int(held.sum())
        worst = max(float(variation[missed <= most_missed].max()) for variation, missed in apart)
        if most_missed == 1:
            assert total / positions > 0.1
            assert worst > 0.5
        elif most_missed <= 0.01:
            assert used / positions > 0.99
            assert total / positions < 1e-4
            assert worst < most_missed + OUTCOMES * _FLOOR
            assert 0 < added < tokens


@pytest.mark.parametrize(
    ("pattern", "merges", "letters", "seed"),
    [
        ("Llama 3", 100, " a\u4e2d1\n", 2),  # ` a` is a token, and a space before another letter is one by itself
        ("Llama 3", 100, " \u3000\u2003\n\u3001", 2),  # tokens across lines, up to the last line break
        ("Qwen2", 15, " \u3000\xa0\u3001\u2014", 3),  # spaces and punctuation that begin with the same bytes
        ("GPT-2", 6, " \n\ra", 3),
    ],
    ids=ascii,
)
def test_bound_holds_wherever_spaces_follow_spaces(pattern, merges, letters, seed):
    """Of random languages: a pre-tokenizer cuts spaces by what follows them."""
    draw = random.Random(seed)
    texts = ["".join(one) for length in range(1, 6) for one in product(letters, repeat=length)]
    language = Language({one: draw.random() ** 3 + 1e-3 for one in draw.sample(texts, 700)})
    vocabulary = ByteVocabulary.of(trained_pairs(list(language.texts), merges, pattern), "it")
    for text in draw.choices(list(language.texts), list(language.texts.values()), k=6):
        true, (tree,) = language.next_bytes(text), vocabulary.trees([vocabulary.ids_of(text)])
        assert (tree.fork[:, 0] < len(tree.token)).all()
        for most_missed in (1.0, 0.01):
            logs, missed, *_ = said(language, vocabulary, text, most_missed)
            variation = (logs.exp() - true).abs().sum(-1) / 2
            assert (variation <= missed + OUTCOMES * _FLOOR).all(), text
            assert (missed <= most_missed).all()


@pytest.mark.parametrize("chunk_tokens", [None, 16])
def test_step_costs_three_student_products_and_one_teacher_product(chunk_tokens):
    vocabulary = small_vocabulary()
    ids, tree = row_of(vocabulary, "abcab cab bcabb " * 8, "none", "")
    spelled, width, rows = spelled_of(tree), 512, len(vocabulary.texts)
    tokens = len(spelled.places)
    head = OutputHead(torch.randn(rows, width, requires_grad=True))
    student = LazyLogits(torch.randn(tokens, width, requires_grad=True), head)
    own, product = ids_at(spelled, ids), 2 * width * len(vocabulary.table.order)
    with counted_flops() as forward, torch.no_grad():
        logs, _ = byte_logarithms(student, vocabulary.table, own, spelled, chunk_tokens)
    # each tile but the first reads a few states more
    assert tokens * product <= forward.get_total_flops() < 1.2 * tokens * product
    with counted_flops() as step:
        pair = student, LazyLogits(logs, byte_head(own.device))
        given = ReverseKL(), vocabulary.table, spelled, Sampled(own), chunk_tokens, 1.0
        Bytewise(*pair, *given).compared(None).divergence.sum().backward()
    assert step.get_total_flops() == 3 * forward.get_total_flops()


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
    monkeypatch.setattr(ranges, "has_streams", lambda device: False)
    monkeypatch.setattr(ranges, "product_dtype", lambda side: torch.float32)  # there is no autocast on it
    vocabulary, device = small_vocabulary(), torch.device("meta")
    vocabulary.table.to(device)
    _, tree = row_of(vocabulary, "abcab cab bcabb " * 8, "some", "")
    spelled = spelled_of(tree)
    states = len(spelled.places)
    with device:
        student = LazyLogits(torch.ones(states, 5, requires_grad=True), OutputHead(torch.ones(300, 5)))
        teacher = LazyLogits(torch.ones(len(spelled.token), OUTCOMES), byte_head(device))
        sampled, weights = Sampled(torch.ones(states, dtype=torch.long), torch.ones(states)), torch.ones(states)
    with BetweenDevices() as watch:
        given = ReverseKL(), vocabulary.table, spelled, sampled, chunk_tokens, 1e-3
        Bytewise(student, teacher, *given).compared(weights).divergence.sum().backward()
    assert watch.found == {("aten::_to_copy", True): 1}
