"""Layers are dropped from models of several families; what is saved computes what skipping them does."""

from __future__ import annotations

import json

import prune
import pytest
import torch
import transformers
from support import tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

FULL, LINEAR = "full_attention", "linear_attention"
SIZES = {**tiny.sizes(32), "num_hidden_layers": 6, "head_dim": 16}
LINEAR_SIZES = {"layer_types": [LINEAR, LINEAR, FULL] * 2, "linear_num_key_heads": 2}
LINEAR_SIZES |= dict.fromkeys(("num_experts", "num_experts_per_tok", "linear_num_value_heads"), 4)
LINEAR_SIZES |= dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16)
LINEAR_SIZES |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8)
FAMILIES = {"llama": ("Llama", {"tie_word_embeddings": True}), "gpt2": ("GPT2", {})}
FAMILIES |= {"mixtral, as many experts as layers": ("Mixtral", {"num_local_experts": 6})}
FAMILIES |= {"qwen3_next": ("Qwen3Next", LINEAR_SIZES)}
IDS = torch.randint(3, 60, (24,), generator=torch.Generator().manual_seed(0))


def family(name):
    kind, given = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **given)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:  # at their own scale layers would hardly differ
            torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize("dropped", [[4], [1, 5]], ids=str)
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[] if one in ("llama", "qwen3_next") else pytest.mark.long) for one in FAMILIES]
)
def test_pruned_model_loads_and_generates_with_cache_as_without(name, dropped, tmp_path):
    types = getattr(family(name).config, "layer_types", None)
    prune.prune(family(name), dropped, tmp_path / "pruned", IDS)
    pruned = AutoModelForCausalLM.from_pretrained(tmp_path / "pruned")
    assert pruned.config.num_hidden_layers == len(prune.layers_of(pruned)[1]) == 6 - len(dropped)
    if types is not None:
        assert pruned.config.layer_types == [one for number, one in enumerate(types) if number not in dropped]
    batch = {"input_ids": IDS[None], "attention_mask": torch.ones(1, len(IDS)), "max_new_tokens": 16}
    with_cache, without = (pruned.generate(**batch, do_sample=False, use_cache=use) for use in (True, False))
    assert torch.equal(with_cache, without)
    if pruned.config.tie_word_embeddings:
        assert pruned.get_output_embeddings().weight is pruned.get_input_embeddings().weight


def test_change_of_states_is_a_mean_over_all_tokens():
    model, texts = family("gpt2").double(), [IDS[:6], IDS]
    with torch.no_grad():
        states = [model(ids[None], output_hidden_states=True).hidden_states for ids in texts]
    for size in (1, 2):
        found = prune.changes(model, texts, size)
        assert len(found) == 7 - size
        for first, value in enumerate(found[:-1]):  # the last of transformers' states is after the last norm
            cosines = [torch.cosine_similarity(one[first], one[first + size], dim=-1)[0] for one in states]
            assert value == pytest.approx(1 - torch.cat(cosines).mean().item(), abs=1e-12)


def test_layers_that_change_states_least_are_chosen():
    model = family("llama")
    for number in (1, 3, 4):
        for name, one in prune.layers_of(model)[1][number].named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                torch.nn.init.normal_(one, std=1e-2 if number > 1 else 1e-3)
    assert prune.chosen(model, [IDS], 1) == [1]
    assert prune.chosen(model, [IDS], 3) == [1, 3, 4]
    assert prune.chosen(model, [IDS], 2, block=True) == [3, 4]


def test_script_prunes_a_folder_by_rows_of_a_training(tmp_path, capsys, disk):
    rows, folder = tmp_path / "rows.jsonl", str(tmp_path / "pruned")
    messages = [[{"role": role, "content": "2+2=4"}] for role in ("user", "assistant")]
    some = [{"text": "2+2="}, {"prompt": "2+2="}, {"prompt": "2+2=", "completion": "4"}]
    some.append({"prompt": messages[0], "completion": messages[1]})
    rows.write_text("\n".join(map(json.dumps, some)))
    prune.main([disk.student, folder, "--texts", str(rows)])
    assert "parameters," in capsys.readouterr().out
    whole, pruned = map(AutoModelForCausalLM.from_pretrained, (disk.student, folder))
    assert pruned.config.num_hidden_layers == whole.config.num_hidden_layers - 1
    assert AutoTokenizer.from_pretrained(folder).chat_template
    rows.write_text("")
    with pytest.raises(ValueError, match="is empty"):
        prune.main([disk.student, folder, "--texts", str(rows)])
