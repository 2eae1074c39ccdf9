"""Sizes of a model for the plan: counted on the meta device, from a config, without its weights.

B rows · L tokens of a row
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import AutoConfig, AutoProcessor, PretrainedConfig

from trl_opsd._compat.versions import CHECKPOINTING
from trl_opsd.data.images import read_with_images
from trl_opsd.models.backbone import context_of, hidden_states, model_shape
from trl_opsd.models.weights import cached_numbers, without_weights
from trl_opsd.teacher.frozen import bytes_per_token


@dataclass(frozen=True, slots=True)
class Images:
    """What the images of a row take; nothing where there are none."""

    tokens: int = 0
    """Of its prompt."""
    positions: int = 0
    """Of the vision tower."""
    pixels: int = 0
    """Bytes of `pixel_values`, float32."""
    layers: int = 0
    """Of the tower."""
    input: int = 0
    """Numbers of a position between its layers."""
    inside: int = 0
    """Numbers of a position that live in a layer, as [`~teacher.frozen.bytes_per_token`] counts them."""

    def of(self, rows: int, itemsize: int, checkpointing: bool | None = None) -> dict[str, int]:
        """Bytes of pixels of these rows, and in the vision tower in a pass.

        With a graph (`checkpointing` is not `None`) the tower is trained, as a LoRA adapter on all linear layers is on
        its layers, too, and keeps what a language model does.
        """
        inside = self.inside if checkpointing is None else 2 * self.inside
        kept = 0 if checkpointing is None else self.layers * (self.input if checkpointing else self.inside)
        return {"pixels": rows * self.pixels, "vision tower": rows * itemsize * self.positions * (kept + inside)}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model by its numbers: counts of parameters, not bytes, unless stated."""

    config: PretrainedConfig
    tensors: tuple[int, ...]
    """Parameters of each."""
    head: int
    layers: int
    """How many there are."""
    layer: int
    """Parameters of the largest."""
    embeddings: int
    """Parameters of input embeddings that are not tied to the head."""
    rest: int
    """Parameters outside of head, embeddings and layers: norms, and all that reads images."""
    vocabulary: int
    context: int | None
    """Maximum tokens of a row; `None` where the config has no limit."""
    width: int
    linear: int
    """Inputs and outputs of all linear layers but the head: the size of a LoRA adapter of rank 1."""
    cached: Callable[[int], int]
    """Numbers in the key-value cache of a row, by its tokens."""
    half_bytes_per_token: int
    """Bytes of activations per token in a forward pass without a graph, in half precision, without the mask."""
    images: Images

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return sum(self.tensors)


def shape_of(source: str, sizes: Sequence[tuple[int, ...]] = ()) -> Shape:
    """Counts the parameters of a causal language model, a local folder, `config.json` or Hub id, on the meta device.

    `sizes` are height and width of each image of a row; a model that sees none leaves them out.
    """
    config = AutoConfig.from_pretrained(Path(source) if Path(source).exists() else source)
    with torch.device("meta"):
        model = without_weights(config, torch.bfloat16)
    head, embeddings = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    lists = (list(module) for module in model.modules() if isinstance(module, nn.ModuleList))
    layers = max(lists, key=lambda layers: sum(map(_count, layers)), default=[])
    untied = 0 if embeddings is head else embeddings.numel()
    linear = [one for one in model.modules() if isinstance(one, nn.Linear) and one.weight is not head]
    return Shape(
        config=config,
        tensors=tuple(one.numel() for one in model.parameters()),
        head=head.numel(),
        layers=len(layers),
        layer=max(map(_count, layers), default=_count(model)),
        embeddings=untied,
        rest=_count(model) - head.numel() - untied - sum(map(_count, layers)),
        vocabulary=head.size(0),
        context=context_of(model),
        width=head.size(1),
        linear=sum(one.in_features + one.out_features for one in linear),
        cached=cache(partial(cached_numbers, model)),
        half_bytes_per_token=bytes_per_token(model, 0),
        images=_images(source, config, sizes),
    )


def _count(module: nn.Module) -> int:
    return sum(one.numel() for one in module.parameters())


def _images(source: str, config: PretrainedConfig, sizes: Sequence[tuple[int, ...]]) -> Images:
    """Images of these sizes as the model's processor reads them."""
    vision: Any = getattr(config, "vision_config", None)
    if not sizes or vision is None:
        return Images()
    from PIL import Image

    processor, text = AutoProcessor.from_pretrained(source), {"type": "text", "text": "?"}
    parts = [{"type": "image", "image": Image.new("RGB", (width, height))} for height, width in sizes]
    row = read_with_images(processor, [{"role": "user", "content": [*parts, text]}])
    alone = processor.apply_chat_template(
        [{"role": "user", "content": [text]}], add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    assert row.images is not None, "it has some"
    width = getattr(vision, "embed_dim", None) or vision.hidden_size  # Qwen2-VL's `hidden_size` is that of its output
    inner = getattr(vision, "intermediate_size", None) or int(getattr(vision, "mlp_ratio", 4) * width)
    return Images(
        tokens=len(row) - len(alone[0]),
        positions=row.images.positions,
        pixels=4 * row.images.values["pixel_values"].numel(),
        layers=getattr(vision, "depth", 0) or getattr(vision, "num_hidden_layers", 1),
        input=width,
        inside=10 * width + 3 * inner,
    )


def _rounded(one: Tensor) -> Tensor:
    return one.bfloat16() if one.is_floating_point() else one


class Live(TorchDispatchMode):
    """Tracks the bytes of all storages that operations create, until they are freed."""

    def __init__(self, known: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: dict[int, object] = {id(one.untyped_storage()): one.untyped_storage() for one in known}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts the results of an operation."""
        if is_of_experts := str(function) == "aten._grouped_mm.default":  # of fake tensors torch supports bfloat16 only
            dtype, args = args[0].dtype, tree_map_only(Tensor, _rounded, args)
        result = function(*args, **(kwargs or {}))
        result = result.to(dtype) if is_of_experts else result
        for one in tree_leaves(result):
            # Views share a storage, which is counted once.
            if isinstance(one, Tensor) and id(storage := one.untyped_storage()) not in self._seen:
                self._seen[id(storage)] = size = storage.nbytes()
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, id(storage), size)
        return result

    def _free(self, key: int, size: int) -> None:
        self._seen.pop(key, None)
        self.now -= size


def traced_activations(config: PretrainedConfig, rows: int, tokens: int, products: str, checkpointing: bool) -> int:
    """Peak bytes of a training pass, besides weights and gradients, which exist already; the head is not applied."""
    # With copies of weights that autocast makes, and the gradient of the largest weight before it is added. `products`
    # is "float32"; "autocast", bfloat16 with float32 weights; or "bfloat16" with bfloat16 weights.
    with torch.device("meta"):
        model = without_weights(config, torch.bfloat16 if products == "bfloat16" else torch.float32).train()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            if checkpointing:
                getattr(model, f"{CHECKPOINTING}_enable")({"use_reentrant": False})
            parameters = list(model.parameters())
            for one in parameters:
                one.grad = torch.empty_like(one)  # exists already, so that only activations are counted
            known = [*parameters, *(one.grad for one in parameters), *model.buffers()]
            ids_BL, mask_BL = torch.zeros(rows, tokens, dtype=torch.long), torch.ones(rows, tokens, dtype=torch.long)
            with Live(known) as live:
                with torch.autocast("cpu", torch.bfloat16, enabled=products == "autocast"):
                    states_BLH = hidden_states(model, ids_BL, mask_BL)
                states_BLH.backward(torch.empty_like(states_BLH))
            return live.peak
    except Exception:  # some families read values while they run, and cannot be traced
        # What each layer keeps, or with checkpointing its input, and twice that of one layer for its gradients.
        layer, inputs = bytes_per_token(model, 0), model_shape(model)[1] * model.dtype.itemsize
        layers = getattr(config.get_text_config(), "num_hidden_layers", None) or 1
        return int(rows * tokens * (layers * (inputs if checkpointing else layer) + 2 * layer))
