"""Syncs engines and a pooling teacher on vLLM's second model runner, which every GPU takes; prints JSON."""

from __future__ import annotations

import support.interpreted  # isort: skip  # noqa: F401  before vLLM

import gc
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from support import tiny
from vllm import LLM, PoolingParams
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm_lab import gap, lora, move, student, trainer

from trl_opsd._compat.vllm import engine, supported

KNOWN = 259
"""Ids from here on are masked, as those that a head padded to a round size has."""
CASES: dict[str, dict[str, Any]] = {
    "full, tied": {"shape": "qwen2", "tied": True, "vocab_size": 320},
    "full, mixture of experts": {"shape": "mixtral", "vllm_sync_check": "every"},
    "adapter": {"shape": "qwen2", "adapter": True},
    "adapter, tied": {"shape": "llama", "tied": True, "adapter": True},
}


def synced(folder: Path, shape: str, adapter: bool = False, tied: bool = False, **given: Any) -> dict[str, Any]:
    """Gaps between engine and student after a sync, after a change of the weights, and after another sync."""
    overrides = {name: given.pop(name) for name in ("vocab_size",) if name in given}
    model = student(folder / "student", shape, tied, **overrides)
    if overrides:
        with torch.no_grad():  # the ids without a token are the most likely
            model.lm_head.weight[KNOWN:] = 3 * model.lm_head.weight[: model.config.vocab_size - KNOWN]
    options = {"peft_config": lora(), "vllm_weight_sync": "adapter"} if adapter else {}
    made = trainer(
        folder,
        model=model,
        teacher_model=tiny.qwen2(48, seed=1, **overrides),
        **{"max_completion_length": 6, "vllm_sync_check": "never", **options, **given},
    )
    assert isinstance(made.rollout.engine._worker.model_runner, GPUModelRunner)
    prompts = made.tokenize(tiny.PROMPTS[:4])
    written = made.complete(prompts)
    gaps = [gap(made)]
    move(made)
    gaps.append(gap(made))
    written += made.complete(prompts)
    with torch.no_grad():
        likeliest = made.model.eval()(torch.tensor([prompts[0]])).logits[0, -1].argmax()
    gaps.append(gap(made))
    made.rollout.close()
    return {"gaps": gaps, "written": written, "likeliest": int(likeliest), "mode": made.rollout._mode}


@torch.no_grad()
def states(folder: Path) -> Iterator[float]:
    """Differences between a pooling teacher's states and the model's: in chunks, with a shared prefix, twice."""
    model = student(folder, "qwen2", max_position_embeddings=512)
    tiny.tokenizer().save_pretrained(folder)
    teacher = LLM(
        model=str(folder),
        runner="pooling",
        pooler_config={"task": "token_embed"},
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        distributed_executor_backend="uni",
    )
    assert teacher.llm_engine.vllm_config.use_v2_model_runner
    rows = [torch.randint(3, 250, (length,)).tolist() for length in (150, 40, 50, 7)]
    rows[2] = rows[0][:100] + rows[2]
    how = PoolingParams(task="token_embed", use_activation=False)
    for _ in range(2):
        answers = teacher.encode(
            [{"prompt_token_ids": row} for row in rows], how, pooling_task="token_embed", use_tqdm=False
        )
        for row, answer in zip(rows, answers, strict=True):
            expected = model.model(torch.tensor([row])).last_hidden_state[0]
            assert answer.outputs.data.shape == expected.shape
            yield float((answer.outputs.data.float() - expected).abs().max())


if __name__ == "__main__":
    torch.compiler.set_stance("force_eager")
    engine.vocabulary_mask = lambda vocabulary, placeholders: supported.vocabulary_mask(KNOWN, placeholders)
    with tempfile.TemporaryDirectory() as made:
        found = {}
        for name, case in CASES.items():
            folder = Path(made) / name.replace(" ", "-")
            folder.mkdir()
            found[name] = synced(folder, **case)
            gc.collect()
        found["pooling"] = list(states(Path(made) / "teacher"))
        print(json.dumps(found), flush=True)
    os._exit(0)
