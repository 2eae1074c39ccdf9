"""Trains a vision-language model of 170,000 weights from scratch, which then reads digits in crops.

    python examples/pictures/student.py --output out/pictures/student

It sees some whole pictures too, too few to read numbers in them well.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from PIL import Image as Pictures
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2Config,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fitting import fit

from pictures.task import QUESTION, Scene, draw_scenes

SEEN, PATCH = 32, 8
"""Pixels of a side of what the model sees, to which any picture is scaled; and of a patch, which is one token."""

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
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        unk_token=PAD,
        additional_special_tokens=[USER, ASSISTANT, IMAGE],
        model_max_length=64,
        padding_side="left",
    )
    scaled = SiglipImageProcessorPil(size={"height": SEEN, "width": SEEN})
    return LlavaProcessor(
        image_processor=scaled,
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="full",
        chat_template=CHAT_TEMPLATE,
        image_token=IMAGE,
    )


def make_model(processor: LlavaProcessor, seed: int = 0) -> LlavaForConditionalGeneration:
    """Random weights: two layers that see, and two that write."""
    torch.manual_seed(seed)
    tokenizer = processor.tokenizer
    layers = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    sight = SiglipVisionConfig(**layers, image_size=SEEN, patch_size=PATCH, vision_use_head=False)
    text = Qwen2Config(
        **layers,
        num_key_value_heads=4,
        vocab_size=len(tokenizer),
        max_position_embeddings=64,
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


def encoded(
    processor: ProcessorMixin, pictures: Sequence[Pictures.Image], answers: Sequence[str] = ()
) -> dict[str, torch.Tensor]:
    """What the model is called with for the question about each picture, and the answer if given."""
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}]
    prompt = processor.apply_chat_template(asked, add_generation_prompt=True)
    texts = [prompt + answer + END for answer in answers] or [prompt] * len(pictures)
    return dict(processor(text=texts, images=list(pictures), return_tensors="pt"))


def batches(
    processor: ProcessorMixin, scenes: Sequence[Scene], share: float, size: int = 32, seed: int = 0
) -> Iterator[dict[str, torch.Tensor]]:
    """Infinite random batches of crops, and of whole pictures for a share of the rows; only answers are learned."""
    answers = [scene.answer for scene in scenes]
    crops, wholes = (
        encoded(processor, [getattr(scene, name) for scene in scenes], answers) for name in ("crop", "whole")
    )
    ids = crops["input_ids"]
    labels = torch.where(torch.arange(ids.size(1)) < ids.size(1) - len(answers[0]) - 1, -100, ids)
    source = torch.Generator().manual_seed(seed)
    while True:
        rows = torch.randint(len(scenes), (size,), generator=source)
        is_whole = torch.rand(size, 1, 1, 1, generator=source) < share
        seen = torch.where(is_whole, wholes["pixel_values"][rows], crops["pixel_values"][rows])
        yield {"input_ids": ids[rows], "pixel_values": seen, "labels": labels[rows]}


@torch.no_grad()
def accuracy(model: PreTrainedModel, processor: ProcessorMixin, scenes: Sequence[Scene], shown: str) -> float:
    """The share of scenes whose number the model writes, greedily, when it is shown the "whole" or the "crop"."""
    was_training = model.training
    model.eval()
    inputs = encoded(processor, [getattr(scene, shown) for scene in scenes])
    written = model.generate(**inputs, max_new_tokens=4, do_sample=False)[:, inputs["input_ids"].size(1) :]
    model.train(was_training)
    texts = processor.tokenizer.batch_decode(written, skip_special_tokens=True)
    return sum(text == scene.answer for text, scene in zip(texts, scenes, strict=True)) / len(scenes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=130)
    parser.add_argument("--share", type=float, default=0.03, help="of whole pictures")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("out/pictures/student"))
    options = parser.parse_args()
    start, processor = time.perf_counter(), make_processor()
    model = make_model(processor, options.seed)
    scenes = draw_scenes(1500, seed=10 + options.seed)
    fit(model, batches(processor, scenes, options.share, seed=options.seed), steps=options.steps, learning_rate=3e-3)
    model.save_pretrained(options.output)
    processor.save_pretrained(options.output)
    held_out, seconds = draw_scenes(500, held_out=True), time.perf_counter() - start
    found = ", ".join(f"{name} {accuracy(model, processor, held_out, name):.3f}" for name in ("crop", "whole"))
    print(f"{model.num_parameters():,} weights, {seconds:.0f} s; right on {len(held_out)} held-out scenes: {found}")


if __name__ == "__main__":
    main()
