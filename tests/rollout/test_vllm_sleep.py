"""An engine sleeps while nothing is generated, wakes once per generation batch or evaluation, and loses no weight."""

from __future__ import annotations

import pytest
import torch
from support import tiny
from support.tool_calls import CALL, words
from transformers import TrainerCallback

pytest.importorskip("vllm")

from vllm_lab import by_hf, lora, student

from trl_opsd import OPSDTrainer
from trl_opsd.rollout import vllm as backend

pytestmark = pytest.mark.vllm


class Watched:
    """A running engine that notes how it is used, refuses what a sleeping one would, and loses what it would lose."""

    name, block_size = "vLLM", 16

    def __init__(self, engine):
        self._engine, self.calls, self.asleep = engine, [], set()

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def sleep(self, level):
        assert "weights" not in self.asleep
        self.calls.append(f"sleep {level}")
        self.asleep = {"weights", "kv_cache"}
        for weight in self._engine._worker.model_runner.get_model().parameters() if level == 2 else ():
            weight.data.fill_(torch.nan)
        for cache in self._engine._worker.model_runner.kv_caches:  # which gets other memory
            cache.fill_(torch.nan)

    def wake(self, what):
        self.calls.append(f"wake {what}")
        self.asleep.remove(what)

    def load(self, weights):
        assert "weights" not in self.asleep
        self.calls.append("load")
        self._engine.load(weights)

    def write(self, prompt_ids, options):
        assert not self.asleep
        if "logprobs" not in options[0]:  # else a proof asks
            self.calls.append("write")
            options = [{**one, "max_tokens": min(one["max_tokens"], 16)} for one in options]
        return self._engine.write(prompt_ids, options)


class CallsThreeTimes(OPSDTrainer):
    """Has the engine write, but goes on as if the student had called the tool in its first three turns."""

    def complete(self, prompt_ids):
        super().complete(prompt_ids)
        turns = [self.processing_class.decode(ids).count("<tool_response>") for ids in prompt_ids]
        return self.processing_class(["four<|im_end|>" if turn == 3 else CALL for turn in turns])["input_ids"]


@pytest.fixture
def watch(make, monkeypatch):
    """Builds a trainer whose engine may sleep, and returns both."""
    shared = backend.VLLMEngine  # as `make` has set it
    monkeypatch.setattr(backend, "why_no_sleep_mode", lambda: None)
    awake = {"enable_sleep_mode": False}
    monkeypatch.setattr(backend, "VLLMEngine", lambda **options: Watched(shared(**{**options, **awake})))

    def watch(**given):
        trainer = make(vllm_enable_sleep_mode=True, top_k=1, per_device_eval_batch_size=2, **given)
        return trainer, trainer.rollout.engine

    return watch


USED = ["wake weights", "load", "wake kv_cache", "write", "sleep 2"]


def test_an_engine_sleeps_but_while_it_is_used(watch, monkeypatch):
    trainer, engine = watch()
    prompts = trainer.tokenize(tiny.PROMPTS)
    expected = by_hf(trainer, prompts)
    assert engine.calls == ["sleep 2"], "from its construction"
    assert trainer.complete(prompts) == expected
    assert engine.calls[1:] == USED
    for name, awake in (("load", ["wake weights", "load"]), ("write", USED[:3])):
        engine.calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(engine._engine, name, lambda *args: pytest.fail("the engine"))
            with pytest.raises(pytest.fail.Exception, match="the engine"):
                trainer.complete(prompts)
        assert engine.calls == [*awake, "sleep 2"], "also after a failure"
    engine.calls.clear()
    trainer.rollout.sync_weights()
    assert engine.calls == [*USED[:3], "sleep 2"]
    assert trainer.complete(prompts) == expected
    monkeypatch.setattr(engine._engine, "close", lambda: engine.calls.append("closed"))
    with trainer.rollout.session():
        trainer.complete(prompts)
        trainer.rollout.close()
    assert engine.calls[-2:] == ["write", "closed"], "a closed one does not sleep"
    _, with_adapter = watch(peft_config=lora())
    assert with_adapter.calls == ["sleep 1"], "which keeps the base: an adapter is sent alone"


def test_an_engine_sleeps_once_per_generation_batch_whatever_its_turns(watch, tmp_path):
    conversations = tiny.rows(4).map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    trainer, engine = watch(
        cls=CallsThreeTimes,
        model=student(tmp_path / "student", max_position_embeddings=2048),
        teacher_model=tiny.qwen2(48, seed=1, max_position_embeddings=2048),
        processing_class=words(),
        train_dataset=conversations,
        tools=[tiny.add],
        max_completion_length=800,
        max_steps=2,
    )
    trainer.train()
    assert engine.calls[1:] == [*USED[:3], *["write"] * 4, "sleep 2"] * 2
    assert trainer.state.log_history[0]["tools/call_frequency"] == 3


def test_engine_sleeps_once_per_evaluation(watch):
    class Does(TrainerCallback):
        does = staticmethod(lambda model: None)

        def on_prediction_step(self, args, state, control, model=None, **kwargs):
            self.does(model)

    rows, does = tiny.rows(), Does()
    trainer, engine = watch(eval_dataset={"a": rows, "b": rows}, callbacks=[does])
    for use, writes in ((trainer.evaluate, 8), (lambda: trainer.predict(rows), 4)):
        engine.calls.clear()
        use()
        assert engine.calls == [*USED[:3], *["write"] * writes, "sleep 2"]

    engine.calls.clear()
    does.does = lambda model: model.model.norm.weight.detach().add_(0.1)
    metrics = trainer.evaluate(rows.select(range(4)))
    assert engine.calls == [*USED[:4], "load", "write", "sleep 2"], "changed weights are sent without sleep"
    assert 0 < metrics["eval_rollout/logprob_gap"] < 1e-4

    def interrupts(model):
        raise KeyboardInterrupt

    does.does = interrupts
    with pytest.raises(KeyboardInterrupt):
        trainer.evaluate()
    assert engine.calls[-2:] == ["write", "sleep 2"]
