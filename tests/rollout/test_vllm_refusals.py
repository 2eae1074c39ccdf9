"""Setups that cannot work with vLLM are refused at construction, with what to do instead."""

from __future__ import annotations

import json
import os
import weakref

import pytest
import torch
from peft import IA3Config
from support import tiny
from support.lone_host import LoneHost

pytest.importorskip("vllm")

from vllm_lab import student

from trl_opsd._compat.vllm.process import launcher_environment
from trl_opsd.data.readers import PromptLimits
from trl_opsd.rollout import synced
from trl_opsd.rollout.vllm import VLLMRollout

pytestmark = pytest.mark.vllm


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"vllm_max_model_length": 1024}, "the student's context is 256"),
        ({"vllm_max_model_length": 16}, "leaves no room for a prompt"),
        ({"vllm_tensor_parallel_size": 2}, "but there are 1: set it to a divisor"),
        ({"vllm_enable_sleep_mode": True}, "on the platform 'cpu'; set it to False"),
        ({"vllm_weight_sync": "adapter"}, "the student has no adapter; use 'auto' or 'full'"),
        ({"peft_config": IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"])}, "LoRA"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_an_option_that_cannot_work_with_vllm_is_refused(make, given, message):
    with pytest.raises(ValueError, match=message):
        make(**given)


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("there", "message"),
    [
        ({"num_hidden_layers": 3}, "has num_hidden_layers=3, but the student has 2"),
        # as with `FineGrainedFP8Config(dequantize=True)`: vLLM would quantize the weights it is sent
        ({"quantization_config": {"quant_method": "fp8"}}, "is quantized, so vLLM would build a quantized model"),
    ],
)
def test_a_checkpoint_of_another_kind_than_the_student_is_refused(make, tmp_path, there, message):
    model = student(tmp_path / "student")
    config = tmp_path / "student" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **there}))
    with pytest.raises(ValueError, match=message):
        make(model=model)


@pytest.mark.refusal
def test_a_student_whose_weights_cannot_be_sent_is_refused():
    model = tiny.qwen2()
    model.is_quantized = True
    host = LoneHost(model, PromptLimits(vocabulary=tiny.VOCABULARY, context=256, completion=16))
    with pytest.raises(ValueError, match=r"with a quantized student is not supported.*or set `use_vllm=False`"):
        synced.check_student(host)


@pytest.mark.quick
def test_engine_without_adapters_is_gone_before_the_next_starts(monkeypatch):
    loaded = []

    class Engine:
        def __init__(self, mode):
            weights = torch.zeros(8)
            if mode == "adapter":
                loaded.append(weakref.ref(weights))
                raise ValueError("Toy does not support LoRA yet.")
            assert loaded[0]() is None, "two engines' weights in memory"

    class Rollout(VLLMRollout):
        def __init__(self):
            self._mode = "adapter"

        def _engine_arguments(self):
            return {"mode": self._mode}

        def _choose_sync(self, against):
            self._mode = "full"

    monkeypatch.setattr("trl_opsd.rollout.vllm.VLLMEngine", Engine)
    assert isinstance(Rollout()._started(), Engine)
    assert len(loaded) == 1


@pytest.mark.quick
def test_engine_is_on_its_process_device_not_its_local_rank(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")  # as SLURM counts tasks that see one device each
    with launcher_environment():
        assert os.environ["LOCAL_RANK"] == "3"
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    with launcher_environment():
        assert os.environ["LOCAL_RANK"] == "0"
    assert os.environ["LOCAL_RANK"] == "3"
