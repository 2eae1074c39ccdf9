"""Trains a vision-language model of 170,000 weights from scratch, which then reads digits in crops.

It sees a few whole pictures too, not enough of them to read well there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2Config,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fitting import fit

from pictures.task import QUESTION, Scene, draw_scenes

SEEN, PATCH = 32, 8
"""Pixels of a side of what the model sees, to which any picture is scaled; and of a patch, which is one token."""

CONTEXT = 4096
"""Far more than any prompt has: that all fit is plain from their bytes, and none is tokenized to check it."""

PAD, USER, ASSISTANT, END, IMAGE = SPECIAL = ("<|pad|>", "<|user|>", "<|assistant|>", "<|end|>", "<image>")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_processor() -> LlavaProcessor:
    """Scales pictures; its tokenizer knows the question as one token, and the digits."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, QUESTION, *"0123456789"])}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token=PAD))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        unk_token=PAD,
        additional_special_tokens=[USER, ASSISTANT, IMAGE],
        model_max_length=CONTEXT,
        padding_side="left",
    )
    tokenizer.add_tokens(QUESTION)
    square = {"height": SEEN, "width": SEEN}
    return LlavaProcessor(
        image_processor=SiglipImageProcessorPil(size=square, crop_size=square),  # the crop is for the count of tokens
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="full",
        chat_template=CHAT_TEMPLATE,
        image_token=IMAGE,
    )


def make_model(processor: LlavaProcessor) -> LlavaForConditionalGeneration:
    """Random weights: two layers that see, and two that write."""
    torch.manual_seed(0)
    tokenizer = processor.tokenizer
    layers = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    sight = SiglipVisionConfig(**layers, image_size=SEEN, patch_size=PATCH, vision_use_head=False)
    text = Qwen2Config(
        **layers,
        num_key_value_heads=4,
        vocab_size=len(tokenizer),
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=sight,
            text_config=text,
            image_token_id=processor.image_token_id,
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
            tie_word_embeddings=False,
            dtype="float32",
        )
    )


def encoded(processor: LlavaProcessor, scenes: Sequence[Scene], shown: str) -> dict[str, torch.Tensor]:
    """What the model is called with for the question about each whole picture or crop, and its answer."""
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}]
    prompt = processor.apply_chat_template(asked, add_generation_prompt=True)
    texts, pictures = zip(*((prompt + scene.answer + END, getattr(scene, shown)) for scene in scenes), strict=True)
    return dict(processor(text=list(texts), images=list(pictures), return_tensors="pt"))


def batches(processor: LlavaProcessor, scenes: Sequence[Scene], share: float) -> Iterator[dict[str, torch.Tensor]]:
    """Infinite random batches of crops, and of whole pictures for a share of the rows; only answers are learned."""
    crops, wholes = encoded(processor, scenes, "crop"), encoded(processor, scenes, "whole")
    ids = crops["input_ids"]
    labels = torch.where(torch.arange(ids.size(1)) < ids.size(1) - 2, -100, ids)  # but of the digit and the end
    source = torch.Generator().manual_seed(0)
    while True:
        rows = torch.randint(len(scenes), (32,), generator=source)
        is_whole = torch.rand(32, 1, 1, 1, generator=source) < share
        seen = torch.where(is_whole, wholes["pixel_values"][rows], crops["pixel_values"][rows])
        yield {"input_ids": ids[rows], "pixel_values": seen, "labels": labels[rows]}


def make_student(folder: Path, steps: int = 130, share: float = 0.03) -> None:
    """Trains one, with 32 pictures a step, a share of them whole, and saves it with its processor."""
    processor = make_processor()
    model = make_model(processor)
    fit(model, batches(processor, draw_scenes(min(1500, 32 * steps), seed=10), share), steps=steps, learning_rate=3e-3)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
