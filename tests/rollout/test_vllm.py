"""vLLM generates as the student would: tokens, end tokens, order, vocabulary, options."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import tiny

pytest.importorskip("vllm")

from support.processes import run
from transformers.utils.import_utils import enable_tf32
from vllm_lab import by_hf, check_goes_on, gap, student, two_end_tokens

from trl_opsd._compat.vllm.engine import VLLMEngine
from trl_opsd.types.rollout import cut_after_end

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("shape", "tied"),
    # vLLM's Gemma 2 has no head apart from its embeddings, and takes none.
    [
        ("qwen2", False),
        ("qwen2", True),
        ("llama", False),
        pytest.param("llama", True, marks=pytest.mark.long),
        ("gemma2", True),
    ],
)
def test_greedy_tokens_equal_those_of_generate(make, shape, tied):
    trainer = make(shape, tied, top_k=1)
    prompts = trainer.tokenize(tiny.PROMPTS)
    assert len({len(ids) for ids in prompts}) > 3, "the prompts are ragged"
    expected = by_hf(trainer, prompts)

    assert trainer.complete(prompts) == expected
    assert len({tuple(ids) for ids in expected}) == len(prompts), "the prompts can be told apart by their completions"


def test_rows_go_on_after_their_beginnings(make):
    check_goes_on(make(top_k=1, train_dataset=tiny.rows().add_column("completion_prefix", [" so", None] * 4)))


@pytest.mark.filterwarnings("ignore:`generation_kwargs`")
def test_end_tokens_of_the_model_or_of_an_option_end_a_completion(make, tmp_path):
    model = student(tmp_path / "student")
    free = make(model=model, top_k=1)
    prompts = free.tokenize(tiny.PROMPTS)
    unended = free.complete(prompts)
    words, end_ids = two_end_tokens(model, unended)

    trainer = make(model=model, processing_class=words, top_k=1)
    completions = trainer.rollout.complete(prompts, 0)
    assert trainer.processing_class.pad_token_id == words.eos_token_id in end_ids, "pad is an end token"
    assert {ids[-1] for ids in completions if ids[-1] in trainer.eos_token_ids} == end_ids
    assert completions == by_hf(trainer, prompts), "ended by the engine itself, not cut afterwards"

    end = unended[0][3]
    options = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "stop_token_ids": [end]}
    given = make(model=model, generation_kwargs=options)
    assert given.eos_token_ids == [end]
    completions = given.complete(prompts)
    assert max(map(len, completions)) == 12
    for mine, theirs in zip(completions, unended, strict=True):
        expected = cut_after_end(theirs[:12], [end])
        assert mine[: len(expected)] == expected  # the tokenizer's own end token is a token like any other
        assert len(mine) == len(expected) or end not in expected


def test_an_id_beyond_the_vocabulary_is_never_sampled(make, tmp_path):
    model = student(tmp_path / "student", vocab_size=320)
    with torch.no_grad():
        model.lm_head.weight[259:] = 8 * model.lm_head.weight[:61]  # the ids without a token are the most likely
    trainer = make(model=model, teacher_model=tiny.qwen2(48, seed=1, vocab_size=320))
    prompts = trainer.tokenize(tiny.PROMPTS) * 4
    free = trainer.rollout.complete(prompts, 0)
    assert max(map(max, free)) >= 259, "the student would sample ids that no tokenizer knows"

    trainer.teaching.readers = replace(trainer.readers, student_limits=replace(trainer.limits, vocabulary=259))
    trainer.rollout.bind(trainer)

    assert max(map(max, trainer.rollout.complete(prompts, 0))) < 259
    assert gap(trainer) < 1e-4, "log-probabilities are those before the mask"


def test_sampling_options_reach_vllm(make):
    trainer = make(temperature=1.9, eval_temperature=0.0, generation_kwargs={"min_tokens": 16})
    prompts = trainer.tokenize(tiny.PROMPTS)
    trainer.model.eval()
    greedy = trainer.complete(prompts)
    assert greedy == trainer.complete(prompts[::-1])[::-1]
    trainer.model.train()
    hot, again = trainer.complete(prompts), trainer.complete(prompts)
    assert hot != again != greedy != hot, "it samples"
    assert all(len(ids) == 16 for ids in hot)
    assert trainer.rollout._sampling["temperature"] == 1.9

    digits = make(vllm_structured_outputs_regex="[0-9]{3}")
    texts = digits.processing_class.batch_decode(digits.complete(prompts), skip_special_tokens=True)
    assert all(len(text) == 3 and text.isdigit() for text in texts), texts


def test_building_a_rollout_preserves_the_random_state(make):
    torch.manual_seed(3)
    make(seed=11, vllm_sync_check="every")
    with_vllm = torch.rand(1)
    torch.manual_seed(3)
    make(seed=11, use_vllm=False)
    assert torch.equal(torch.rand(1), with_vllm)


@pytest.mark.long
@pytest.mark.parametrize("how", ["closed", "collected"])
def test_closed_or_collected_engine_leaves_nothing_in_the_process(make, how):
    """Process groups and other engines live on, as in a notebook, where one trainer follows another.

    Its worker on a CPU replaces `set_num_threads`, that on a GPU sets the precision; both freeze all objects.
    """

    def state():
        matmuls = torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision
        return torch.get_num_threads(), torch.set_num_threads, gc.get_freeze_count(), matmuls

    trainer = make(top_k=1)
    prompts = trainer.tokenize(tiny.PROMPTS)
    expected = trainer.complete(prompts)
    first, options = trainer.rollout.engine, trainer.rollout._engine_arguments()
    gc.unfreeze()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        torch.set_float32_matmul_precision("high") if how == "closed" else enable_tf32(True)
        before = state()
        engine = VLLMEngine(**{**options, "seed": 1})
        assert state() == before
        engine.write([[5, 6]], [{"max_tokens": 2}])
        memory, ended = weakref.ref(engine._worker.model_runner.get_model()), weakref.ref(engine._llm)
        if how == "closed":
            engine.close()
            engine.close()
            assert state() == before
        del engine
        gc.collect()
        assert memory() is ended() is None, "its weights are gone"
        assert state() == before
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision("highest")
        for backend in (torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
            backend.fp32_precision = "none"
    assert torch.distributed.is_initialized()
    assert trainer.rollout.engine is first
    assert trainer.complete(prompts) == expected
    gc.freeze()  # again, as engines that end undo it


CALLS = {
    "write": ([[5]], [{}]),
    "load": ([],),
    "load_adapter": ({"a": (torch.ones(1, 1), torch.ones(1, 1), 1.0)},),
    "forget_prefixes": (),
    "sleep": (1,),
    "wake": ("weights",),
}


@pytest.mark.parametrize("call", CALLS)
def test_engine_calls_restore_the_current_stream(monkeypatch, call):
    """vLLM's shared experts make a stream of their own the current one; DeepSpeed waits for the default stream."""
    ours, theirs, current, done = SimpleNamespace(), SimpleNamespace(), [], []
    ours.wait_stream = lambda stream: done.append(("waits for", stream))

    class Changes:
        """Every part of an engine, each call of which changes the stream."""

        def __getattr__(self, name):
            return self

        def __call__(self, *args, **kwargs):
            current[:] = [theirs]
            raise KeyboardInterrupt  # also then

    device = SimpleNamespace(current_stream=lambda: current[0], set_stream=lambda stream: current.insert(0, stream))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch, "get_device_module", lambda: device)
    current.append(ours)
    engine = VLLMEngine.__new__(VLLMEngine)
    engine._llm, engine._adapter, engine._sharing = Changes(), None, SimpleNamespace(world_size=1)
    with pytest.raises(KeyboardInterrupt):
        getattr(engine, call)(*CALLS[call])
    assert current[0] is ours
    assert done == [("waits for", theirs)]


@pytest.mark.long
@pytest.mark.timeout(660)
def test_second_model_runner_is_synced_and_scores_as_the_model():
    """As on every GPU: full and adapter sync, tied and untied, a mixture of experts, a pooling teacher, the mask."""
    pytest.importorskip("triton", reason="Triton is not made for this system")
    found = json.loads(run(Path(__file__).parent / "second_runner.py", seconds=600).splitlines()[-1])
    pooling = found.pop("pooling")
    assert max(pooling) < 5e-6
    assert len(pooling) == 8
    for name, case in found.items():
        first, moved, second = case["gaps"]
        assert max(first, second) < 2e-5 < 1e-3 < moved, name
        assert case["mode"] == name.split(",")[0]
    assert found["full, tied"]["likeliest"] >= 259
    assert max(map(max, found["full, tied"]["written"])) < 259
