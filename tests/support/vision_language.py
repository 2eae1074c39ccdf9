"""Tiny vision-language models, built by `AutoModelForImageTextToText`, and processors that fit them."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import product
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature
from PIL import Image
from support import tiny
from torch import nn
from transformers import (
    AutoModelForImageTextToText,
    BaseVideoProcessor,
    Gemma4AudioFeatureExtractor,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import PushToHubMixin

FAMILIES = (
    "gemma3",
    "gemma4",
    "idefics3",
    "internvl",
    "lfm2_vl",
    "llava",
    "llava_next",
    "mistral3",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_vl",
    "smolvlm",
)

SEEING = tuple(one for one in FAMILIES if one != "lfm2_vl")
"""Those with a [`processor`]: LFM2-VL's image processor exists for torchvision only."""

PLACEHOLDER = 258
"""The token that stands for an image, in a model of any family that does not see."""

_TEXT = {
    "vocab_size": tiny.VOCABULARY,
    "vocab_size_per_layer_input": tiny.VOCABULARY,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "num_global_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "max_position_embeddings": 256,
    "sliding_window": 64,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_VISION = {
    "depth": 1,
    "num_hidden_layers": 1,
    "embed_dim": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 16,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
    "pooling_kernel_size": 2,
    "num_position_embeddings": 16,
}
_ROTARY_OF_THREE_AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_FIELDS: dict[str, dict[str, Any]] = {
    "gemma4": {"layer_types": ["sliding_attention", "full_attention"]},
    "qwen2_vl": {"rope_parameters": _ROTARY_OF_THREE_AXES},
    "qwen2_5_vl": {"rope_parameters": _ROTARY_OF_THREE_AXES},
    "qwen3_vl": {"rope_parameters": _ROTARY_OF_THREE_AXES},
    "qwen3_5": {"layer_types": ["linear_attention", "full_attention"]},
}
"""Further fields of a family's text config."""

_TOKENS = {
    "image_token": "<image>",
    "context_image_token": "<image>",
    "video_token": "<|video|>",
    "audio_token": "<audio>",
    "boa_token": "<boa>",
    "eoa_token": "<eoa>",
    "boi_token": "<boi>",
    "eoi_token": "<eoi>",
    "start_image_token": "<boi>",
    "end_image_token": "<eoi>",
    "fake_image_token": "<fake_token_around_image>",
    "end_of_utterance_token": "<end_of_utterance>",
    "global_image_token": "<global-img>",
    "image_break_token": "[IMG_BREAK]",
    "image_end_token": "[IMG_END]",
    "vision_start_token": "<boi>",
    "vision_end_token": "<eoi>",
    **{f"row_{i}_col_{j}_token": f"<row_{i}_col_{j}>" for i, j in product(range(1, 7), repeat=2)},
}
"""The special tokens that a processor of any family asks its tokenizer for."""

_MODELS = "transformers.models"

_PARTS = (
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
)
_CHAT_TEMPLATE = tiny.CHAT_TEMPLATE.replace("{{ message['content'] }}", _PARTS)

_FROM_PICTURES = r"projector|connector|merger|embed_vision|[vo]_proj"
"""The weights through which a picture reaches the later tokens."""


class _NoVideos(BaseVideoProcessor, PushToHubMixin):
    """For processors that insist on one: the real ones need torchvision."""

    model_input_names: ClassVar[list[str]] = []
    num_frames = fps = _auto_class = None

    def __init__(self) -> None:
        pass

    def to_dict(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class _Sight:
    """How a family sees: packages and options of its processors, what a chat writes, and fields of its config."""

    package: str
    images: str
    options: dict[str, Any]
    arguments: dict[str, Any] = field(default_factory=dict)
    written: str = "<image>"
    fields: dict[str, Any] = field(default_factory=dict)


def _patch(family: str, unit: int) -> int:
    """The pixels along a patch: most families make one token of 2x2 patches."""
    return unit if family.startswith("llava") else unit // 2


def _sight(family: str, unit: int, side: int) -> _Sight:
    edge, patch, tokens = side * unit, _patch(family, unit), side**2
    square = {"height": edge, "width": edge}
    grids = {"image_grid_pinpoints": [[edge * rows, edge * columns] for rows, columns in product((1, 2), repeat=2)]}
    crop = {"size": {"shortest_edge": edge}, "crop_size": square}
    split = {"do_resize": False, "max_image_size": {"longest_edge": edge}}
    clip = {"patch_size": patch, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
    area = {"patch_size": patch, "size": {"shortest_edge": edge**2, "longest_edge": 4 * edge**2}}
    pixtral = {"patch_size": patch, "spatial_merge_size": 2, "image_token": "<image>"}
    number = {"image_seq_length": tokens}
    qwen = _Sight("qwen2_vl", "qwen2_vl", area, written="<boi><image><eoi>")
    return {
        "gemma3": _Sight("gemma3", "gemma3", {"size": square}, number, "<boi>", {"mm_tokens_per_image": tokens}),
        "gemma4": _Sight("gemma4", "gemma4", {"patch_size": patch, "max_soft_tokens": 70, "pooling_kernel_size": 2}),
        "idefics3": _Sight("idefics3", "idefics3", split, {"image_seq_len": tokens}),
        "internvl": _Sight("internvl", "got_ocr2", {"size": square, "max_patches": 4}, number),
        "llava": _Sight("llava", "llava", crop, clip),
        "llava_next": _Sight("llava_next", "llava_next", {**crop, **grids}, clip, fields=grids),
        "mistral3": _Sight("pixtral", "pixtral", {"size": {"longest_edge": 2 * edge}}, pixtral),
        "qwen2_5_vl": replace(qwen, package="qwen2_5_vl"),
        "qwen2_vl": qwen,
        "qwen3_5": replace(qwen, package="qwen3_vl"),
        "qwen3_vl": replace(qwen, package="qwen3_vl"),
        "smolvlm": _Sight("smolvlm", "smolvlm", split, {"image_seq_len": tokens}),
    }[family]


def tokenizer() -> PreTrainedTokenizerFast:
    """As in [`tiny`], with the special tokens of all families behind."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tiny.tokenizer().backend_tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=_TOKENS,
        chat_template=_CHAT_TEMPLATE,
    )


def processor(family: str, unit: int = 16, side: int = 2, **image_options: Any) -> ProcessorMixin:
    """A family's processor.

    A token shows `unit` by `unit` pixels, and a tile, or a small picture, has about `side` by `side` tokens; Gemma 4
    makes some 60 of any picture. `image_options` override those of the image processor.
    """
    sight, words = _sight(family, unit, side), tokenizer()
    words.chat_template = words.chat_template.replace("IMAGE", sight.written)
    pil = import_module(f"{_MODELS}.{sight.images}.image_processing_pil_{sight.images}")
    given = {
        "image_processor": _only_class(pil)(**{**sight.options, **image_options}),
        "tokenizer": words,
        "video_processor": _NoVideos(),
        "feature_extractor": Gemma4AudioFeatureExtractor(),
    }
    with pytest.MonkeyPatch.context() as pretend:
        # Two families import helpers, which are in both modules, from the one that needs torchvision.
        pretend.setitem(sys.modules, f"{_MODELS}.{sight.package}.image_processing_{sight.package}", pil)
        pretend.setattr(f"{_MODELS}.smolvlm.processing_smolvlm.num2words", str)  # for videos only
        kind = _only_class(import_module(f"{_MODELS}.{sight.package}.processing_{sight.package}"))
        pretend.setattr(kind, "check_argument_for_proper_class", lambda *_: None)  # needs torchvision, from 5.24 on
        parts = {name: part for name, part in given.items() if name in kind.get_attributes()}
        return kind(**parts, **sight.arguments, chat_template=words.chat_template)


def _only_class(module: Any) -> Any:
    return getattr(module, *module.__all__)


def model(
    family: str, width: int, seed: int, sees: bool = False, unit: int = 16, side: int = 2, **text: Any
) -> nn.Module:
    """A random model of a family in float32, whose predictions are far from uniform.

    One that `sees` takes what a [`processor`] with its `unit` and `side` makes, and has a larger vocabulary. `text`
    overrides fields of its text config.
    """
    torch.manual_seed(seed)
    config = _config(family, width, text, sees, unit, side)
    made = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        made.get_output_embeddings().weight.mul_(12)
        for name, weight in made.named_parameters():
            if sees and weight.ndim > 1 and re.search(_FROM_PICTURES, name):
                weight.normal_(std=0.3)
    return made


def _config(family: str, width: int, changed: dict[str, Any], sees: bool, unit: int, side: int) -> Any:
    kind = CONFIG_MAPPING[family]
    vision = kind.sub_configs["vision_config"]
    vision = type(kind(vision_config={}).vision_config) if vision.__name__ == "AutoConfig" else vision
    text = type(kind().text_config)
    words = tokenizer() if sees else tiny.tokenizer()
    rows, image = len(words), words.image_token_id if sees else PLACEHOLDER
    fields = {
        **_known({**_TEXT, "vocab_size": rows, "vocab_size_per_layer_input": rows}, text()),
        "hidden_size": width,
        "num_attention_heads": width // 16,
        **_FIELDS.get(family, {}),
        **changed,
    }
    sight = _known({**_VISION, "patch_size": _patch(family, unit), "image_size": side * unit}, vision())
    if "out_hidden_size" in vision().to_dict():
        sight["out_hidden_size"] = width
    if "embed_dim" in sight:  # Qwen2-VL's name for the size within
        sight["hidden_size"] = width
    if "model_type" in vision().to_dict():
        sight["model_type"] = vision.model_type
    name = "image_token_id" if "image_token_id" in kind().to_dict() else "image_token_index"
    given = {"text_config": {**fields, "model_type": text.model_type}, "vision_config": sight, name: image}
    return kind(**given, **(_sight(family, unit, side).fields if sees else {}))


def _known(values: dict[str, Any], config: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in config.to_dict()}


# ---- Rows ------------------------------------------------------------------------------------------------------------

_MESSAGES = List({"role": Value("string"), "content": Value("string")})


def picture(seed: int, height: int = 56, width: int = 56) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def rows(numbers: Sequence[int], theirs: Sequence[int] | None = None, height: int | None = None) -> Dataset:
    """Rows with so many images each, and, for the teacher, so many others; of one size with a `height`."""
    found = []
    for row, number in enumerate(numbers):
        images = [picture(10 * row + place, height or 40 + 8 * row, 56) for place in range(number)]
        found.append(
            {
                "prompt": [{"role": "user", "content": f"{'' if height else 'What is it? ' * (row % 3)}{row}"}],
                "images": images,
            }
        )
        if theirs is not None:
            found[-1]["teacher_images"] = [picture(500 + 10 * row + place, 90, 70) for place in range(theirs[row])]
    columns = {name: List(ImageFeature()) for name in found[0] if name != "prompt"}
    return Dataset.from_list(found, features=Features({"prompt": _MESSAGES, **columns}))


def answer(prompt_ids: Sequence[int]) -> list[int]:
    """A completion that follows from the prompt's tokens alone."""
    start = sum(prompt_ids)
    return [5 + (start + 3 * place) % 60 for place in range(2 + start % 5)] + [tiny.tokenizer().eos_token_id]


def arguments(family: str = "gemma3") -> dict[str, Any]:
    """Arguments of a trainer whose models see."""
    models = {"model": model(family, 32, 0, sees=True), "teacher_model": model(family, 48, 1, sees=True)}
    return {**models, "processing_class": processor(family)}
