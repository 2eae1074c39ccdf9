"""Rollouts with `transformers`: the tokens of plain `generate`, and how much faster a compiled step writes them."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import rollout as benchmark
import torch
from torch._dynamo.utils import counters

from gpu_checks.findings import Findings

FASTER = 5.0
"""Times TRL's speed, compiled, in batches of 1 to 8."""


def generation(found: Findings) -> None:
    """Plain steps, with rows of lengths that differ."""
    _greedy(found, compiled=False)
    _speeds(found, "ragged", (32,) if found.full else (2,), compiled=False)


def rollouts(found: Findings) -> None:
    """Compiled steps; the largest batch first, as smaller ones take its cache."""
    _greedy(found, compiled=found.full)
    _speeds(found, "even", (8, 1) if found.full else (2, 1), compiled=found.full)
    if not found.full:
        found.skip("compiled", "compiling takes minutes on a CPU; tests/rollout/test_hf_decode.py has its tokens")


def _speeds(found: Findings, lengths: str, batches: tuple[int, ...], compiled: bool) -> None:
    tokens = 16 if not found.full else 128 if lengths == "ragged" else 64
    args = _arguments(found, 28, 151936, dtype=torch.bfloat16, tokens=tokens, compiled=compiled)
    engines = dict(benchmark.engines(benchmark.make_model(args), args))
    for batch in batches:
        prompt_ids, wanted = benchmark.make_prompts(args, batch, lengths)
        seconds: dict[str, float] = {}
        for name, engine in engines.items():
            first = benchmark.timed(engine, prompt_ids, wanted)
            with recordings() as counted:
                seconds[name] = min(benchmark.timed(engine, prompt_ids, wanted) for _ in range(2))
            if name == "compiled":
                found.note(f"batch {batch}, compiled: time of the first rollout", first, "s")
                found.equal(f"batch {batch}, compiled: recorded after the first rollout", dict(counted), {})
        for name, spent in seconds.items():
            found.note(f"batch {batch}, {lengths}, {name}: tokens per second", sum(wanted) / spent)
            case, ratio = f"batch {batch}, {lengths}, {name}: speed over TRL's", seconds["trl"] / spent
            if name == "compiled":
                found.at_least(case, ratio, FASTER, "x", only_gpu=True)
            elif name == "ours":
                found.note(case, ratio, "x")


def _greedy(found: Findings, compiled: bool) -> None:
    """Two layers in float32, where no rounding decides between two tokens; rows leave one after the other."""
    args = _arguments(found, 2, 32000, dtype=torch.float32, tokens=48, compiled=compiled)
    prompt_ids, _ = benchmark.make_prompts(args, 4, "ragged")
    engines = dict(benchmark.engines(benchmark.make_model(args), args, do_sample=False))
    plain = engines.pop("trl")(prompt_ids)
    found.at_least("greedy: lengths that differ", len(set(map(len, plain))), 3)
    for name, engine in engines.items():
        for time in ("first", "second"):
            same = sum(a == b for a, b in zip(engine(prompt_ids), plain, strict=True))
            found.equal(f"greedy, {name}, {time} rollout: rows equal to generate's", same, len(plain))


def _arguments(found: Findings, layers: int, vocab: int, **given: Any) -> argparse.Namespace:
    """Arguments of `benchmarks/rollout.py`."""
    width, heads, groups = (1536, 12, 2) if found.full else (64, 2, 1)
    layers, vocab = (layers, vocab) if found.full else (1, 128)
    shape = {"width": width, "layers": layers, "heads": heads, "key_value_heads": groups, "vocab": vocab}
    return argparse.Namespace(device=found.device, vllm=False, prompt_tokens=32, **shape, **given)


@contextmanager
def recordings() -> Iterator[Counter[str]]:
    """Counts what is recorded inside: CUDA graphs, and graphs of Dynamo."""
    counted: Counter[str] = Counter()
    record, before = torch.cuda.graph.__enter__, counters["stats"]["unique_graphs"]

    def recording(self: Any) -> Any:
        counted["CUDA graphs"] += 1
        return record(self)

    with patch.object(torch.cuda.graph, "__enter__", recording):
        yield counted
    if new := counters["stats"]["unique_graphs"] - before:
        counted["compiled graphs"] = new
