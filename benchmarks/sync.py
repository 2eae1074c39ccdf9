"""Measures one weight sync into a colocated vLLM engine beside TRL's, in one process, on any device.

    python benchmarks/sync.py                                  # a small student on the CPU
    python benchmarks/sync.py --hidden 896 --layers 24 --vocab 151936 --dtype bfloat16

"calls" counts calls into the engine, bytes are those passed to it; seconds are medians over repeats, each with a reset
of the prefix cache and without the proof, which is timed separately. "drift" is the share of the frozen base weights
that are no longer bit-identical afterwards. Where TRL's sync cannot run, its row shows the error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from accelerate import Accelerator
from peft import LoraConfig, PeftModel, get_peft_model
from support.lone_host import LoneHost
from timing import median
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config
from trl.generation.vllm_generation import VLLMGeneration

from trl_opsd._compat.vllm.engine import VLLMEngine
from trl_opsd._compat.vllm.supported import LORA_RANKS
from trl_opsd.data.readers import PromptLimits
from trl_opsd.rollout.sync_proof import SyncProof
from trl_opsd.rollout.weight_sync import Stream, adapter_layers, adapter_of, adapter_rank, weights_of


def make_student(args: argparse.Namespace, folder: Path, lora: bool) -> Any:
    """A random student, saved and loaded, with an adapter if `lora`."""
    if not (folder / "config.json").exists():
        config = Qwen2Config(
            vocab_size=args.vocab, hidden_size=args.hidden, intermediate_size=4 * args.hidden,
            num_hidden_layers=args.layers, num_attention_heads=args.hidden // 64, num_key_value_heads=2,
            max_position_embeddings=512,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config, dtype=args.dtype).save_pretrained(folder)
    student = AutoModelForCausalLM.from_pretrained(folder).to(args.device)
    if lora:
        config = LoraConfig(r=args.rank, target_modules="all-linear", init_lora_weights=False)
        student = get_peft_model(student, config)
    return student


def drift(student: Any, before: dict[str, torch.Tensor]) -> float:
    """Share of the frozen weights that changed."""
    frozen = {name: part for name, part in student.named_parameters() if not part.requires_grad}
    changed = sum(int((part != before[name]).sum()) for name, part in frozen.items())
    return changed / max(sum(part.numel() for part in frozen.values()), 1)


def ours(
    student: Any, engine: VLLMEngine, apart: bool, dtype: torch.dtype
) -> tuple[Callable[[], None], dict[str, Any]]:
    """A function that runs one sync, and its calls and bytes."""
    took: dict[str, Any] = {}

    def gathered(parameters: list[torch.Tensor]) -> Any:
        return torch.no_grad()

    def sync() -> None:
        with torch.no_grad():
            if apart:
                layers, took["bytes"] = adapter_of(student, dtype, student.device, gathered)
                engine.load_adapter(layers)
            else:
                stream = Stream(weights_of(student), dtype, student.device, gathered)
                with stream as weights:
                    engine.load(weights)
                took["bytes"] = stream.bytes
            engine.forget_prefixes()
        took["calls"] = 1

    return sync, took


def trls(student: Any, engine: VLLMEngine) -> tuple[Callable[[], None], dict[str, Any]]:
    """TRL's own sync on the same engine: its class without its constructor, which would build another engine."""
    took: dict[str, Any] = {}
    runner = engine._worker.model_runner
    inside = SimpleNamespace(load_weights=None)
    model = runner.get_model()

    def load_weights(pairs: list[tuple[str, torch.Tensor]]) -> None:
        took["calls"] += 1
        took["bytes"] += sum(tensor.nbytes for _, tensor in pairs)
        model.load_weights(pairs)

    inside.load_weights = load_weights
    path = SimpleNamespace(model_executor=SimpleNamespace(
        driver_worker=SimpleNamespace(model_runner=SimpleNamespace(model=inside))
    ))  # fmt: skip
    generation = VLLMGeneration.__new__(VLLMGeneration)
    generation.model, generation.accelerator = student, Accelerator(cpu=student.device.type == "cpu")
    generation.mode, generation.enable_sleep_mode = "colocate", False
    generation._dist = SimpleNamespace(is_fsdp=False, gather_params=lambda parameters: torch.no_grad())
    generation.llm = SimpleNamespace(llm_engine=path, reset_prefix_cache=engine.forget_prefixes)

    def sync() -> None:
        took.update(calls=0, bytes=0)
        with torch.no_grad():
            generation.sync_weights()

    return sync, took


def measure(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    rows, engines = [], []  # kept: a deleted engine destroys vLLM's process groups, which its successor needs
    for what in ("everything", "lora, full", "lora, adapter"):
        student = make_student(args, folder, what != "everything")
        apart = what == "lora, adapter"
        adapter: dict[str, Any] = {}
        if apart:
            rank = next(size for size in LORA_RANKS if size >= adapter_rank(student))
            layers = list({name.rpartition(".")[2] for name in adapter_layers(student)})
            adapter = {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank, "lora_target_modules": layers}
        engine = VLLMEngine(
            args.vocab, (), model=str(folder), tokenizer=str(folder), dtype=args.dtype, max_model_len=256,
            max_num_seqs=8, seed=0, gpu_memory_utilization=0.3, model_impl="vllm", **adapter,
        )  # fmt: skip
        engines.append(engine)
        if apart:
            base = make_student(args, folder, lora=False)
            engine.load(base.state_dict().items())
        programs = {"ours": ours(student, engine, apart, args.dtype)}
        if not apart:
            programs["trl"] = trls(student, engine)
        for program, (sync, took) in programs.items():
            before = {name: part.detach().clone() for name, part in student.named_parameters()}
            row: dict[str, Any] = {"sent": what, "program": program}
            try:
                row["seconds"] = median(sync, student.device, args.repeats)
                row |= {**took, "drift": drift(student, before)}
                if program == "ours":
                    row |= proof(student, engine, args)
            except (AttributeError, KeyError, RuntimeError, ValueError) as error:
                row["error"] = f"{type(error).__name__}: {error}"
            rows.append(row)
    return rows


def proof(student: Any, engine: VLLMEngine, args: argparse.Namespace) -> dict[str, float]:
    """Seconds of the proof, and the gap it found."""
    host = LoneHost(student, PromptLimits(vocabulary=args.vocab, context=256, completion=16))
    proof = SyncProof(host, engine, args.dtype, isinstance(student, PeftModel))
    student.eval()
    with torch.no_grad():
        return {"proof_seconds": median(proof.check, student.device, args.repeats), "gap": proof.check()}


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'':22}{'calls':>7}{'MB':>9}{'seconds':>10}{'drift':>8}{'proof s':>10}{'gap':>9}"]
    for row in rows:
        line = f"{row['sent']:15}{row['program']:7}"
        if "error" in row:
            lines.append(f"{line}   does not run: {row['error']}")
            continue
        line += f"{row['calls']:7}{row['bytes'] / 1e6:9.2f}{row['seconds']:10.4f}{row['drift']:8.3f}"
        line += f"{row['proof_seconds']:10.4f}{row['gap']:9.1e}" if "gap" in row else ""
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dtype", type=lambda name: getattr(torch, name), default=torch.float32, metavar="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON instead of a table")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        backend = Tokenizer(models.WordLevel({"<eos>": 0}, unk_token="<eos>"))
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(folder)
        rows = measure(args, Path(folder))
    print(json.dumps(rows, indent=2) if args.json else table(rows))


if __name__ == "__main__":
    main()
