"""What an engine is built for; setups that cannot work with vLLM are refused at construction, with what to do."""

from __future__ import annotations

import json
import os
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import IA3Config
from support import tiny
from support.lone_host import LoneHost
from support.tool_calls import words
from transformers import AutoConfig

pytest.importorskip("vllm")

from vllm_lab import lora, student

from trl_opsd._compat.vllm.process import launcher_environment
from trl_opsd.data import datasets
from trl_opsd.data.readers import PromptLimits
from trl_opsd.loop import teaching
from trl_opsd.models.weights import without_weights
from trl_opsd.rollout import synced
from trl_opsd.rollout import vllm as backend
from trl_opsd.types import Completion

pytestmark = pytest.mark.vllm


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"vllm_max_model_length": 1024}, "the student's context is 256"),
        ({"vllm_max_model_length": 24}, r"row 1 of train_dataset has 10 tokens.*context of the student \(24 tokens\)"),
        ({"vllm_tensor_parallel_size": 2}, "but there are 1: set it to a divisor"),
        ({"vllm_enable_sleep_mode": True}, "on the platform 'cpu'; set it to False"),
        ({"vllm_weight_sync": "adapter"}, "the student has no adapter; use 'auto' or 'full'"),
        (
            {"peft_config": IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"])},
            "only LoRA on",
        ),
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
        ({"vocab_size": 300}, "has vocab_size=300, but the student has 259"),
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
def test_engine_is_on_its_process_device_not_its_local_rank(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")  # as SLURM counts tasks that see one device each
    with launcher_environment():
        assert os.environ["LOCAL_RANK"] == "3"
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    with launcher_environment():
        assert os.environ["LOCAL_RANK"] == "0"
    assert os.environ["LOCAL_RANK"] == "3"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("free", "given", "share", "said"),
    [
        (60e9, {}, 0.34, "0.34 for 64 rows of 2176 tokens at once: 16.4 GB of weights, 9.1 GB of cache, 3.2 GB of act"),
        (38e9, {}, 0.31, "Rows will queue: set `vllm_enable_sleep_mode=True`."),
        (38e9, {"vllm_enable_sleep_mode": True}, 0.34, "needs 0.34"),
        (34e9, {"vllm_enable_sleep_mode": True}, 0.3, "set fewer rows, or a lower `vllm_max_model_length`."),
        (60e9, {"teacher_offload": "cpu"}, 0.3, "Rows will queue"),
        (60e9, {"vllm_gpu_memory_utilization": 0.2}, 0.2, ""),
    ],
)
def test_memory_of_an_engine_is_what_its_rows_need_and_training_leaves(monkeypatch, caplog, free, given, share, said):
    config = AutoConfig.from_pretrained(Path(__file__).parents[1] / "cli/shapes/qwen2.5-32b.json")
    rollout = object.__new__(backend.VLLMRollout)  # here it would refuse to sleep
    with torch.device("meta"):
        model = without_weights(config, torch.bfloat16).requires_grad_(False)
    limits = PromptLimits(vocabulary=tiny.VOCABULARY, context=128 + 2048, completion=2048)
    options = {"use_vllm": True, "vllm_tensor_parallel_size": 4, "per_device_train_batch_size": 1}
    rollout.trainer = LoneHost(tiny.qwen2(), limits, **options, **given)
    rollout.args, rollout._dtype, rollout.trainer.model = rollout.trainer.args, torch.bfloat16, model
    rollout.trainer.accelerator = SimpleNamespace(device=model.device, distributed_type="NO", num_processes=1)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (int(free), 85 * 10**9))
    with caplog.at_level("INFO"):
        assert rollout._memory_share(rows=64) == share
    assert said in caplog.text


# ---- The length of rows that an engine is built for ---------------------------------------------------------------

COMPLETION = 24


class Recorder:
    """Takes an engine's arguments, and writes the first token of each prompt."""

    name, block_size = "vLLM", 16

    def __init__(self, **options):
        self.options, self.written = options, 0

    def write(self, prompt_ids, options):
        self.written += len(prompt_ids)
        return [
            Completion(prompt_ids=ids, completion_ids=ids[:1], prompt_logprobs=[], logprobs=[]) for ids in prompt_ids
        ]

    def load(self, weights):
        assert all(True for _ in weights)

    def forget_prefixes(self):
        """Has no cache."""

    wipe_cache = forget_prefixes


@pytest.fixture
def make_recorded(make_trainer, tmp_path, monkeypatch):
    """Builds a trainer of a student with a context of 8192 tokens; an engine has room for prompts of 8."""
    monkeypatch.setattr(backend, "VLLMEngine", Recorder)
    monkeypatch.setattr(teaching, "_ROOMY", 8)
    tiny.qwen2(max_position_embeddings=8192).save_pretrained(tmp_path / "student")

    def make(train=(5, 60, 9), teachers=8192, **given):
        options = {"use_vllm": True, "max_completion_length": COMPLETION, "vllm_sync_check": "never", "rollout": None}
        teacher = tiny.qwen2(48, seed=1, max_position_embeddings=teachers)
        more = {"train_dataset": rows(*train), **options, **given}
        return make_trainer(model=str(tmp_path / "student"), teacher_model=teacher, **more)

    return make


def rows(*lengths):
    """Prompts of so many tokens: a byte is a token."""
    return Dataset.from_dict({"prompt": ["x" * length for length in lengths]})


def context(trainer):
    found = trainer.rollout.engine.options["max_model_len"]
    assert found == trainer.limits.context
    return found


def test_longest_row_of_all_datasets_sets_an_engines_length(make_recorded, monkeypatch):
    assert context(make_recorded()) == 60 + COMPLETION
    assert context(make_recorded(eval_dataset={"short": rows(4), "long": rows(300, 7)})) == 300 + COMPLETION
    assert context(make_recorded(train=(5, 7), eval_dataset=rows(6))) == 8 + COMPLETION, "for which no row is counted"
    dropped = make_recorded(train=(5, 9000, 60), overlong_prompts="drop")
    assert context(dropped) == 60 + COMPLETION, "of the rows that are left"
    assert context(make_recorded(teachers=83, overlong_prompts="drop")) == 83, "the teacher reads no longer rows"
    assert context(make_recorded(vllm_max_model_length=100)) == 100
    assert context(make_recorded(eval_dataset=rows(4).to_iterable_dataset())) == 8192, "a stream may have any prompt"
    assert context(make_recorded(eval_dataset=rows(4).with_transform(dict))) == 8192
    assert context(make_recorded(teachers=70, train=(5, 6, 9), eval_dataset=rows(4).to_iterable_dataset())) == 70
    messages = Dataset.from_dict({"prompt": [[{"role": "user", "content": "2+2"}]] * 3})
    grows = make_recorded(train_dataset=messages, tools=[tiny.add], processing_class=words())
    assert context(grows) == 8192, "a conversation goes on until the context is full"

    counted, count = [], datasets._counted
    monkeypatch.setattr(datasets, "_counted", lambda *given: counted.append(len(given[1])) or count(*given))
    monkeypatch.setattr(teaching, "_ROOMY", 200)
    assert context(make_recorded(train=(5, *[80] * 50, 300, 9))) == 300 + COMPLETION
    assert sum(counted) <= 6, "the first, for each reader, and the longest: bytes tell of the others"
    monkeypatch.undo()
    monkeypatch.setattr(backend, "VLLMEngine", Recorder)
    assert context(make_recorded()) == 4096 + COMPLETION, "as its cache is small"


def test_longer_prompts_of_later_datasets_are_refused_before_generation(make_recorded):
    trainer = make_recorded(eval_dataset=rows(20, 21))
    longer = rows(30, 61)
    for name, use in {"eval_dataset": trainer.evaluate, "test_dataset": trainer.predict}.items():
        with pytest.raises(ValueError, match=rf"row 1 of {name} has 61 tokens.*the engine \(84 tokens\)"):
            use(longer)
    assert trainer.rollout.engine.written == 0
    assert trainer.evaluate(rows(59))["eval_loss"] > 0
    assert trainer.evaluate(rows(3, 60))["eval_loss"] > 0
    written = trainer.rollout.engine.written
    with pytest.raises(ValueError, match=r"The prompt in row 0 of an evaluation batch has 61 tokens.*of the engine"):
        trainer.evaluate(rows(61).to_iterable_dataset())
    assert trainer.rollout.engine.written == written


@pytest.mark.quick
def test_engine_without_adapters_is_gone_before_the_next_starts(make_recorded, monkeypatch):
    loaded = []

    class WithoutAdapters(Recorder):
        def __init__(self, **options):
            super().__init__(**options)
            weights = torch.zeros(8)
            if options.get("enable_lora"):
                loaded.append(weakref.ref(weights))
                raise ValueError("Toy does not support LoRA yet.")
            assert loaded[0]() is None, "two engines' weights in memory"

    monkeypatch.setattr(backend, "VLLMEngine", WithoutAdapters)
    assert make_recorded(peft_config=lora()).rollout._mode == "full"
    assert len(loaded) == 1
