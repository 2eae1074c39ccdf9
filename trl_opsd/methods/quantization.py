"""Trains a student as it will be served, with quantised weights, and saves it so."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from accelerate.logging import get_logger
from torch import nn
from transformers import TrainerCallback
from transformers.training_args import OptimizerNames

from trl_opsd._compat.deepspeed import loading
from trl_opsd._compat.peft import (
    base_name,
    base_parameters,
    inside_adapters,
    is_peft,
    why_not_plain_lora,
    without_peft,
)
from trl_opsd._compat.sharding import class_of
from trl_opsd._compat.torchao import (
    FakeQuantizedLinear,
    FakeQuantizer,
    base_config,
    kept_quantized,
    prepare,
    save_quantized,
)
from trl_opsd._compat.trl import get_config_model_id
from trl_opsd.methods.base import Method
from trl_opsd.models.checks import PLACE_OPTIONS
from trl_opsd.models.weights import first_change, sample
from trl_opsd.parallel.precision import autocast

FOLDER = "quantized"
"""The folder of the quantised student, beside its weights."""

logger = get_logger(__name__)


@final
@dataclass
class StudentQuantization(Method, TrainerCallback):
    """Trains the student as it will be served: linear layers of the text decoder compute with quantised weights;
    embeddings and head stay as they are. Each save of a student that is no adapter has a folder `quantized`.

    Args:
        format (`str` or a config of torchao): `"int4"` (groups of 32), `"int8"`, `"fp8"` or `"nvfp4"`, of the weights
            alone, or a config of torchao.

    Quantised weights are kept from the beginning of a step until its optimizer, which takes the memory of a second copy
    of the linear layers; what a callback writes through `.data` meanwhile is not seen before the next step.
    """

    format: Any

    whole_rows = False
    moves_target = True

    def check(self, args: Any, teachers: Sequence[str]) -> None:
        """Raises `ValueError` for an unknown format."""
        self._config = base_config("StudentQuantization.format", self.format)

    def build(self) -> None:
        """Prepares the student; nothing of it has computed yet."""
        model = self.host.model
        self._base = str(get_config_model_id(without_peft(model).config) or "") if is_peft(model) else ""
        if is_peft(model) and (reason := why_not_plain_lora(model) or ("" if self._base else "the model has no path")):
            said = "with an adapter it needs plain LoRA on a base that is loaded from a path"
            raise ValueError(f"`StudentQuantization`: {reason}, but {said}.")
        layers, self._kept = {}, []
        inside = {id(one) for one in without_peft(model).get_decoder().modules()}
        added = inside_adapters(model)
        for full, layer in model.named_modules():
            if not isinstance(layer, nn.Linear) or id(layer) in added:
                continue
            name = base_name(full)  # in a checkpoint of the base
            # A subclass may compute otherwise: routers are some.
            is_plain = type(layer) in (nn.Linear, FakeQuantizedLinear)
            if is_plain and id(layer) in inside and layer is not model.get_output_embeddings():
                layers[name] = layer
            else:
                self._kept.append(name)
        if not layers:
            name = type(without_peft(model)).__name__
            raise ValueError(f"`StudentQuantization`: {name} has no `nn.Linear` in its decoder.")
        prepare(layers, FakeQuantizer.of(self._config, layers, self.host.accelerator.device))
        self._step = ExitStack()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Quantises whole weights once for all passes of a step, until the optimizer changes them."""
        self._step.close()  # of a step that was interrupted
        name = str(OptimizerNames(args.optim).value)
        if "lomo" not in name and "layerwise" not in name:  # which step in each backward pass
            with autocast(self.host.accelerator):  # as in the passes
                self._step.enter_context(kept_quantized(self.host.model))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._step.close()

    def saved(self, folder: Path, in_checkpoint: bool) -> None:
        """Saves the student quantised; beside an adapter its base, which no checkpoint changes, so not with each."""
        source: str | Path = folder
        base, place, into = without_peft(self.host.model), dict[str, Any](), folder / FOLDER
        kind: Any = class_of(base)
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
                logger.warning(f"{into} is not written: {changed} of {source} is not that of the student's base.")
                return
        # PEFT finds no weight in a layer of compressed-tensors.
        packs = not is_peft(self.host.model)
        save_quantized(kind, source, into, self._config, self._kept, self.host.accelerator.device, packs, **place)
        (self.host.processor or self.host.processing_class).save_pretrained(into)
