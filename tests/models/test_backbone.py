"""Hidden states are read at the positions that predict the completion, and the head is checked against the logits."""

from __future__ import annotations

import copy
import random
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import tiny, vision_language
from transformers import CohereConfig, GraniteConfig

from trl_opsd import HFRollout
from trl_opsd.data.images import read_with_images
from trl_opsd.models.backbone import backbone_of, compiled, completion_hidden, hidden_states, layer_list
from trl_opsd.models.padding import BatchPolicy
from trl_opsd.models.probes import Probed, check_head
from trl_opsd.types import Rollout
from trl_opsd.types.rollout import PromptIds

FAMILIES = [tiny.qwen2, tiny.llama, tiny.gemma2, tiny.gpt2]
OF_AXES = ["qwen2_vl", "qwen3_vl", "qwen3_5"]


def rollout(padding: int = 0) -> Rollout:
    """Two rows: a prompt of 4 and one of 2, completions of 3 and 2; `padding` further columns on either side."""
    generator = torch.Generator().manual_seed(0)
    prompt_mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    completion_mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    prompt_ids = torch.randint(3, 259, (2, 4), generator=generator) * prompt_mask
    completion_ids = torch.randint(3, 259, (2, 3), generator=generator) * completion_mask
    left, right = torch.zeros(2, padding, dtype=torch.long), torch.zeros(2, padding, dtype=torch.long)
    completion_mask = torch.cat([completion_mask, right], 1)
    return Rollout(
        prompt_ids=torch.cat([left, prompt_ids], 1),
        prompt_mask=torch.cat([left, prompt_mask], 1),
        completion_ids=torch.cat([completion_ids, right], 1),
        completion_mask=completion_mask,
        weights=completion_mask.float(),
    )


@pytest.mark.parametrize("make", FAMILIES)
@pytest.mark.parametrize("padding", [0, 5])
def test_a_padded_row_has_the_hidden_states_it_has_alone(make, padding):
    model = make().eval()
    padded = rollout(padding)
    with torch.no_grad():
        hidden = completion_hidden(model, padded)
        for row in range(2):
            prompt = padded.prompt_ids[row][padded.prompt_mask[row] == 1]
            completion = padded.completion_ids[row][padded.completion_mask[row] == 1]
            alone = model.base_model(input_ids=torch.cat([prompt, completion])[None]).last_hidden_state[0]
            expected = alone[len(prompt) - 1 : -1]
            torch.testing.assert_close(hidden[row, : len(completion)], expected, rtol=1e-4, atol=1e-5)


def test_columns_beyond_a_row_are_masked():
    """Also of a row that ends in the last column, behind which the longer one has more."""
    model, masks = tiny.qwen2().eval(), []
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1, 1]])
    rows = tiny.rollout(mask[:, :4] * 5, mask[:, 4:] * 5, mask[:, 4:])
    model.base_model.register_forward_pre_hook(
        lambda _, args, given: masks.append(given["attention_mask"].tolist()), with_kwargs=True
    )
    completion_hidden(model, replace(rows, prompt_mask=mask[:, :4]))
    assert masks == [[[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]]]


def test_masked_token_between_others_is_refused_without_padding():
    holed = rollout()
    holed.completion_mask[0, 1] = 0
    hidden = completion_hidden(tiny.qwen2().eval(), holed)
    assert hidden.isfinite().all()
    for policy in (BatchPolicy(0), BatchPolicy(0, batches_equal_lengths=False)):
        completion_hidden(tiny.qwen2().eval(), rollout(3), policy)
        with pytest.raises(ValueError, match=r"masked tokens between others.*set their weights to 0, in `weigh`"):
            completion_hidden(tiny.qwen2().eval(), holed, policy)


@pytest.mark.parametrize("family", ["qwen2_5_vl", *(pytest.param(one, marks=pytest.mark.long) for one in OF_AXES)])
def test_positions_of_three_axes_are_computed_on_the_host(family):
    """By the model's own method, which waits for the device some ten times a row, for tensors that are there."""
    model, reader = vision_language.model(family, 32, 0, sees=True).eval(), vision_language.processor(family)
    content = [{"type": "image", "image": vision_language.picture(seed, 40 + 16 * seed)} for seed in range(2)]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": "??"}]}]
    prompts = [read_with_images(reader, messages), PromptIds([7, 8, 9])]
    rows = Rollout.of(prompts, [[5, 6, 7], [8, 9, 5, 6]], torch.device("cpu"))
    holed = replace(rows, completion_mask=rows.completion_mask * torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]]))
    backbone = backbone_of(model)
    by_itself = backbone.compute_3d_position_ids
    with torch.no_grad():
        with patch.object(backbone, "compute_3d_position_ids", side_effect=AssertionError("on the device")):
            hidden = completion_hidden(model, rows)
        with patch.object(backbone, "compute_3d_position_ids", side_effect=by_itself) as asked:
            completion_hidden(model, holed)
        assert asked.called, "where a token inside is masked, the model decides"
        with patch("trl_opsd.models.backbone.of_three_axes", return_value=None):
            expected = completion_hidden(model, rows)
    assert torch.equal(hidden[rows.counts], expected[rows.counts])


def scaled(kind: type, **scale: float) -> torch.nn.Module:
    return tiny.model(kind(**tiny.sizes(32), **scale))


@pytest.mark.parametrize(
    "model",
    [
        *[make() for make in FAMILIES],
        scaled(CohereConfig, logit_scale=0.25),
        scaled(GraniteConfig, logits_scaling=4.0),
        tiny.qwen2().to(torch.bfloat16),
        tiny.gemma2().to(torch.bfloat16),
        get_peft_model(tiny.qwen2(), LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5)),
        get_peft_model(tiny.qwen2(), LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])),
    ],
    ids=lambda model: f"{type(model).__name__}-{model.dtype}",
)
def test_a_head_of_the_known_form_passes_the_probe(model):
    model.train()
    Probed(model, "student").prove(check_head)
    assert model.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unknown_post_processing_of_logits_is_refused_with_the_difference(dtype):
    model = tiny.qwen2().to(dtype)
    model.lm_head.register_forward_hook(lambda module, args, output: output * 1.1)
    with pytest.raises(ValueError, match=r"The teacher \(Qwen2ForCausalLM\) does not compute .* a difference of \d"):
        Probed(model, "teacher").prove(check_head)


@pytest.mark.parametrize("make", FAMILIES)
def test_layers_are_compiled_for_one_row_and_for_several_whatever_the_lengths(make):
    """And eager ones are left, whose copies compute with their own weights."""
    graphs, model, drawn = [], make().requires_grad_(False), random.Random(0)

    def counting(graph, _):
        graphs.append(graph)
        return graph.forward

    for _ in range(20):
        ids = torch.randint(3, 259, (drawn.randint(1, 5), drawn.randint(2, 40)))
        with compiled(counting, None, [model]):
            found = hidden_states(model, ids, None)
        assert torch.equal(found, hidden_states(model, ids, None))
    assert len(graphs) == 2
    with compiled(counting, None, [model]):
        other = copy.deepcopy(model)
    for one in layer_list(other).parameters():
        one.zero_()
    assert not torch.equal(hidden_states(other, ids, None), found)


def test_a_step_scores_and_trains_by_compiled_layers_and_generates_by_eager_ones(make_trainer, monkeypatch):
    computed = {True: set(), False: set()}

    def watched(forward, *_):
        def compute(layer, *given, **named):
            computed[torch.is_grad_enabled()].add(layer)
            return forward(layer, *given, **named)

        return compute

    monkeypatch.setattr("trl_opsd.models.backbone._compiled", watched)
    trainer = make_trainer(torch_compile=True, max_steps=2, rollout=HFRollout())
    trainer.train()
    assert computed == {True: {*layer_list(trainer.model)}, False: {*layer_list(trainer.teacher_model)}}


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_states_and_gradients_are_as_precise_as_eager_ones(dtype):
    exact, model = tiny.qwen2(64).double(), tiny.qwen2(64).to(dtype)
    for shape in [(3, 17), (2, 64), (1, 40)]:
        ids, off = torch.randint(3, 259, shape, generator=torch.Generator().manual_seed(0)), []
        for one, backend in ((exact, ""), (model, ""), (model, "inductor")):
            with compiled(backend, None, [one]) if backend else nullcontext():
                states = hidden_states(one, ids, None)
                one.zero_grad()
                states.double().square().mean().backward()
            off.append(
                torch.cat(
                    [
                        states.double().flatten(),
                        *(weight.grad.double().flatten() for weight in backbone_of(one).parameters()),
                    ]
                )
            )
        assert float((off[2] - off[0]).norm()) <= 1.5 * float((off[1] - off[0]).norm()) + 1e-6
