"""Measures rollouts of one model on the same prompts with each engine, in one process, on any device.

    python benchmarks/rollout.py                                   # a small model, batches of 1, 8 and 64
    python benchmarks/rollout.py --width 896 --layers 24 --heads 14 --key-value-heads 2 --vocab 151936 --dtype bfloat16

"trl" is `generate` as TRL calls it, "ours" is `HFRollout`, "compiled" the same with `compile=True` (measured on an
accelerator, or with --compiled), "vllm" is left out where it is not installed. All sample at temperature 1.

Every engine generates the same lengths: all equal to --tokens ("even"), or geometric with a mean of an eighth of it,
capped there ("ragged"). For the engines of `transformers` a logits processor masks the end token before that length and
forces it then; it reads the length from the row's own prompt, so it works whichever rows are left. vLLM gets the length
as `min_tokens` and `max_tokens`. Times are medians over interleaved repeats after a warm-up; "rows per token" is the
number of rows over all forward passes, divided by the number of completion tokens.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import timing
import torch
from common import device, options, qwen2, show
from support.lone_host import LoneHost
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.utils import logging

from trl_opsd import HFRollout
from trl_opsd.data.readers import PromptLimits
from trl_opsd.types.rollout import cut_after_end

END = 0
BASE = 1000
"""A prompt begins with the length of its completion, as two digits of this base."""

Engine = Callable[[list[list[int]]], list[list[int]]]


class WantedLength(LogitsProcessor):
    """Ends each row at exactly the length that its prompt states."""

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.size(1) < 2:  # a trial of the rollout
            return scores
        wanted = (input_ids[:, 0] - 1) * BASE + input_ids[:, 1] - 1
        last = input_ids.size(1) - self._prompt_tokens + 1 >= wanted
        scores[:, END] = -torch.inf
        scores[last] = -torch.inf
        scores[last, END] = 0.0
        return scores


def make_model(args: argparse.Namespace) -> Any:
    shape = {"num_key_value_heads": args.key_value_heads, "tie_word_embeddings": True}
    shape |= {"bos_token_id": None, "eos_token_id": END, "pad_token_id": None}
    model: Any = qwen2(args.width, args.layers, args.vocab, heads=args.heads, dtype=args.dtype, on=args.device, **shape)
    model.eval()
    processors = model._get_logits_processor
    ends = LogitsProcessorList([WantedLength(args.prompt_tokens)])
    model._get_logits_processor = lambda *given, **options: LogitsProcessorList([*processors(*given, **options), *ends])
    return model


def make_prompts(args: argparse.Namespace, batch: int, lengths: str) -> tuple[list[list[int]], list[int]]:
    generator = torch.Generator().manual_seed(batch)
    wanted = [args.tokens] * batch
    if lengths == "ragged":
        geometric = torch.empty(batch).geometric_(8 / args.tokens, generator=generator)
        wanted = geometric.clamp(max=args.tokens).int().tolist()
    tokens = torch.randint(1, args.vocab, (batch, args.prompt_tokens - 2), generator=generator).tolist()
    return [[n // BASE + 1, n % BASE + 1, *ids] for n, ids in zip(wanted, tokens, strict=True)], wanted


def host_of(model: Any, args: argparse.Namespace, do_sample: bool = True) -> LoneHost:
    """A minimal trainer for `HFRollout`."""
    sampling = GenerationConfig(
        max_new_tokens=args.tokens,
        do_sample=do_sample,
        top_k=0,
        eos_token_id=END,
        pad_token_id=END,
        disable_compile=True,
    )
    return LoneHost(model, PromptLimits(vocabulary=args.vocab, context=None, completion=args.tokens), sampling)


def engines(model: Any, args: argparse.Namespace, do_sample: bool = True) -> Iterator[tuple[str, Engine]]:
    host = host_of(model, args, do_sample)

    def trl(prompt_ids: list[list[int]]) -> list[list[int]]:
        written = model.generate(**host.pad_prompts(prompt_ids), generation_config=host.generation_config)
        return [cut_after_end(ids, {END}) for ids in written[:, args.prompt_tokens :].tolist()]

    def ours(compile: bool) -> Engine:
        rollout = HFRollout(compile=compile)
        rollout.bind(host)
        return lambda prompt_ids: rollout.complete(prompt_ids, 0)

    yield "trl", trl
    yield "ours", ours(False)
    if args.compiled:
        yield "compiled", ours(True)
    if args.vllm:
        yield "vllm", make_vllm(model, args)


def make_vllm(model: Any, args: argparse.Namespace) -> Engine:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engine = LLM(
            folder,
            skip_tokenizer_init=True,
            dtype=args.dtype,
            max_model_len=args.prompt_tokens + args.tokens,
            gpu_memory_utilization=0.5,
            enable_prefix_caching=False,
            enforce_eager=torch.device(args.device).type == "cpu",
            disable_log_stats=True,
        )

    def complete(prompt_ids: list[list[int]]) -> list[list[int]]:
        wanted = [(ids[0] - 1) * BASE + ids[1] - 1 for ids in prompt_ids]
        how = [SamplingParams(max_tokens=n, min_tokens=n, ignore_eos=True, detokenize=False) for n in wanted]
        prompts = [{"prompt_token_ids": ids} for ids in prompt_ids]
        return [list(one.outputs[0].token_ids) for one in engine.generate(prompts, how, use_tqdm=False)]

    return complete


def timed(engine: Engine, prompt_ids: list[list[int]], wanted: list[int]) -> float:
    gc.collect()
    torch.manual_seed(0)
    start = time.perf_counter()
    written = engine(prompt_ids)  # lists of ints: the device is done
    seconds = time.perf_counter() - start
    assert [len(ids) for ids in written] == wanted, "an engine that writes other lengths is not comparable"
    return seconds


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    model, rows = make_model(args), []
    decoded: list[int] = []
    model.register_forward_pre_hook(
        lambda module, given, options: decoded.append(len(options["input_ids"])), with_kwargs=True
    )
    candidates = dict(engines(model, args))
    for batch in args.batches:
        for lengths in ("even", "ragged"):
            prompt_ids, wanted = make_prompts(args, batch, lengths)
            times: dict[str, list[float]] = {name: [] for name in candidates}
            counts: dict[str, int] = {}
            for repeat in range(args.repeats + 1):
                for name, engine in candidates.items():
                    decoded.clear()
                    seconds = timed(engine, prompt_ids, wanted)
                    counts[name] = sum(decoded)
                    times[name] += [seconds] if repeat else []
            for name, spent in times.items():
                row: dict[str, Any] = {"batch": batch, "lengths": lengths, "engine": name}
                row["tokens_per_second"] = sum(wanted) / statistics.median(spent)
                row["speed_over_trl"] = timing.ratio(times["trl"], spent)
                row["rows_per_token"] = counts[name] / sum(wanted) if counts[name] else None
                rows.append(row)
    return rows


def main() -> None:
    args = options(
        __doc__,
        batches=[1, 8, 64],
        tokens=128,
        prompt_tokens=32,
        width=256,
        layers=6,
        heads=4,
        key_value_heads=2,
        vocab=32000,
        dtype=torch.float32,
        device=device(),
        repeats=3,
        compiled=device().type != "cpu",
        vllm=find_spec("vllm") is not None,
    )
    logging.set_verbosity_error()
    show(measure(args), args.json)


if __name__ == "__main__":
    main()
