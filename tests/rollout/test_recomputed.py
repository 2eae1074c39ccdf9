"""Names of weights under the activation checkpointing of accelerate's FSDP2, which wraps every layer."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from support import tiny
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from trl_opsd._compat.peft import lora_factors
from trl_opsd._compat.sharding import trained_parameters
from trl_opsd.rollout.weight_sync import weights_of


def test_wrapped_layers_keep_the_names_of_weights_factors_and_parameters():
    config = LoraConfig(r=4, target_modules="all-linear", modules_to_save=["lm_head"], init_lora_weights=False)
    student = get_peft_model(tiny.qwen2(32, seed=0), config)
    plain = {weight.name: weight.materialize() for weight in weights_of(student)}
    factors, parameters = list(lora_factors(student)), list(trained_parameters(student))
    layers = student.get_base_model().model.layers
    for place, layer in enumerate(layers):
        layers[place] = checkpoint_wrapper(layer)
    wrapped = {weight.name: weight.materialize() for weight in weights_of(student)}
    assert set(wrapped) == set(plain) == set(tiny.qwen2(32).state_dict())
    assert all(torch.equal(wrapped[name], tensor) for name, tensor in plain.items())
    assert list(lora_factors(student)) == factors != []
    assert list(trained_parameters(student)) == parameters
