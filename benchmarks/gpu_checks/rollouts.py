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


def rollouts(found: Findings) -> None:
    _greedy(found)
    shape: dict[str, Any] = {"width": 1536, "layers": 28, "heads": 12, "key_value_heads": 2, "vocab": 151936}
    batches = (8, 1)
    if not found.full:
        shape, batches = {"width": 64, "layers": 1, "heads": 2, "key_value_heads": 1, "vocab": 128}, (2, 1)
    args = _arguments(found, **shape, dtype=torch.bfloat16, tokens=64 if found.full else 16)
    engines = dict(benchmark.engines(benchmark.make_model(args), args))
    for batch in batches:  # the largest first: smaller ones take its cache
        prompt_ids, wanted = benchmark.make_prompts(args, batch, "even")
        seconds: dict[str, float] = {}
        for name, engine in engines.items():
            first = benchmark.timed(engine, prompt_ids, wanted)
            with recordings() as counted:
                seconds[name] = min(benchmark.timed(engine, prompt_ids, wanted) for _ in range(2))
            if name == "compiled":
                found.note(f"batch {batch}, compiled: time of the first rollout", first, "s")
                found.equal(f"batch {batch}, compiled: recorded after the first rollout", dict(counted), {})
        for name, spent in seconds.items():
            found.note(f"batch {batch}, {name}: tokens per second", sum(wanted) / spent)
            case, ratio = f"batch {batch}, {name}: speed over TRL's", seconds["trl"] / spent
            if name == "compiled":
                found.at_least(case, ratio, FASTER, "x", only_gpu=True)
            elif name == "ours":
                found.note(case, ratio, "x")
    if not found.full:
        found.skip("compiled", "compiling takes minutes on a CPU; tests/rollout/test_hf_decode.py has its tokens")


def _greedy(found: Findings) -> None:
    """Two layers in float32, where no rounding decides between two tokens; rows leave one after the other."""
    shape = {"width": 1536, "layers": 2, "heads": 12, "key_value_heads": 2, "vocab": 32000}
    if not found.full:
        shape = {"width": 64, "layers": 1, "heads": 2, "key_value_heads": 1, "vocab": 128}
    args = _arguments(found, **shape, dtype=torch.float32, tokens=48)
    prompt_ids, _ = benchmark.make_prompts(args, 4, "ragged")
    engines = dict(benchmark.engines(benchmark.make_model(args), args, do_sample=False))
    plain = engines.pop("trl")(prompt_ids)
    found.at_least("greedy: lengths that differ", len(set(map(len, plain))), 3)
    for name, engine in engines.items():
        for time in ("first", "second"):
            same = sum(a == b for a, b in zip(engine(prompt_ids), plain, strict=True))
            found.equal(f"greedy, {name}, {time} rollout: rows equal to generate's", same, len(plain))


def _arguments(found: Findings, **given: Any) -> argparse.Namespace:
    """Arguments of `benchmarks/rollout.py`."""
    return argparse.Namespace(device=found.device, compiled=found.full, vllm=False, prompt_tokens=32, **given)


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
