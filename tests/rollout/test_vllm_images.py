"""Students that see images, in vLLM: text, one and several images, before and after syncs."""

from __future__ import annotations

import inspect
from functools import partial
from operator import add

import pytest
import torch
from support import vision_language

pytest.importorskip("vllm")

from peft import LoraConfig
from transformers import AutoModelForImageTextToText
from transformers.utils import is_torchvision_available
from vllm_lab import by_hf, move

from trl_opsd._compat.peft import without_peft
from trl_opsd._compat.vllm.engine import VLLMEngine
from trl_opsd.data.images import probe_prompts, read_with_images
from trl_opsd.errors import SyncError
from trl_opsd.models.backbone import seen, together
from trl_opsd.types.rollout import PromptIds, images_of

pytestmark = pytest.mark.vllm

WITH_TORCHVISION = pytest.mark.skipif(
    not is_torchvision_available(),
    reason="vLLM needs torchvision for it, whose build for a CPU is not on the index that the tests use",
)
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}}
TEXT = {"qwen2_5_vl": ROPE}
RESIZED = {"do_resize": True, "size": {"longest_edge": 64}}
"""vLLM counts the tiles of an image as if it was resized, whatever the processor's option."""
LAYERS = r".*(language_model|text_model).*(q|v)_proj"
IMAGES = {"idefics3": RESIZED, "smolvlm": RESIZED}


@pytest.fixture
def seeing(make, tmp_path):
    """Builds a trainer whose student sees, and whose checkpoint has no processor."""

    def seeing(family, **given):
        sizes = {"num_attention_heads": 2, "head_dim": 32, **TEXT.get(family, {})}
        vision_language.model(family, 64, 0, sees=True, **sizes).save_pretrained(tmp_path / "student")
        return make(
            model=AutoModelForImageTextToText.from_pretrained(tmp_path / "student"),
            processing_class=vision_language.processor(family, **IMAGES.get(family, {})),
            teacher_model=vision_language.model(family, 48, 1, sees=True),
            **{"train_dataset": vision_language.rows([0, 1, 2, 1]), "top_k": 1, **given},
        )

    return seeing


def prompts_of(trainer):
    one, other, two = trainer.probe_prompts()
    return [*trainer.tokenize(["why?"]), one, two, other, one + trainer.tokenize(["and then?"])[0]]


@torch.no_grad()
def largest_gap(trainer, prompts):
    """As [`vllm_lab.gap`], after images."""
    options, largest = {"max_tokens": 6, "ignore_eos": True, "logprobs": 0, "seed": 5}, 0.0
    was_training = trainer.model.training
    trainer.model.eval()
    taken = inspect.signature(without_peft(trainer.model).forward).parameters
    for prompt, row in zip(prompts, trainer.rollout.engine.write(prompts, [options] * len(prompts)), strict=True):
        ids = torch.tensor([row.prompt_ids + row.completion_ids])
        given = seen(together(images_of([prompt]), [0], ids.size(1)), taken, ids.device)
        logits = trainer.model(ids, attention_mask=torch.ones_like(ids), **given).logits.double()
        logprobs = logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
        largest = max(largest, float((logprobs[-6:] - torch.tensor(row.logprobs)).abs().max()))
    trainer.model.train(was_training)
    return largest


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.long)], ids=["full", "lora"])
@pytest.mark.parametrize(
    "family",
    [
        "idefics3",
        pytest.param("qwen2_5_vl", marks=WITH_TORCHVISION),
        pytest.param("smolvlm", marks=pytest.mark.long),
    ],
)
def test_completions_after_images_equal_those_of_generate(seeing, family, lora):
    adapter = {"peft_config": LoraConfig(r=4, target_modules=LAYERS, init_lora_weights=False)} if lora else {}
    trainer = seeing(family, vllm_sync_check="every", **adapter)
    assert trainer.rollout._mode == ("adapter" if lora else "full")
    prompts, gaps, proven = prompts_of(trainer), [], []
    check = trainer.rollout._proof.check
    trainer.rollout._proof.check = lambda: proven.append(check()) or proven[-1]
    for _ in range(4):
        assert trainer.complete(prompts) == by_hf(trainer, prompts)
        gaps.append(largest_gap(trainer, prompts))
        move(trainer, 1.1)
        assert largest_gap(trainer, prompts) > 1e-3
    assert len(proven) == 4
    assert max(gaps + proven) <= 1e-4


def test_proof_finds_a_tower_that_is_not_sent(seeing, monkeypatch):
    trainer = seeing("idefics3")
    load = VLLMEngine.load

    def lost(self, weights):
        return load(self, ((name, 0.5 * one if "vision_model" in name else one) for name, one in weights))

    monkeypatch.setattr(VLLMEngine, "load", lost)
    with pytest.raises(SyncError, match="text after an image"):
        trainer.complete(prompts_of(trainer))


@pytest.mark.quick
def test_ids_of_later_turns_follow_those_before_expansion():
    processor = vision_language.processor("idefics3", **RESIZED)
    prompt = probe_prompts(partial(read_with_images, processor))[0]
    image = processor.tokenizer.image_token_id
    assert prompt.images.unexpanded.count(image) == 1 < prompt.count(image)

    longer = add(add(prompt, [5, 6]), [7])
    assert longer == [*prompt, 5, 6, 7]
    assert longer.images.unexpanded == (*prompt.images.unexpanded, 5, 6, 7)
    assert prompt.copy().images is prompt.images
    assert add(PromptIds([1]), [2]).images is None
