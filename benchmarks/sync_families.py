"""Sends toy students of many families to a vLLM engine, in every way there is, and says how far apart the two are.

    python benchmarks/sync_families.py [family ...] [--json FILE]

Each case is a new engine: all weights, an adapter apart, an adapter of DoRA worked in; head tied or not; float32 or
bfloat16. What is refused, and what does not come up, is printed with its reason. Compilation is off, to be quick.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import tiny
import torch
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM

from trl_opsd import OPSDTrainer
from trl_opsd._compat import vllm

SIZES = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "head_dim": 32, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {
    "moe_intermediate_size": 64, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "shared_expert_intermediate_size": 64,
}  # fmt: skip
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256, "n_inner": 128, "vocab_size": 320}
PLAIN = (
    "llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 stablelm starcoder2 olmo olmo2 olmo3 granite cohere "
    "cohere2 glm glm4 smollm3 exaone4 nemotron ernie4_5 seed_oss hunyuan_v1_dense gpt_neox apertus arcee"
)
SPARSE = "mixtral qwen2_moe qwen3_moe olmoe granitemoe gpt_oss glm4_moe phimoe"
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(PLAIN.split(), SIZES),
    **dict.fromkeys(SPARSE.split(), SIZES | EXPERTS),
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gptj": {**GPT, "rotary_dim": 16},
    "bloom": {**SIZES, "n_layer": 2, "n_head": 2},
    "opt": {**SIZES, "ffn_dim": 128, "word_embed_proj_dim": 64},
    "falcon": {**SIZES, "new_decoder_architecture": True},
}
"""What a config of each is made from; what it does not know of that it ignores."""

WAYS = {"everything": (None, "auto"), "adapter": ({}, "auto"), "dora": ({"use_dora": True}, "full")}


def student(family: str, tied: bool, dtype: torch.dtype, folder: Path) -> Any:
    """Saved and loaded again, as a user has it."""
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
    """The way that was taken, and the largest difference of log-probabilities after a second sync, in nats."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--heads", nargs="+", default=["untied", "tied"])
    args = parser.parse_args()
    vllm.LLM = partial(vllm.LLM, enforce_eager=True)
    for family, way, head, dtype in itertools.product(args.families, WAYS, args.heads, args.dtypes):
        case: dict[str, Any] = {"family": family, "way": way, "head": head, "dtype": dtype}
        try:
            case |= measure(family, way, head == "tied", getattr(torch, dtype))
        except Exception as error:
            case["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        print(*case.values(), flush=True)
        if args.json:
            with args.json.open("a") as lines:
                lines.write(json.dumps(case) + "\n")


if __name__ == "__main__":
    main()
