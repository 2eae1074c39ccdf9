"""Of a checkpoint the head alone is read, whatever the architecture calls it; it is run once, whatever its size."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import serving, tiny
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BlenderbotConfig,
    CohereConfig,
    GraniteConfig,
    MBartConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoConfig,
    OPTConfig,
    PLBartConfig,
)

from trl_opsd.teacher import checkpoint_head
from trl_opsd.teacher.checkpoint_head import CheckpointHead
from trl_opsd.types import OutputHead

CPU = torch.device("cpu")


def of_config(config, **given):
    known = config().to_dict()
    sizes = {name: value for name, value in {**tiny._sizes(64), **given}.items() if name in known}
    return tiny.model(config(**sizes))


OPT = {"ffn_dim": 64, "word_embed_proj_dim": 64}

FAMILIES = {
    "qwen2, untied": partial(tiny.qwen2, 64),
    "qwen2, tied": partial(tiny.qwen2, 64, tie_word_embeddings=True),
    "gemma2, 1 + w and a cap": partial(tiny.gemma2, 64),
    "gpt2, LayerNorm with a bias": partial(tiny.gpt2, 64),
    "granite, logits divided": partial(of_config, GraniteConfig, logits_scaling=4.0),
    "cohere, logits multiplied": partial(of_config, CohereConfig, logit_scale=0.25),
    "olmo, a norm without weights": partial(of_config, OlmoConfig),
    "olmo2": partial(of_config, Olmo2Config),
    "mixtral": partial(of_config, MixtralConfig, num_local_experts=4),
    "opt, whose head calls what is inside of the backbone": partial(of_config, OPTConfig, **OPT),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_only_the_head_of_the_model_is_read(name, tmp_path):
    model = serving.spread_norms(FAMILIES[name]()).eval()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {file for key, file in index.items() if ".layers." not in key and ".h." not in key}
    removed = [file for file in set(index.values()) - needed if (tmp_path / file).unlink() is None]
    assert removed, "the layers are gone"

    found = CheckpointHead(str(tmp_path))
    head, own = found.head(torch.float32, CPU), OutputHead.of(model)
    assert torch.equal(head.weight, own.weight)
    assert (head.scale, head.softcap) == (own.scale, own.softcap)
    assert (head.bias is None) == (own.bias is None)
    assert head.weight.shape == (found.vocabulary, found.width)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_that_is_larger_than_memory_predicts_the_same(name, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_head, "_IN_MEMORY", 50_000)
    model = FAMILIES[name]().eval()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    rows = torch.arange(3, 43).view(2, 20)
    with torch.no_grad():
        expected = model(input_ids=rows).logits.log_softmax(-1)
    torch.testing.assert_close(checkpoint_head.predictions_of(str(tmp_path), {}, rows.tolist()), expected)


def test_a_checkpoint_that_is_not_whole_here_is_said_not_to_be_compared(tmp_path, caplog):
    tiny.qwen2(64).config.save_pretrained(tmp_path)
    assert checkpoint_head.predictions_of(str(tmp_path), {}, [[1, 2]]) is None
    assert "answers of its server are not compared" in caplog.text


@pytest.mark.parametrize("config", [BartConfig, MBartConfig, BlenderbotConfig, PLBartConfig])
def test_a_decoder_cut_from_an_encoder_decoder_is_accepted(config, tmp_path):
    sizes = {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 64}
    model = tiny.model(config(vocab_size=tiny.VOCABULARY, max_position_embeddings=256, is_decoder=True, **sizes))
    model.save_pretrained(tmp_path)
    head = CheckpointHead(str(tmp_path)).head(torch.float32, CPU)
    assert torch.equal(head.weight, OutputHead.of(model).weight)


def resaved(folder: Path, change) -> str:
    """The path of a checkpoint in one file, after a change of its tensors."""
    tiny.qwen2(64).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def test_names_may_have_another_prefix(tmp_path):
    for number, prefix in enumerate(("language_model.", "")):

        def renamed(tensors, prefix=prefix):
            return {f"{prefix}{name.removeprefix('' if prefix else 'model.')}": one for name, one in tensors.items()}

        found = CheckpointHead(resaved(tmp_path / str(number), renamed))
        assert torch.equal(found.head(torch.float32, CPU).weight, tiny.qwen2(64).lm_head.weight)


def test_a_stored_head_is_used_although_the_config_ties_it(tmp_path):
    """As transformers loads such a checkpoint: a fine-tune whose head was trained alone."""
    tiny.qwen2(64, tie_word_embeddings=True).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = torch.randn_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    local = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(local.lm_head.weight, tensors["lm_head.weight"])
    found = CheckpointHead(str(tmp_path))
    assert torch.equal(found.head(torch.float32, CPU).weight, local.lm_head.weight)


def without_head(tensors):
    return {name: one for name, one in tensors.items() if name != "lm_head.weight"}


BROKEN = {
    "no head": (without_head, "has no 'lm_head.weight'"),
    "quantised": (lambda found: {**found, "lm_head.weight": found["lm_head.weight"].char()}, "is not quantised"),
    "in float8": (
        lambda found: {**found, "lm_head.weight": found["lm_head.weight"].to(torch.float8_e4m3fn)},
        "is not quantised",
    ),
    "another size": (
        lambda found: {**found, "lm_head.weight": found["lm_head.weight"][:-1]},
        "expected floating-point",
    ),
}


@pytest.mark.refusal
@pytest.mark.parametrize("name", BROKEN)
def test_a_checkpoint_without_its_head_is_refused(name, tmp_path):
    change, said = BROKEN[name]
    with pytest.raises(ValueError, match=said):
        CheckpointHead(resaved(tmp_path, change))


@pytest.mark.refusal
def test_a_checkpoint_that_is_not_in_safetensors_is_refused(tmp_path):
    tiny.qwen2(64).config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has neither 'model.safetensors' nor .* pass a safetensors checkpoint"):
        CheckpointHead(str(tmp_path))
