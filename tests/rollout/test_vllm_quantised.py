"""vLLM generates with the weights that a quantised student computes with, and loads what it has saved."""

from __future__ import annotations

import pytest
import torch
from support import tiny

pytest.importorskip("vllm")

from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams
from vllm_lab import gap, lora, student

from trl_opsd._compat.torchao import unquantized
from trl_opsd.errors import SyncError
from trl_opsd.rollout import weight_sync

pytestmark = [pytest.mark.vllm, pytest.mark.long]
INT4 = {"student_quantization": "int4", "learning_rate": 1e-3}


@pytest.mark.parametrize("kind", [None, "adapter", "full"])
def test_engine_writes_as_the_quantised_student(make, kind):
    given = {} if kind is None else {"peft_config": lora(), "vllm_weight_sync": kind}
    trainer = make(max_completion_length=6, **INT4, **given)
    for _ in range(2):
        trainer.train()
        trainer.complete(trainer.tokenize(["a"]))
        synced = gap(trainer)
        with unquantized(trainer.model):
            assert gap(trainer) > 1e-2
        assert synced <= 1e-4


@pytest.mark.parametrize("given", [{}, {"peft_config": lora()}])
def test_proof_fails_where_latent_weights_are_sent(make, monkeypatch, given):
    monkeypatch.setattr(weight_sync, "fake_quantized", lambda model: {})
    trainer = make(**INT4, **given)
    with pytest.raises(SyncError, match="times what rounding in float32 explains"):
        trainer.complete(trainer.tokenize(["a"]))


def test_server_gets_quantised_weights(serve):
    trainer = serve(**INT4)
    for _ in range(2):
        trainer.train()
        trainer.complete(trainer.tokenize(tiny.PROMPTS))
    assert max(tiny.logged(trainer, "rollout/logprob_gap")) < 1e-4


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("tied", [False, True])
def test_engine_loads_the_saved_student(make, tmp_path, kind, tied):
    dtype = "bfloat16" if kind == "int4" else "float32"  # which vLLM's kernel for four bits on a CPU takes
    model = student(tmp_path / "student", tied=tied).to(getattr(torch, dtype))
    trainer = make(model=model, student_quantization=kind, learning_rate=1e-3, use_vllm=False)
    trainer.train()
    trainer.save_model(tmp_path / "final")
    ids = trainer.tokenize(tiny.PROMPTS[:4])
    engine = LLM(
        str(tmp_path / "final" / "quantized"),
        max_model_len=64,
        gpu_memory_utilization=0.1,
        enforce_eager=True,
        num_gpu_blocks_override=256,
        dtype=dtype,
    )
    greedy = SamplingParams(max_tokens=12, temperature=0, logprobs=0)
    found = [one.outputs[0] for one in engine.generate([{"prompt_token_ids": one} for one in ids], greedy)]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "final" / "quantized")
    for prompt, one in zip(ids, found, strict=True):
        written, logprobs = list(one.token_ids), [next(iter(each.values())).logprob for each in one.logprobs]
        log = model(torch.tensor([[*prompt, *written]])).logits[0].float().log_softmax(-1)[len(prompt) - 1 : -1]
        own = log.gather(1, torch.tensor(written)[:, None])[:, 0]
        assert float((own - torch.tensor(logprobs)).abs().mean()) < (0.05 if kind == "int4" else 1e-4)
