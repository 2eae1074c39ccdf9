"""Students that vLLM holds differently from transformers: experts, fused layers, borrowed classes, quantised ones."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from support import tiny, vision_language

pytest.importorskip("vllm")

from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GPTNeoXConfig,
    PretrainedConfig,
    Starcoder2Model,
)
from vllm import LLM, SamplingParams
from vllm_lab import fails_halfway, gap, lora, move, student

from trl_opsd._compat.torchao import unquantized
from trl_opsd._compat.vllm.engine import VLLMEngine
from trl_opsd._compat.vllm.supported import has_head, may_have_head, why_no_adapter
from trl_opsd.errors import SyncError
from trl_opsd.rollout import vllm as backend
from trl_opsd.rollout import weight_sync

pytestmark = pytest.mark.vllm


def neox():
    sizes = {"vocab_size": 259, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return tiny.model(GPTNeoXConfig(**sizes, intermediate_size=64))


@pytest.mark.parametrize("shape", ["mixtral", "gpt_neox"])
def test_weights_are_sent_under_the_names_of_a_checkpoint(tmp_path, shape):
    """transformers keeps the experts of a layer in one tensor; vLLM reads them one by one and leaves out the rest."""
    model = student(tmp_path, shape) if shape == "mixtral" else neox()
    model.save_pretrained(tmp_path)
    checkpoint = load_file(tmp_path / "model.safetensors")
    how = torch.float32, torch.device("cpu"), lambda parts: nullcontext(), weight_sync.saved_by(model)
    stream = weight_sync.Stream(weight_sync.weights_of(model), *how)

    announced = stream.announced()
    with stream as drawn:
        sent = dict(drawn)
    assert [(name, "float32", list(tensor.shape)) for name, tensor in sent.items()] == announced
    assert sent.keys() == checkpoint.keys()
    assert all(torch.equal(sent[name], checkpoint[name]) and sent[name].is_contiguous() for name in sent)
    assert stream.bytes == sum(tensor.nbytes for tensor in sent.values())
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight" if shape == "mixtral" else "embed_out.weight"
    assert name in sent
    assert name not in model.state_dict()


@pytest.mark.long
def test_an_engine_computes_with_the_experts_it_is_sent(make, monkeypatch):
    make()  # an engine without experts, as the first of the process
    trainer = make("mixtral")
    prompts = trainer.tokenize(tiny.PROMPTS)
    for _ in range(2):
        trainer.complete(prompts)
        assert gap(trainer) <= 1e-4
        move(trainer)
        assert gap(trainer) > 1e-3
    with monkeypatch.context() as patch:
        patch.setattr(VLLMEngine, "load", fails_halfway(VLLMEngine.load, 20))
        with pytest.raises(RuntimeError, match="the engine broke"):
            trainer.complete(prompts)
    gap(trainer)  # the engine still generates something
    trainer.complete(prompts)
    assert gap(trainer) <= 1e-4


def test_layers_without_adapter_support_are_known_before_construction():
    for family, layer, why in [
        ("glm4", "mlp.gate_up_proj", "split into gate_proj and up_proj"),
        ("glm4", "mlp.down_proj", None),
        ("phi3", "mlp.gate_up_proj", None),
        ("llama", "mlp.gate_proj", None),
        ("gpt2", "attn.c_attn", "does not support LoRA"),
        ("qwen3_moe", "self_attn.q_proj", "runs a mixture of experts with Triton"),
    ]:
        config = AutoConfig.for_model(family)
        config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
        found = why_no_adapter(config, "auto", [f"model.layers.0.{layer}"])
        assert found is None if why is None else why in found


@pytest.mark.long
def test_vllm_leaves_the_class_of_a_student_unchanged(make, tmp_path):
    """vLLM has no model of its own for Starcoder 2, and adapts the class of transformers in place."""
    before, bases = dict(vars(Starcoder2Model)), Starcoder2Model.__bases__
    for name in "ab":
        model = student(tmp_path / name, "starcoder2")
        trainer = make(model=model)
        trainer.complete(trainer.tokenize(tiny.PROMPTS))
        assert gap(trainer) <= 1e-4
        assert dict(vars(Starcoder2Model)) == before
        assert Starcoder2Model.__bases__ == bases


@pytest.mark.parametrize("sync", [pytest.param("full", marks=pytest.mark.long), "adapter"])
def test_a_vision_language_student_is_synced_and_generates_no_placeholder(make, tmp_path, sync):
    vision_language.model("idefics3", 64, 0, num_attention_heads=2, head_dim=32).save_pretrained(tmp_path / "student")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "student")
    adapter = {"peft_config": lora(target_modules=r".*text_model.*(q|v)_proj")} if sync == "adapter" else {}
    trainer = make(model=model, temperature=1e-3, **adapter)
    assert trainer.rollout._mode == sync
    prompts = trainer.tokenize(tiny.PROMPTS)
    before = trainer.complete(prompts)
    assert gap(trainer) <= 1e-4
    move(trainer)
    trainer.complete(prompts)
    assert gap(trainer) <= 1e-4

    head = trainer.model.get_output_embeddings().weight
    with torch.no_grad():
        head[vision_language.PLACEHOLDER] = 3 * head[before[0][0]]
    trainer.rollout._base_sent = None
    written = trainer.complete(prompts)
    assert all(vision_language.PLACEHOLDER not in ids for ids in written)


def test_whether_a_model_has_a_separate_head_is_known():
    for where in ("", "language_model", "model.text"):  # as in Gemma 3, whose language model has a module of its own
        root = inner = nn.Module()
        for name in filter(None, where.split(".")):
            inner.add_module(name, nn.Module())
            inner = inner.get_submodule(name)
        assert not has_head(root)
        inner.add_module("lm_head", nn.Linear(2, 3))
        assert has_head(root)
    for architecture, there in {
        "Gemma2ForCausalLM": False,
        "CohereForCausalLM": False,
        "Qwen2ForCausalLM": True,
        "MistralForCausalLM": True,  # through its base class
        "Idefics3ForConditionalGeneration": True,
        "Unheard": True,
    }.items():
        assert may_have_head(PretrainedConfig(architectures=[architecture], name_or_path="student")) is there


@pytest.mark.long
@pytest.mark.refusal
def test_an_unknown_architecture_is_refused_and_later_engines_work(make, tmp_path, monkeypatch):
    monkeypatch.setattr(backend, "VLLMEngine", VLLMEngine)
    with pytest.raises(ValueError, match="are not supported for now"):
        make("phimoe")
    monkeypatch.undo()
    trainer = make(model=student(tmp_path / "other"))
    trainer.complete(trainer.tokenize(["a"]))
    assert gap(trainer) <= 1e-4


# ---- Students that compute with quantised weights -----------------------------------------------------------------

INT4 = {"student_quantization": "int4", "learning_rate": 1e-3}


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize("given", [{}, {"peft_config": lora()}])
def test_proof_fails_where_latent_weights_are_sent(make, monkeypatch, given):
    monkeypatch.setattr(weight_sync, "fake_quantized", lambda model: {})
    trainer = make(**INT4, **given)
    with pytest.raises(SyncError, match="times what rounding in float32 explains"):
        trainer.complete(trainer.tokenize(["a"]))


@pytest.mark.long
def test_server_gets_quantised_weights(serve):
    trainer = serve(**INT4)
    for _ in range(2):
        trainer.train()
        trainer.complete(trainer.tokenize(tiny.PROMPTS))
    assert max(tiny.logged(trainer, "rollout/logprob_gap")) < 1e-4


@pytest.mark.long
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
