"""A vision-language checkpoint learns from text exactly as in TRL, and its checkpoints load again with all parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from support import tiny, vision_language
from support.parity import losses, trained
from transformers import (
    AutoProcessor,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    PreTrainedTokenizerFast,
)
from trl import DistillationConfig, DistillationTrainer

from trl_opsd import FixedRollout, HFRollout, OPSDConfig, OPSDTrainer

TOKENS = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<image>"}


def processor() -> Gemma3Processor:
    words = PreTrainedTokenizerFast(
        tokenizer_object=tiny.tokenizer().backend_tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=TOKENS,
        chat_template=tiny.CHAT_TEMPLATE,
    )
    images = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    return Gemma3Processor(images, words, image_seq_length=4)


def gemma3(width: int, seed: int) -> Gemma3ForConditionalGeneration:
    torch.manual_seed(seed)
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 262, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 256}
    vision = {**sizes, "image_size": 28, "patch_size": 14}
    ids = {f"{name}_index": 259 + number for number, name in enumerate(TOKENS)}
    config = Gemma3Config(
        text_config={**text, "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 0},
        vision_config=vision,
        mm_tokens_per_image=4,
        **ids,
    )
    model = Gemma3ForConditionalGeneration(config)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(12)
    return model


def models() -> dict[str, Any]:
    return {"model": gemma3(32, 0), "teacher_model": gemma3(48, 1), "processing_class": processor()}


LAYERS = r".*(language|text)_model.*(q_proj|in_proj_qkv|up_proj)"


class Replaying(DistillationTrainer):
    """TRL's trainer with recorded completions instead of generated ones."""

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, has_tool_images=False):
        return FixedRollout(tiny.recorded(self._tokenizer)).complete(prompt_ids, 0)


def adapter(lora: bool) -> LoraConfig | None:
    return LoraConfig(r=4, target_modules=LAYERS) if lora else None


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.long)], ids=["full", "lora"])
def test_training_on_text_equals_trl(tmp_path, lora):
    options = tiny.options(tmp_path, beta=0.5, learning_rate=1e-3)
    trls = trained(Replaying, DistillationConfig(**options), **models(), peft_config=adapter(lora))
    ours = trained(OPSDTrainer, OPSDConfig(**options), **models(), peft_config=adapter(lora))
    assert losses(trls).std() > 0
    assert (losses(trls) - losses(ours)).abs().max() <= 1e-5
    torch.testing.assert_close(tiny.weights(ours), tiny.weights(trls), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("gemma4", False),
        ("qwen2_vl", True),
        *(pytest.param(one, False, marks=pytest.mark.long) for one in vision_language.FAMILIES if one != "gemma4"),
        *(pytest.param(one, True, marks=pytest.mark.long) for one in ("gemma4", "mistral3")),
    ],
)
def test_training_every_family_with_only_a_tokenizer_equals_trl(tmp_path, family, lora):
    options = tiny.options(tmp_path, beta=0.5, learning_rate=1e-2, max_steps=2, optim="sgd")
    trls, ours = (
        trained(
            cls,
            config(**options),
            model=vision_language.model(family, 32, 0),
            teacher_model=vision_language.model(family, 48, 1),
            peft_config=adapter(lora),
        )
        for cls, config in ((Replaying, DistillationConfig), (OPSDTrainer, OPSDConfig))
    )
    assert losses(trls).std() > 0
    assert (losses(trls) - losses(ours)).abs().max() <= 1e-5
    torch.testing.assert_close(tiny.weights(ours), tiny.weights(trls), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["gemma3", "qwen2_vl"])
def test_image_placeholders_are_never_generated(make_trainer, family):
    student = vision_language.model(family, 32, 0)
    trainer = make_trainer(model=student, rollout=HFRollout(), generation_kwargs={"do_sample": False})
    prompts = trainer.tokenize(tiny.PROMPTS[:2])
    before = trainer.complete(prompts)
    with torch.no_grad():
        weight = student.get_output_embeddings().weight
        weight[vision_language.PLACEHOLDER] = 2 * weight[before[0][0]]
    assert trainer.complete(prompts) == before
    trainer.generation_config.suppress_tokens = [7]  # further suppressed tokens do not replace it
    assert vision_language.PLACEHOLDER not in {token for ids in trainer.complete(prompts) for token in ids}
    assert trainer.placeholders == [vision_language.PLACEHOLDER]


def test_checkpoints_have_the_processor_and_empty_image_columns_are_text(tmp_path):
    gemma3(32, 0).save_pretrained(tmp_path / "student")
    processor().save_pretrained(tmp_path / "student")
    rows = tiny.rows().add_column("images", [[]] * 8).add_column("image", [None] * 8)
    given = {**models(), "model": str(tmp_path / "student"), "processing_class": None, "train_dataset": rows}
    options = {"save_strategy": "steps", "save_steps": 3, "remove_unused_columns": False}
    trainer = trained(OPSDTrainer, tiny.config(tmp_path / "out", **options), **given)
    again = AutoProcessor.from_pretrained(tmp_path / "out" / "checkpoint-3")
    assert isinstance(again, Gemma3Processor)
    assert again.tokenizer.get_vocab() == trainer.processing_class.get_vocab()
    assert Gemma3ForConditionalGeneration.from_pretrained(tmp_path / "out" / "checkpoint-3")


@pytest.mark.refusal
@pytest.mark.before_loading
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x", "images": ["a.png"]}, "row 0 of train_dataset is text, but the row has images"),
        ({"prompt": [{"role": "user", "content": [{"type": "audio"}]}]}, r"parts of type \['audio'\]: expected 'text'"),
    ],
)
def test_images_and_audio_are_refused(make_trainer, row, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(train_dataset=Dataset.from_list([row] * 8), processing_class=processor())
