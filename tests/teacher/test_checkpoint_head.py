"""Of a checkpoint the head alone is read, whatever the architecture calls it; it is run once, whatever its size."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support import serving, tiny
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    GraniteConfig,
    OlmoConfig,
    OPTConfig,
)

from trl_opsd.teacher import checkpoint_head
from trl_opsd.teacher.checkpoint_head import CheckpointHead
from trl_opsd.types import OutputHead

CPU = torch.device("cpu")


def of_config(config, **given):
    known = config().to_dict()
    sizes = {name: value for name, value in {**tiny.sizes(64), **given}.items() if name in known}
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
    "opt, whose head calls what is inside of the backbone": partial(of_config, OPTConfig, **OPT),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_only_the_head_of_the_model_is_read(name, tmp_path, monkeypatch):
    """And a checkpoint that is larger than memory predicts the same."""
    monkeypatch.setattr(checkpoint_head, "_IN_MEMORY", 50_000)
    model = serving.spread_norms(FAMILIES[name]()).eval()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    ids = torch.arange(3, 43).view(2, 20)
    with torch.no_grad():
        expected = model(input_ids=ids).logits.log_softmax(-1)
    if transformers.__version__.startswith("5.10."):  # which computes nothing with weights on disk
        assert checkpoint_head.predictions_of(str(tmp_path), {}, ids.tolist()) is None
    else:
        torch.testing.assert_close(checkpoint_head.predictions_of(str(tmp_path), {}, ids.tolist()), expected)

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


def test_a_checkpoint_that_is_not_whole_here_is_said_not_to_be_compared(tmp_path, caplog):
    tiny.qwen2(64).config.save_pretrained(tmp_path)
    assert checkpoint_head.predictions_of(str(tmp_path), {}, [[1, 2]]) is None
    assert "its server is not verified" in caplog.text


def resaved(folder: Path, change, **given) -> str:
    """The path of a checkpoint in one file, after a change of its tensors."""
    tiny.qwen2(64, **given).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors", {"format": "pt"})
    return str(folder)


@pytest.mark.parametrize("prefix", ["language_model.", ""])
def test_names_may_have_another_prefix(tmp_path, prefix):
    def renamed(tensors):
        return {f"{prefix}{name if prefix else name.removeprefix('model.')}": one for name, one in tensors.items()}

    found = CheckpointHead(resaved(tmp_path, renamed))
    assert torch.equal(found.head(torch.float32, CPU).weight, tiny.qwen2(64).lm_head.weight)


def test_a_stored_head_is_used_although_the_config_ties_it(tmp_path):
    """As transformers loads such a checkpoint: a fine-tune whose head was trained alone."""
    trained = torch.randn(tiny.VOCABULARY, 64)
    path = resaved(tmp_path, lambda tensors: {**tensors, "lm_head.weight": trained}, tie_word_embeddings=True)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(path).lm_head.weight, trained)
    assert torch.equal(CheckpointHead(path).head(torch.float32, CPU).weight, trained)


def with_head(change):
    return lambda found: {**found, "lm_head.weight": change(found["lm_head.weight"])}


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda found: {name: one for name, one in found.items() if name != "lm_head.weight"}, "has no 'lm_head.weigh"),
        (with_head(lambda weight: weight.char()), "is not quantised"),
        (with_head(lambda weight: weight.to(torch.float8_e4m3fn)), "is not quantised"),
        (with_head(lambda weight: weight[:-1]), "expected floating-point"),
    ],
    ids=["no head", "quantised", "in float8", "another size"],
)
def test_a_checkpoint_without_its_head_is_refused(change, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        CheckpointHead(resaved(tmp_path, change))


@pytest.mark.refusal
def test_a_checkpoint_that_is_not_in_safetensors_is_refused(tmp_path):
    tiny.qwen2(64).config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has neither 'model.safetensors' nor"):
        CheckpointHead(str(tmp_path))
