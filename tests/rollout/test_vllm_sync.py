"""The engine has the student's current weights, a failed sync is detected, and the student is never changed."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from support import tiny
from support.measured_sampler import Measured, remembered

pytest.importorskip("vllm")

from transformers import TrainerCallback
from vllm.model_executor.layers import utils as layers
from vllm_lab import fails_halfway, gap, lora, move, student

from trl_opsd._compat.peft import Weight
from trl_opsd._compat.vllm.engine import VLLMEngine
from trl_opsd.errors import SyncError
from trl_opsd.rollout import vllm as backend
from trl_opsd.rollout import weight_sync

pytestmark = pytest.mark.vllm


class Watch(TrainerCallback):
    """Measures the gap after each step, before the new weights are sent, and after each rollout."""

    def attach(self, trainer):
        self.stale, self.synced, self._trainer, complete = [], [], trainer, trainer.rollout.complete

        def watched(prompt_ids, step):
            completions = complete(prompt_ids, step)
            self.synced.append(gap(trainer))
            return completions

        trainer.rollout.complete = watched

    def on_step_end(self, args, state, control, **kwargs):
        self.stale.append(gap(self._trainer))


def test_stale_weights_show_in_the_distance_of_the_sampler(make, monkeypatch):
    trainer = make(cls=Measured, max_steps=3, vllm_sync_check="never")
    remembered(trainer)
    send, sent = trainer.rollout.send_weights, []
    monkeypatch.setattr(trainer.rollout, "send_weights", lambda: sent.append(0 if sent else send()) or 0)
    trainer.train()
    assert len(sent) == 3, "of which the first alone arrives"
    fresh, *stale = tiny.logged(trainer, "rollout/kl_sampler")
    assert abs(fresh) < 1e-9
    assert min(stale) > 1e-3
    assert stale == pytest.approx([trainer.mean(1), trainer.mean(2)], rel=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", [None, "adapter", "full"])
def test_an_engine_has_the_weights_of_each_step(make, tmp_path, kind, tied):
    def made(watch, **given):
        adapter = {} if kind is None else {"peft_config": lora(), "vllm_weight_sync": kind}
        trainer = make(tied=tied, callbacks=[watch], max_completion_length=6, **adapter, **given)
        watch.attach(trainer)
        return trainer

    watch, resumed = Watch(), Watch()
    trainer = made(
        watch, max_steps=5, save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1,
        eval_dataset=tiny.rows(4), load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True,
    )  # fmt: skip
    trainer.train()

    assert len(watch.stale) == 5
    assert min(watch.stale) > 1e-2, "every step moves the student enough to show in an engine without it"
    assert max(watch.synced) <= 1e-4

    assert not trainer.state.best_model_checkpoint.endswith("checkpoint-5")
    assert gap(trainer) > 1e-2, "the engine holds the last step, the student the best one, and no step lies between"
    trainer.complete(trainer.tokenize(["a"]))
    assert gap(trainer) <= 1e-4

    again = made(resumed, max_steps=4)
    again.complete(again.tokenize(["a"]))
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert max(resumed.synced[1:]) <= 1e-4

    # The evaluation after each step is the first to write with the new weights.
    logged = [row for row in trainer.state.log_history if "eval_sync/bytes" in row]
    assert len(logged) == 5
    assert max(row["eval_rollout/logprob_gap"] for row in logged) <= 1e-4
    assert all(row["eval_sync/seconds"] > 0 and row["eval_sync/proof_seconds"] > 0 for row in logged)
    if kind == "adapter":
        size = sum(part.numel() for name, part in trainer.model.named_parameters() if "lora_" in name)
        assert {row["eval_sync/bytes"] for row in logged} == {4 * size}, "the adapter in float32 and nothing else"


def test_weights_changed_by_hand_without_a_step_are_sent(make, tmp_path):
    trainer = make(peft_config=lora())
    prompt = trainer.tokenize(["why?"])
    trainer.complete(prompt)
    trainer.model.save_pretrained(tmp_path / "adapter")

    with torch.no_grad():
        for name, part in trainer.model.named_parameters():
            if "lora_B" in name:
                part.mul_(-1)
    trainer.complete(prompt)
    assert gap(trainer) <= 1e-4, "written to in place"

    trainer.model.load_adapter(tmp_path / "adapter", "default")
    assert gap(trainer) > 1e-2
    trainer.complete(prompt)
    assert gap(trainer) <= 1e-4, "an adapter loaded over the old one"

    with torch.no_grad():
        trainer.model.base_model.model.model.layers[0].mlp.up_proj.base_layer.weight.mul_(1.5)
    trainer.complete(prompt)
    assert gap(trainer) <= 1e-4, "the base under the adapter"


# ---- Faults -----------------------------------------------------------------------------------------------------


def drained(self, weights):
    for _ in weights:
        pass


def spoilt(spoils):
    """`load` of what a function makes of all weights."""
    load = VLLMEngine.load
    return lambda self, weights: load(self, spoils(weights))


def without_head(weights):
    return (pair for pair in weights if pair[0] != "lm_head.weight")


def rounded(weights):
    return ((name, tensor.bfloat16().float()) for name, tensor in weights)


def test_weights_are_sent_again_after_a_failed_sync(make, monkeypatch):
    trainer = make()
    trainer.complete(prompt := trainer.tokenize(["a"]))
    with monkeypatch.context() as patch:
        patch.setattr(VLLMEngine, "load", spoilt(lambda weights: ((name, 0.5 * one) for name, one in weights)))
        with pytest.raises(SyncError):
            trainer.rollout.sync_weights()
    trainer.complete(prompt)
    assert gap(trainer) <= 1e-4


ADAPTER = {"peft_config": lora()}
FAULTS = {
    "nothing is loaded": ({}, "load", drained),
    "a stale adapter": (ADAPTER, "load_adapter", lambda self, layers: None),
    "no tied head": ({"tied": True}, "load", spoilt(without_head)),
    "weights that are rounded": ({}, "load", spoilt(rounded)),
    "prefixes that are kept": ({}, "forget_prefixes", lambda self: None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_sync_is_detected(make, monkeypatch, fault):
    given, name, other = FAULTS[fault]
    trainer = make(**given)
    prompt, noise = trainer.tokenize(["a"]), torch.Generator().manual_seed(0)
    trainer.complete(prompt)
    with torch.no_grad():
        for part in trainer.model.parameters():
            part.add_(0.1 * torch.randn(part.shape, generator=noise)) if part.requires_grad else None
    with monkeypatch.context() as patch:
        patch.setattr(VLLMEngine, name, other)
        with pytest.raises(SyncError, match="disagree by"):
            trainer.complete(prompt)
    trainer.complete(prompt)
    assert gap(trainer) <= 1e-4, "and it does not count as sent"


def test_a_faulty_first_sync_is_detected(make, monkeypatch):
    make().complete([[5, 6]])  # the engine holds the weights of an earlier student
    trainer = make()
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(-1)
    monkeypatch.setattr(VLLMEngine, "load", drained)
    with pytest.raises(SyncError, match="disagree by"):
        trainer.complete([[5]])


@pytest.mark.parametrize(("check", "proofs"), [("every", 3), ("first", 1), ("never", 0)])
def test_weights_are_sent_after_a_change_or_on_request_and_proven_as_asked(make, monkeypatch, check, proofs):
    trainer = make(vllm_sync_check=check, eval_dataset=tiny.rows(4), per_device_eval_batch_size=1)
    calls, load = [], VLLMEngine.load
    monkeypatch.setattr(VLLMEngine, "load", lambda self, weights: calls.append(1) or load(self, weights))
    found = trainer.evaluate()
    assert ("eval_rollout/logprob_gap" in found) == (proofs > 0)
    trainer.evaluate()
    assert len(calls) == 1, "one for eight batches"
    for _ in range(2):
        trainer.rollout.sync_weights()
    assert len(calls) == 3, "and those that were asked for"
    recorded = trainer._metrics["train" if trainer.model.training else "eval"]
    assert len(recorded["rollout/logprob_gap"]) == max(proofs - 1, 0)


# ---- LoRA never touches the base --------------------------------------------------------------------------------


def half(folder, **overrides):
    return student(folder, **overrides).bfloat16()


@pytest.mark.parametrize("kind", ["adapter", "full"])
def test_repeated_syncs_leave_the_base_bit_identical(make, tmp_path, kind, monkeypatch):
    model = half(tmp_path / "student")
    trainer = make(model=model, peft_config=lora(), vllm_weight_sync=kind, vllm_sync_check="first")
    before = {name: part.detach().clone() for name, part in trainer.model.named_parameters()}
    assert {part.dtype for name, part in before.items() if "lora_" not in name} == {torch.bfloat16}
    for _ in range(2):
        trainer.rollout.sync_weights()
    if kind == "adapter":
        with monkeypatch.context() as patch:
            patch.setattr(VLLMEngine, "load_adapter", lambda *_: pytest.fail("the engine broke"))
            with pytest.raises(pytest.fail.Exception, match="the engine broke"):
                trainer.rollout.sync_weights()
        trainer.rollout.sync_weights()
        size = sum(part.numel() for name, part in before.items() if "lora_" in name)
        assert trainer._metrics["train"]["sync/bytes"][-1] == 2 * size
    for name, part in trainer.model.named_parameters():
        assert torch.equal(part, before[name]), name
    assert not any(getattr(module, "merged", False) for module in trainer.model.modules())
    trainer.rollout._proof.check()  # the engine works again after the error


@pytest.mark.parametrize("packed", [False, True], ids=["float32", "packed"])
def test_a_sync_after_an_aborted_one_sends_all_weights(make, tmp_path, monkeypatch, packed):
    """As on a processor with AMX, where vLLM packs weights in half precision and leaves empty parameters behind."""
    if packed:
        if not hasattr(torch.ops._C, "convert_weight_packed"):
            pytest.skip("vLLM packs no weights on a processor without AVX-512, and has no function for it")
        monkeypatch.setattr(layers, "check_cpu_sgl_kernel", lambda rows, columns, dtype: dtype == torch.bfloat16)
        monkeypatch.setattr(backend, "VLLMEngine", VLLMEngine)  # not one that was started without
    model = half(tmp_path / "student") if packed else student(tmp_path / "student")
    trainer = make(model=model)
    trainer.complete(trainer.tokenize(["a"]))
    if packed:
        parts = dict(trainer.rollout.engine._worker.model_runner.get_model().named_parameters())
        assert parts["model.layers.0.mlp.down_proj.weight"].numel() == 0, "it was packed"

    for reached in (9, 1, 14):
        with monkeypatch.context() as patch:
            patch.setattr(VLLMEngine, "load", fails_halfway(VLLMEngine.load, reached))
            with pytest.raises(RuntimeError, match="the engine broke"):
                trainer.rollout.sync_weights()
        with torch.no_grad():
            for part in trainer.model.parameters():
                part.copy_(part.flip(0))
        trainer.rollout.sync_weights()
        assert gap(trainer) <= (0.1 if packed else 1e-4)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ({"use_dora": True}, "variant of LoRA such as DoRA"),
        ({"modules_to_save": ["norm"]}, "`modules_to_save`"),
        ({"lora_bias": True, "target_modules": ["q_proj"]}, "`lora_bias`"),
        ({"r": 600}, "rank 600 exceeds the engine's maximum of 512"),
    ],
    ids=["dora", "modules_to_save", "bias", "rank"],
)
def test_adapter_of_a_kind_unknown_to_vllm_is_merged(make, overrides, why):
    trainer = make(peft_config=lora(**overrides))
    assert trainer.rollout._mode == "full"
    assert why in weight_sync.chosen_sync("auto", trainer.model, backend.LORA_RANKS)[1]
    with pytest.raises(ValueError, match="vllm_weight_sync='adapter'"):
        weight_sync.chosen_sync("adapter", trainer.model, backend.LORA_RANKS)
    move(trainer)
    trainer.complete(trainer.tokenize(["a"]))
    assert gap(trainer) <= 1e-4


def test_ranks_and_scales_of_single_layers_reach_the_engine(make):
    """vLLM lists Llama's head as a layer for adapters, and cannot score prompts where the head may have one."""
    config = lora(rank_pattern={"q_proj": 2, "down_proj": 7}, alpha_pattern={"v_proj": 11}, use_rslora=True)
    trainer = make("llama", tied=True, peft_config=config)
    assert trainer.rollout._mode == "adapter"
    trainer.complete(trainer.tokenize(["a"]))
    assert gap(trainer) <= 1e-4


@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
def test_gathered_weights_are_copied_before_the_gather_ends(monkeypatch, split):
    """vLLM packs for NCCL on streams of its own, and keeps tensors of several buckets until a buffer is full."""
    done = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: done.append("synchronize"))

    @contextmanager
    def gathered(parts):
        done.append(f"gather {len(parts)}")
        yield
        done.append("leave")

    tensors = [torch.empty(2**25 + 1, device="meta") for _ in range(3)]  # of which no bucket holds two
    for tensor in tensors if split else ():
        tensor.ds_id = id(tensor)
    weights = [Weight.of(str(number), tensor) for number, tensor in enumerate(tensors)]
    taken = []
    with weight_sync.Stream(weights, torch.float32, torch.device("meta"), gathered) as drawn:
        for name, tensor in drawn:
            done.append(name)
            taken.append(tensor)

    steps = [["gather 1", name, "synchronize", "leave"] if split else ["gather 0", name, "leave"] for name in "012"]
    assert done == ["synchronize", *(step for of_one in steps for step in of_one)], "first after what was written last"
    aliased = [
        one.untyped_storage()._cdata == of.untyped_storage()._cdata for one, of in zip(taken, tensors, strict=True)
    ]
    assert aliased == [not split] * 3, "what was gathered is given back, so it is copied"


def test_nans_of_initial_weights_do_not_outlive_the_first_sync(make, monkeypatch):
    """The engine starts with random weights, and its attention reads past the filled part of a block."""
    wipe, wiped = VLLMEngine.wipe_cache, []

    def poisoned(self):
        for part in self._worker.model_runner.kv_caches:
            part.fill_(torch.nan)
        wiped.append(wipe(self))

    monkeypatch.setattr(VLLMEngine, "wipe_cache", poisoned)
    trainer = make()
    assert wiped
    trainer.complete(trainer.tokenize(tiny.PROMPTS))
    assert gap(trainer) < 1e-4
