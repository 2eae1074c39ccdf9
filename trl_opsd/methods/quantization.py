"""Trains a student as it will be served: linear layers with quantised weights, saved quantised."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, final

from accelerate.logging import get_logger
from torch import nn
from tqdm.auto import tqdm

from trl_opsd._compat.deepspeed import loading
from trl_opsd._compat.peft import (
    adapters_inside,
    base_parameters,
    is_peft,
    plain_layer,
    why_not_plain_lora,
    without_peft,
)
from trl_opsd._compat.sharding import class_of, whole_numel
from trl_opsd._compat.torchao import FakeQuantizedLinear, FakeQuantizer, base_config, prepare, save_quantized
from trl_opsd._compat.trl import get_config_model_id
from trl_opsd.methods.base import Method
from trl_opsd.models.checks import PLACE_OPTIONS
from trl_opsd.models.weights import first_change, sample
from trl_opsd.options.normalize import with_help
from trl_opsd.options.table import Option

FOLDER = "quantized"
"""The folder of the quantised student, beside its weights."""

logger = get_logger(__name__)


def _a_format(option: str, value: Any) -> None:
    if value is not None:
        base_config(option, value)


@with_help
@dataclass
class QuantizationOptions:
    student_quantization: Annotated[
        object | str | None,
        Option(_a_format, resumed=True, words="with the linear layers quantised as {!s:.40}", also="qat quantization"),
    ] = None
    """The format that the student is trained for: `"int4"` (groups of 32), `"int8"`, `"fp8"` or `"nvfp4"`, of the
    weights alone, or a config of torchao. Linear layers compute with quantised weights, and each save has a folder
    `quantized`; with LoRA `save_model` alone writes it."""


@final
class StudentQuantization(Method):
    """Quantises linear layers of the text decoder while the student computes; embeddings and head stay as they are."""

    @classmethod
    def of(cls, now: Any) -> StudentQuantization | None:
        return cls() if now.args.student_quantization is not None else None

    def build(self) -> None:
        """Prepares the student; nothing of it has computed yet."""
        given, model = self.host.args.student_quantization, self.host.model
        shown = f"`student_quantization={repr(given) if isinstance(given, str) else type(given).__name__}`"
        self._config = base_config("student_quantization", given)
        if is_peft(model) and (reason := why_not_plain_lora(model)):
            raise ValueError(
                f"{shown}: {reason}, but beside a quantised base only plain LoRA computes the same once it is saved: "
                "use a `LoraConfig` without that, or train all weights."
            )
        self._base = str(get_config_model_id(without_peft(model).config) or "") if is_peft(model) else ""
        if is_peft(model) and not self._base:
            raise ValueError(
                f"{shown} with an adapter on a model without a path, but its base is saved quantised from there: pass "
                "the path of the model, or a model that was loaded from one."
            )
        layers, self._kept = {}, []
        inside = {id(one) for one in without_peft(model).get_decoder().modules()}
        for name, layer in _linear(model):
            # A subclass may compute otherwise: routers are some.
            is_plain = type(layer) in (nn.Linear, FakeQuantizedLinear)
            if is_plain and id(layer) in inside and layer is not model.get_output_embeddings():
                layers[name] = layer
            else:
                self._kept.append(name)
        if not layers:
            raise ValueError(
                f"{shown}: {type(without_peft(model)).__name__} has no `nn.Linear` in its decoder, and nothing else is "
                "quantised here: remove the option."
            )
        try:
            quantizer = FakeQuantizer.of(self._config, layers, self.host.accelerator.device)
        except ValueError as error:
            raise ValueError(f"{shown}: {error}") from error
        prepare(layers, quantizer)
        numbers = {id(one): whole_numel(one) for one in model.parameters()}
        of_layers = sum(numbers[id(one.weight)] for one in layers.values())
        share = of_layers / sum(numbers.values())
        if share < 0.5:
            logger.warning(
                f"{shown} quantises {share:.0%} of the parameters: others are embeddings, or experts in one "
                "tensor per layer, which stay as they are."
            )

    def saved(self, folder: Path, in_checkpoint: bool) -> None:
        """Saves the student quantised; beside an adapter its base, which no checkpoint changes, so not with each."""
        source: str | Path = folder
        base, place = without_peft(self.host.model), dict[str, Any]()
        kind: Any = class_of(base)
        device, into = self.host.accelerator.device, folder / FOLDER
        if is_peft(self.host.model):
            if in_checkpoint:
                return
            # In its dtype, as the weights were quantised in training.
            source, given = self._base, self.host.args.model_init_kwargs or {}
            place = {name: given[name] for name in PLACE_OPTIONS if name in given} | {"dtype": base.dtype}
            with loading(None):
                found = kind.from_pretrained(source, use_safetensors=True, **place)
            theirs = {name: sample(one) for name, one in base_parameters(found).items()}
            if (changed := first_change(self.host.base_samples, theirs)) is not None:
                logger.warning(
                    f"{into} is not written: {changed} of {source} is not that of the student's base. Save the base "
                    "before an adapter is put on it, and load it from there."
                )
                return
        # PEFT finds no weight in a layer of compressed-tensors.
        packs = not is_peft(self.host.model)
        save_quantized(kind, source, into, self._config, self._kept, device, packs, **place)
        (self.host.processor or self.host.processing_class).save_pretrained(into)
        before, after = (sum(one.stat().st_size for one in Path(at).glob("*.safetensors")) for at in (source, into))
        tqdm.write(f"{into.parent.name}/{FOLDER}: {after / 1e6:.4g} MB, unquantised {before / 1e6:.4g} MB")


def _linear(model: Any) -> Iterator[tuple[str, nn.Linear]]:
    """Linear layers by their names in a checkpoint of the base, without those of adapters."""
    inside = adapters_inside(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and id(module) not in inside:
            yield plain_layer(name), module
