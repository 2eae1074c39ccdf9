"""Rows share a batch only where that changes none of them: the probe that decides it, and how rows are then read."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import tiny
from torch import Tensor
from transformers import BartConfig, Phi3Config

from trl_opsd import HFRollout
from trl_opsd.models import backbone
from trl_opsd.models.backbone import completion_hidden
from trl_opsd.models.padding import PADDED, BatchPolicy, prove_batch_policy
from trl_opsd.models.probes import Probed, find_batching
from trl_opsd.teacher.frozen import FrozenTeacher, Resident
from trl_opsd.types import Rollout
from trl_opsd.types.rollout import cut_after_end

CPU = torch.device("cpu")
BY_LENGTH, ALONE = BatchPolicy(0), BatchPolicy(0, batches_equal_lengths=False)
PACKED = BatchPolicy(packed=True)
TABLE = torch.randn(300, 8, generator=torch.Generator().manual_seed(0))


def states(ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> Tensor:
    """Prefix sums of token vectors, scaled by position: what a sound model's states depend on."""
    mask = torch.ones_like(ids) if mask is None else mask
    if positions is None:
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return ((TABLE[ids] * mask[..., None]).cumsum(1) * (1 + positions[..., None])).float()


def counts_padding(ids: Tensor, mask: Tensor, positions: Tensor | None) -> Tensor:
    return states(ids, mask, torch.arange(ids.size(1)).expand_as(ids))


def mixes_rows(ids: Tensor, mask: Tensor, positions: Tensor | None) -> Tensor:
    return states(ids, mask, positions) + 0.1 * TABLE[ids].mean((0, 1))


def looks_ahead(ids: Tensor, mask: Tensor, positions: Tensor | None) -> Tensor:
    return states(ids, mask, positions) + 0.1 * TABLE[ids].sum(1, keepdim=True)


def draws(ids: Tensor, mask: Tensor, positions: Tensor | None) -> Tensor:
    return states(ids, mask, positions) + torch.randn(8)


def stretches_far_rows(ids: Tensor, mask: Tensor, positions: Tensor | None) -> Tensor:
    found = states(ids, mask, positions)
    return found * 2 if positions is not None and positions.max() >= 64 else found


def rounds_and_sends_one_token_elsewhere(ids: Tensor, mask: Tensor, positions: Tensor | None) -> Tensor:
    found = states(ids, mask, positions)
    if len(ids) > 1:
        found[:, 4] *= 1.5
    return (found * (1 + 0.004 * len(ids))).bfloat16()


class TestProof:
    @pytest.mark.parametrize(
        ("read", "policy"),
        [
            (states, PADDED),
            (counts_padding, BY_LENGTH),
            (stretches_far_rows, BatchPolicy(64)),
            (rounds_and_sends_one_token_elsewhere, PADDED),
            (lambda *row: counts_padding(*row).bfloat16(), BY_LENGTH),
            (lambda ids, *row: states(ids, *row) * len(ids), ALONE),
        ],
    )
    def test_rows_are_padded_only_where_padding_changes_nothing(self, read, policy):
        assert prove_batch_policy(read, 300, CPU, (32, 64), "student (X)") == policy

    @pytest.mark.parametrize(
        ("read", "message"),
        [
            (draws, r"The student \(X\) changes the hidden state of a token by \d.* in a second forward pass"),
            (looks_ahead, r"The student \(X\) changes the hidden state of a token by \d.* if more tokens follow"),
            (mixes_rows, r"if more tokens follow"),
        ],
    )
    def test_model_that_no_batching_makes_exact_is_refused(self, read, message):
        with pytest.raises(ValueError, match=message):
            prove_batch_policy(read, 300, CPU, (), "student (X)")

    @pytest.mark.parametrize("factor", [1, 2])
    def test_a_mask_is_passed_only_where_it_changes_something(self, factor):
        def read(ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> Tensor:
            return states(ids, mask, positions) * (1 if mask is not None else factor)

        assert prove_batch_policy(read, 300, CPU, (), "student (X)").needs_mask is (factor > 1)

    @pytest.mark.parametrize("make", [tiny.qwen2, tiny.gpt2, tiny.gemma2])
    def test_sound_model_is_proved_in_three_passes(self, make):
        model, passes = make().train(), []
        model.base_model.register_forward_pre_hook(
            lambda module, args, kwargs: passes.append(kwargs["input_ids"].numel()), with_kwargs=True
        )
        before = torch.get_rng_state()
        assert Probed(model, "student").prove(find_batching).batching == PADDED
        assert passes == [5, 32, 32]
        assert model.training
        assert torch.equal(torch.get_rng_state(), before)


class TestGroups:
    LENGTHS = (5, 3, 9, 3, 9, 5)

    @pytest.mark.parametrize(
        ("policy", "collective", "groups"),
        [
            (PADDED, False, [[0, 1, 2, 3, 4, 5]]),
            (BY_LENGTH, False, [[0, 5], [1, 3], [2, 4]]),
            (BY_LENGTH, True, [[0], [1], [2], [3], [4], [5]]),
            (ALONE, False, [[0], [1], [2], [3], [4], [5]]),
            (BatchPolicy(5), False, [[0, 1, 3, 5], [2, 4]]),
            (BatchPolicy(9), True, [[0, 1, 2, 3, 4, 5]]),
        ],
    )
    def test_rows_are_grouped_as_the_reading_allows(self, policy, collective, groups):
        assert policy.groups(self.LENGTHS, collective) == groups

    def test_unequal_numbers_of_passes_between_processes_are_refused(self):
        with pytest.raises(ValueError, match="A row can have 9 tokens, but beyond 5"):
            BatchPolicy(5).groups(self.LENGTHS, collective=True)


def bart(**overrides: object) -> torch.nn.Module:
    """Counts padding as positions."""
    sizes = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 64, "dropout": 0.0}
    return tiny.model(BartConfig(vocab_size=259, is_decoder=True, max_position_embeddings=256, **sizes, **overrides))


def longrope(**overrides: object) -> torch.nn.Module:
    """Rotary frequencies of all rows change with the longest one, beyond 16 positions."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [8.0] * 8, "rope_theta": 10000.0}
    sizes = {**tiny.sizes(32), "original_max_position_embeddings": 16, **overrides}
    return tiny.model(Phi3Config(**sizes, rope_parameters={**rope, "original_max_position_embeddings": 16}))


def ragged() -> Rollout:
    """Four rows of 24, 6, 24 and 12 tokens."""
    generator = torch.Generator().manual_seed(0)
    prompts, completions = (torch.randint(3, 259, (4, size), generator=generator) for size in (14, 12))
    return Rollout.of(
        [ids[14 - size :].tolist() for ids, size in zip(prompts, (14, 4, 12, 9), strict=True)],
        [ids[:size].tolist() for ids, size in zip(completions, (10, 2, 12, 3), strict=True)],
        CPU,
    )


def largest_gap(model: torch.nn.Module, policy: BatchPolicy) -> float:
    """Between the states of padded rows and those of each row alone in float64, relative to the largest state."""
    rows, precise = ragged(), copy.deepcopy(model).double().eval()
    hidden = completion_hidden(model, rows, policy).double()
    gap = 0.0
    for row, (prompt, completion) in enumerate(zip(rows.prompt_lists(), rows.completion_lists(), strict=True)):
        bare = precise.get_base_model() if hasattr(precise, "peft_config") else precise
        alone = bare.base_model(input_ids=torch.tensor([prompt + completion]), use_cache=False).last_hidden_state[0]
        expected = alone[len(prompt) - 1 : -1]
        gap = max(gap, float((hidden[row, : len(completion)] - expected).abs().max() / expected.abs().max()))
    return gap


class TestReading:
    @pytest.mark.parametrize("make", [bart, longrope])
    @pytest.mark.parametrize("adapted", [False, True])
    def test_each_row_has_the_states_it_has_alone(self, make, adapted):
        model = make().eval()
        if adapted:
            model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).eval()
        policy = Probed(model, "student").prove(find_batching).batching
        assert policy == (BY_LENGTH if make is bart else BatchPolicy(16))
        with torch.no_grad():
            # Rows are padded at the end, which changes no position; the length of one changes the others' frequencies.
            assert largest_gap(model, PADDED) < 1e-5 if make is bart else largest_gap(model, PADDED) > 5e-3
            assert largest_gap(model, policy) < 1e-5
            assert largest_gap(model, ALONE) < 1e-5

    @pytest.mark.parametrize(("make", "looks"), [(tiny.gpt2, True), (tiny.qwen2, False)])
    def test_model_that_looks_for_padding_without_mask_gets_one(self, make, looks, caplog):
        model = make()
        model.config.pad_token_id = 0
        policy = Probed(model, "student").prove(find_batching).batching
        assert policy.needs_mask is looks
        with torch.no_grad():
            completion_hidden(model, ragged(), policy)
        assert "attention_mask" not in caplog.text

    @pytest.mark.parametrize(("make", "policy"), [(bart, BY_LENGTH), (tiny.qwen2, PACKED)])
    def test_gradients_are_those_of_rows_alone(self, make, policy, passes):
        model, gradients = make().eval(), []
        weights = torch.randn(4, 12, 32, generator=torch.Generator().manual_seed(1))
        for one in (policy, ALONE):
            model.zero_grad()
            (completion_hidden(model, ragged(), one) * weights * ragged().completion_mask[..., None]).sum().backward()
            gradients.append([one.grad.clone() for one in model.parameters() if one.grad is not None])
        torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)
        assert len(gradients[0]) > 10


@pytest.fixture
def passes(monkeypatch):
    """The tokens of each call of attention, and whether it has a mask; packed rows come in blocks of at most 30."""
    calls, attend = [], torch.nn.functional.scaled_dot_product_attention

    def spy(query, *given, attn_mask=None, **more):
        calls.append((query.size(2), attn_mask is not None))
        return attend(query, *given, attn_mask=attn_mask, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    monkeypatch.setattr(backbone, "BLOCK_TOKENS", 30)
    return calls


class TestPacking:
    """Rows of 24, 6, 24 and 12 tokens, in one sequence or in blocks of at most 30."""

    def test_small_packed_passes_equal_rows_alone(self, passes):
        with torch.no_grad():
            assert largest_gap(tiny.qwen2(), PACKED) < 1e-5
        assert passes[:6] == [(30, True)] * 2 + [(24, False)] * 2 + [(12, False)] * 2, "two layers each"

    def test_kernel_for_packed_rows_gets_all_at_once(self, passes, monkeypatch):
        monkeypatch.setattr(backbone, "has_varlen", lambda model: True)
        with torch.no_grad():
            assert largest_gap(tiny.qwen2(), PACKED) < 1e-5
        assert passes[:2] == [(66, True)] * 2

    @pytest.mark.parametrize("costs", [False, True])
    def test_teacher_whose_passes_copy_weights_pads_rows_instead(self, costs):
        class Placed(Resident):
            passes_are_costly = costs

        teacher = FrozenTeacher(Placed(tiny.qwen2(), CPU), padding_free=True)
        assert teacher.batching.packed is not costs

    def test_training_in_small_blocks_has_losses_of_padded_rows(self, passes, make_trainer):
        losses = []
        for packed in (True, False):
            trainer = make_trainer(padding_free=packed, max_steps=2, per_device_train_batch_size=8)
            passes.clear()
            trainer.train()
            losses.append(tiny.logged(trainer, "loss"))
            assert not packed or max(tokens for tokens, is_masked in passes if is_masked) <= 30
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        assert len(losses[0]) == 2


@pytest.mark.parametrize(("make", "policy"), [(bart, BY_LENGTH), (longrope, BatchPolicy(16)), (tiny.qwen2, PADDED)])
def test_the_padding_proof_gives_the_same_result_in_bfloat16(make, policy):
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)  # as far from zero as trained weights
    assert Probed(model.to(torch.bfloat16), "student").prove(find_batching).batching == policy


class TestTrainer:
    def test_rows_are_read_unmasked(self, trained, passes):
        trained(model=tiny.qwen2(num_key_value_heads=1), max_steps=1)
        assert [is_masked for _, is_masked in passes[-4:]] == [False] * 4, "teacher and student"

    def test_padding_is_proved_for_student_teacher_and_own_teacher(self, make_trainer, trained):
        trainer = make_trainer(model=bart(), teacher_model=longrope())
        assert (trainer.batching, trainer.teacher.batching) == (BY_LENGTH, BatchPolicy(16))
        trainer.train()
        own = trained(
            model=bart(),
            teacher_model=None,
            teacher_model_kind="live",
            train_dataset=tiny.rows().add_column("privileged_context", ["hint"] * 8),
        )
        assert own.teacher.batching == own.batching == BY_LENGTH

    @pytest.mark.parametrize(("make", "plain"), [(bart, {}), (bart, {"num_beams": 2}), (longrope, {})])
    def test_prompts_are_continued_as_they_would_be_alone(self, make_trainer, make, plain):
        """`longrope` rows cross 16 tokens at different times, or not at all."""
        student = make(tie_word_embeddings=False)
        trainer = make_trainer(model=student, rollout=HFRollout(), generation_kwargs={"do_sample": False, **plain})
        prompts = [list(range(3, 3 + length)) for length in (2, 14, 2, 5, 15, 20, 9)]
        written = trainer.complete(prompts)
        config = copy.copy(trainer.generation_config)
        config.max_new_tokens = 24
        for prompt, ids in zip(prompts, written, strict=True):
            inputs = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt)).long()}
            alone = student.eval().generate(**inputs, generation_config=config)[0, len(prompt) :].tolist()
            assert ids == cut_after_end(alone, trainer.eos_token_ids)
