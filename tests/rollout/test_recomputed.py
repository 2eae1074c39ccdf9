"""Names of weights under the activation checkpointing of accelerate's FSDP2, which wraps every layer."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import tiny
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from trl_opsd._compat.peft import lora_factors
from trl_opsd._compat.sharding import trained_parameters
from trl_opsd.rollout.weight_sync import weights_of


def recompute(model):
    layers = model.get_base_model().model.layers
    for place, layer in enumerate(layers):
        layers[place] = checkpoint_wrapper(layer)


@pytest.fixture
def student():
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules="all-linear", modules_to_save=["lm_head"], init_lora_weights=False)
    return get_peft_model(tiny.qwen2(32, seed=0), config)


def test_weights_of_wrapped_layers_keep_their_names_and_adapter(student):
    plain = {weight.name: weight.materialize() for weight in weights_of(student)}
    recompute(student)
    wrapped = {weight.name: weight.materialize() for weight in weights_of(student)}
    assert set(wrapped) == set(plain) == set(tiny.qwen2(32).state_dict())
    assert all(torch.equal(wrapped[name], tensor) for name, tensor in plain.items())


def test_adapter_factors_and_trained_parameters_keep_their_names(student):
    factors, parameters = list(lora_factors(student)), list(trained_parameters(student))
    recompute(student)
    assert list(lora_factors(student)) == factors != []
    assert list(trained_parameters(student)) == parameters
