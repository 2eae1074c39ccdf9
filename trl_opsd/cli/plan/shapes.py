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
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoProcessor, PretrainedConfig, PreTrainedModel

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
    counted_by: str = "processor"
    """Or `"config"`."""

    def of(self, rows: int, itemsize: int, checkpointing: bool | None = None) -> tuple[int | None, int | None]:
        """Bytes of pixels of these rows, and in the vision tower in a pass; `None` where there are none.

        With a graph (`checkpointing` is not `None`) the tower is trained, as a LoRA adapter on all linear layers is on
        its layers, too, and keeps what a language model does.
        """
        if not self.positions:
            return None, None
        inside = self.inside if checkpointing is None else 2 * self.inside
        kept = 0 if checkpointing is None else self.layers * (self.input if checkpointing else self.inside)
        return rows * self.pixels, rows * itemsize * self.positions * (kept + inside)


@dataclass(frozen=True, slots=True)
class Shape:
    """A model by its numbers: counts of parameters, not bytes, unless stated."""

    config: PretrainedConfig
    tensors: tuple[int, ...]
    """Parameters of each."""
    head: int
    layer: int
    """Parameters of the largest layer."""
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
    kernels: Callable[[], tuple[int, int]]
    """Kernels that a decoding step launches, and what an adapter on all linear layers but the head adds."""
    images: Images

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return sum(self.tensors)


def shape_of(source: str, sizes: Sequence[tuple[int, int]] = ()) -> Shape:
    """Counts the parameters of a causal language model, a local folder, `config.json` or Hub id, on the meta device.

    `sizes` are height and width of each image of a row; a model that sees none leaves them out.
    """
    try:
        config = AutoConfig.from_pretrained(Path(source) if Path(source).exists() else source)
    except (OSError, ValueError) as error:
        [why, *_] = str(error).splitlines()
        raise ValueError(f"{source!r}: its config cannot be read ({why}).") from error
    with torch.device("meta"):
        model = without_weights(config, torch.bfloat16)
    if model.get_output_embeddings() is None:
        raise ValueError(
            f"{source!r} is a {type(model).__name__}, which has no output head: pass a causal language model."
        )
    head, embeddings = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    layers, untied = _layers(model), 0 if embeddings is head else embeddings.numel()
    linear = [one for one in model.modules() if isinstance(one, nn.Linear) and one is not model.get_output_embeddings()]
    return Shape(
        config=config,
        tensors=tuple(one.numel() for one in model.parameters()),
        head=head.numel(),
        layer=max(map(_count, layers), default=_count(model)),
        embeddings=untied,
        rest=_count(model) - head.numel() - untied - sum(map(_count, layers)),
        vocabulary=head.size(0),
        context=context_of(model),
        width=head.size(1),
        linear=sum(one.in_features + one.out_features for one in linear),
        cached=cache(partial(cached_numbers, model)),
        half_bytes_per_token=bytes_per_token(model, 0),
        kernels=cache(lambda: (_kernels(model, len(layers)), _OF_ADAPTER * len(linear))),
        images=_images(source, config, sizes),
    )


_OF_LAYER, _OF_ADAPTER = 45, 7
"""Kernels of a layer of Qwen2, and what LoRA adds to a linear layer: counted on a CPU, decoding with autocast."""


def _kernels(model: PreTrainedModel, layers: int) -> int:
    """Operations of a decoding step that are no views; each launches a kernel."""
    try:
        with torch.no_grad(), _Live([]) as live:
            model(input_ids=torch.zeros(1, 1, dtype=torch.long, device="meta"), use_cache=True)
        return live.kernels
    except Exception:  # as in [`cached_numbers`]
        return _OF_LAYER * layers


def _images(source: str, config: PretrainedConfig, sizes: Sequence[tuple[int, int]]) -> Images:
    """Images of these sizes as the model's processor reads them, or as its config says if that cannot be loaded."""
    vision: Any = getattr(config, "vision_config", None)
    if not sizes or vision is None:
        return Images()
    try:
        (tokens, positions, pixels), counted_by = _as_processed(source, sizes), "processor"
    except Exception:  # no files of a processor, packages that are missing, no chat template
        (tokens, positions, pixels), counted_by = _as_configured(config, sizes), "config"
    width = getattr(vision, "embed_dim", None) or vision.hidden_size  # Qwen2-VL's `hidden_size` is that of its output
    inner = getattr(vision, "intermediate_size", None) or int(getattr(vision, "mlp_ratio", 4) * width)
    layers = getattr(vision, "depth", 0) or getattr(vision, "num_hidden_layers", 1)
    return Images(tokens, positions, 4 * pixels, layers, width, 10 * width + 3 * inner, counted_by)


def _as_processed(source: str, sizes: Sequence[tuple[int, int]]) -> tuple[int, int, int]:
    """Tokens, positions of the vision tower, and numbers of `pixel_values`."""
    from PIL import Image

    processor, text = AutoProcessor.from_pretrained(source), {"type": "text", "text": "?"}
    parts = [{"type": "image", "image": Image.new("RGB", (width, height))} for height, width in sizes]
    row = read_with_images(processor, [{"role": "user", "content": [*parts, text]}])
    alone = processor.apply_chat_template(
        [{"role": "user", "content": [text]}], add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    assert row.images is not None, "it has some"
    return len(row) - len(alone[0]), row.images.positions, row.images.values["pixel_values"].numel()


def _as_configured(config: Any, sizes: Sequence[tuple[int, int]]) -> tuple[int, int, int]:
    """The same, without what only a processor knows: tiles, limits of the resolution, tokens between images."""
    vision, tokens, positions = config.vision_config, 0, 0
    stated = [getattr(vision, name, None) for name in ("patch_size", "image_size")]
    patch, fixed = (size[0] if isinstance(size, list | tuple) else size for size in stated)
    names = ("spatial_merge_size", "scale_factor")
    merge = max(getattr(one, name, 1) for one in (vision, config) for name in names)
    each = getattr(config, "mm_tokens_per_image", None) or getattr(config, "image_seq_length", None)
    if patch is None:
        raise ValueError(
            f"The processor of this {config.model_type} cannot be loaded, and its config has no patch size."
        )
    for size in sizes:
        rows, columns = ((fixed or max(round(side / patch / merge), 1) * patch * merge) // patch for side in size)
        tokens += each or rows * columns // merge**2
        positions += rows * columns
    return tokens, positions, positions * 3 * patch**2 * getattr(vision, "temporal_patch_size", 1)


def _count(module: nn.Module) -> int:
    return sum(one.numel() for one in module.parameters())


def _layers(model: nn.Module) -> list[nn.Module]:
    lists = (list(module) for module in model.modules() if isinstance(module, nn.ModuleList))
    return max(lists, key=lambda layers: sum(map(_count, layers)), default=[])


def _grouped_product(first: Tensor, second: Tensor, offsets: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """The shape of the products of a mixture of experts; torch supports only bfloat16."""
    if second.dim() == 3:
        return first.new_empty(*first.shape[:-1], second.size(-1))
    assert offsets is not None, "grouped matrix multiplication"
    return first.new_empty(offsets.size(0), first.size(0), second.size(1))


class _Live(TorchDispatchMode):
    """Tracks the bytes of all storages that operations create, until they are freed."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = self.kernels = 0
        self._seen: dict[int, object] = {id(one.untyped_storage()): one.untyped_storage() for one in known}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts the operation and its results."""
        if function is torch.ops.prim.device.default:  # two of three calls
            return args[0].fake_device
        self.kernels += not (function.is_view or str(function) == "aten._unsafe_view.default")
        of_experts = str(function) == "aten._grouped_mm.default"
        result = (_grouped_product if of_experts else function)(*args, **(kwargs or {}))
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
            with _Live(known) as live:
                with torch.autocast("cpu", torch.bfloat16, enabled=products == "autocast"):
                    states_BLH = hidden_states(model, ids_BL, mask_BL)
                states_BLH.backward(torch.empty_like(states_BLH))
            return live.peak
    except Exception:  # some families read values while they run, and cannot be traced
        # What each layer keeps, or with checkpointing its input, and twice that of one layer for its gradients.
        layer, inputs = bytes_per_token(model, 0), model_shape(model)[1] * model.dtype.itemsize
        layers = getattr(config.get_text_config(), "num_hidden_layers", None) or 1
        return int(rows * tokens * (layers * (inputs if checkpointing else layer) + 2 * layer))
