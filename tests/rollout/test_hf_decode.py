"""Our decoding loop against that of `generate`; `test_hf.py` has it with the options of a trainer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support import tiny
from torch.nn import functional
from transformers import GenerationConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trl_opsd.rollout.decode import RaggedDecoding, obstacle
from trl_opsd.types.rollout import cut_after_end

ENDS = list(range(0, tiny.VOCABULARY, 12))
"""So many end tokens that the rows of a batch end one after the other."""


def prompts(rows: int = 12) -> dict[str, torch.Tensor]:
    """Prompts of 1 to 9 tokens, left-padded."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, tiny.VOCABULARY, (rows, 9), generator=generator)
    lengths = torch.arange(rows) % 9 + 1
    mask = (torch.arange(9) >= 9 - lengths[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def options(ends: list[int] = ENDS, **given: Any) -> GenerationConfig:
    given = {"do_sample": False, "disable_compile": True, **given}
    return GenerationConfig(max_new_tokens=24, eos_token_id=ends, pad_token_id=0, **given)


def plain(model: Any, inputs: dict[str, torch.Tensor], config: GenerationConfig) -> list[list[int]]:
    torch.manual_seed(0)
    written = model.generate(**inputs, generation_config=config)[:, inputs["input_ids"].size(1) :].tolist()
    return [cut_after_end(ids, config.eos_token_id) for ids in written]


def ragged(model: Any, inputs: dict[str, torch.Tensor], config: GenerationConfig, **seen: Any) -> list[list[int]]:
    torch.manual_seed(0)
    rooms = [config.max_new_tokens] * len(inputs["input_ids"])
    loop = RaggedDecoding(max_new_tokens=rooms, collective=False)
    return model.generate(**inputs, generation_config=config, custom_generate=loop, **seen)


def test_masked_token_reads_each_shared_key_once(monkeypatch):
    model, shapes = tiny.qwen2(num_attention_heads=4, num_key_value_heads=2), []
    attend = functional.scaled_dot_product_attention

    def spy(query, key, *given, attn_mask=None, **more):
        shapes.append((attn_mask is not None, query.shape[1:3], key.size(1)))
        return attend(query, key, *given, attn_mask=attn_mask, **more)

    expected = plain(model, prompts(), options())
    monkeypatch.setattr(functional, "scaled_dot_product_attention", spy)
    assert ragged(model, prompts(), options()) == expected
    assert set(shapes) == {(True, (4, 9), 4), (True, (2, 2), 2)}, "prefill, and tokens after it"
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward, "ours is left nowhere"


@pytest.mark.parametrize("do_sample", [False, True])
def test_nan_logits_are_an_error(do_sample):
    model = tiny.qwen2().eval()
    with torch.no_grad():
        model.get_output_embeddings().weight[17] = math.nan
    with pytest.raises(FloatingPointError, match="token 1 of row 0 are NaN"):
        ragged(model, prompts(), options(do_sample=do_sample, top_k=0))


def test_options_that_the_loop_does_not_support_are_recognised():
    model = tiny.qwen2()
    assert obstacle(model, options()) is None
    for given, reason in [
        ({"num_beams": 2}, "beam_search"),
        ({"prompt_lookup_num_tokens": 2}, "assisted_generation"),
        ({"stop_strings": ["x"]}, "stop_strings"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"cache_implementation": "quantized"}, "quantized"),
        ({"cache_implementation": "offloaded"}, "offloaded"),
        ({"use_cache": False}, "use_cache"),
    ]:
        assert reason in obstacle(model, options(**given))
    model.generation_config.guidance_scale = 2.0
    assert "guidance_scale" in obstacle(model, options())
