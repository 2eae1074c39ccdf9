"""Tokens that branch off rows have the states that they have in rows of their own, or are not read."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from support import tiny

from trl_opsd.bytes.forks import ForkedRollout, Forking, forked_hidden
from trl_opsd.models.padding import distances
from trl_opsd.models.probes import Probed, find_batching
from trl_opsd.types import Rollout

ROWS = [([3, 5, 7], [11, 2, 9, 4, 6, 8, 1, 12, 10, 13, 15, 17, 21, 19]), ([30], [31, 32, 33])]
FORKS_OF = [([41, 42, 43, 44, 45], [2, 14, 9, 15, 13]), ([46], [0])]
"""Tokens, and what they follow: from 14 on, forks before them."""


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "tools"))
    return importlib.import_module("toys").toy


def forked():
    rollout = Rollout.of(*zip(*ROWS, strict=True), torch.device("cpu"))
    return ForkedRollout.branching(rollout, FORKS_OF)


def path(row, node):
    """The tokens of a row up to one of its nodes."""
    prompt, completion = ROWS[row]
    tokens, parents = FORKS_OF[row]
    if node < 14:
        return [*prompt, *completion[:node]]
    return [*path(row, parents[node - 14]), tokens[node - 14]]


def of_rows(model):
    """[states, H]: the states of both rows' completions and of their forks, each from a row of its own."""
    nodes = [
        (row, node) for row in range(2) for node in (*range(len(ROWS[row][1])), *range(14, 14 + len(FORKS_OF[row][0])))
    ]
    return nodes, torch.stack([model.base_model(torch.tensor([path(*one)])).last_hidden_state[0, -1] for one in nodes])


def agree(model):
    nodes, expected = of_rows(model)
    found_BCH = forked_hidden(model, forked())
    found = torch.stack([found_BCH[row, node] for row, node in nodes])
    assert found_BCH.shape[:2] == (2, 19)
    return found, expected


WINDOW = {"sliding_window": 6}
KINDS = {"llama": {}, "gpt2": {}, "gemma2": WINDOW, "gemma3_text": WINDOW, "mistral": WINDOW, "deepseek_v3": {}}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", KINDS)
def test_forks_have_the_states_of_rows_alone(toy, family, attention):
    """Rows are longer than the windows."""
    model = toy(family, 259).eval()
    model.set_attn_implementation(attention)
    for name, value in KINDS[family].items():
        setattr(model.config, name, value)
        for layer in model.modules():
            if getattr(layer, name, None) is not None and isinstance(getattr(layer, name), int):
                setattr(layer, name, value)
    forking = Forking("student", 0.01)
    Probed(model, "student").prove(find_batching, forking.probe)
    assert forking.works
    with torch.no_grad():
        found, expected = agree(model)
    assert distances(found, expected).max() < 1e-4


def test_gradients_through_forks_are_those_of_rows_alone():
    model = tiny.qwen2(32).double()
    weights = torch.randn(24, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    grads = []
    for number in range(2):
        model.zero_grad()
        states = agree(model)[number]
        (states * weights[: len(states)]).sum().backward()
        grads.append(torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None]))
    assert (grads[0] - grads[1]).abs().max() < 1e-6 * grads[1].abs().max()  # norms are computed in float32


@pytest.mark.parametrize("family", ["mamba", "recurrent_gemma", "bloom", "llama4_text"])
def test_families_that_cannot_are_read_without_forks(toy, family):
    model = toy(family, 259).eval()
    probed = Probed(model, "student")
    probed.prove(find_batching)
    PartialState()
    forking = Forking("student", 0.01)
    forking.probe(probed)
    assert not forking.works


def test_a_row_selected_has_its_own_forks():
    both = forked()
    one = both.select([1])
    assert one.forks == (FORKS_OF[1],)
    assert one.completion_ids.shape == (1, 15)
    assert both.sizes == [3 + 14 + 5, 1 + 3 + 1]
    assert one.cut() is one
    model = tiny.qwen2(32)
    with torch.no_grad():
        whole, alone = (forked_hidden(model, rows) for rows in (both, replace(one, lengths=None)))
    assert distances(alone[0, [0, 1, 2, 14]], whole[1, [0, 1, 2, 14]]).max() < 1e-5
