"""Few padding tokens are read, and the student learns the same however its rows are dealt, cut or packed."""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from support import tiny
from transformers import GPTNeoConfig, Llama4TextConfig, MambaConfig

from trl_opsd import FixedRollout, HFRollout, OPSDTrainer
from trl_opsd.loop import dealing
from trl_opsd.models.padding import BatchPolicy
from trl_opsd.models.probes import Probed, check_packing

ROWS, STEPS = 24, 3


def lognormal(generator: random.Random, most: int) -> int:
    return max(1, min(most, round(generator.lognormvariate(2.6, 1.0))))


def ragged(rows: int = ROWS * STEPS) -> tuple[Dataset, FixedRollout]:
    """Prompts and completions of lognormal lengths, from 1 to 100 and 120 tokens."""
    generator = random.Random(0)
    prompts = ["".join(generator.choices("abcdefgh", k=8 + lognormal(generator, 92))) for _ in range(rows)]
    ids = tiny.tokenizer()(prompts)["input_ids"]
    answers = [generator.choices(range(3, 259), k=lognormal(generator, 120)) for _ in prompts]
    return Dataset.from_dict({"prompt": prompts}), FixedRollout(dict(zip(map(tuple, ids), answers, strict=True)))


class Counted:
    """Counts the tokens that pass through a backbone, and those of them that are real."""

    def __init__(self, trainer):
        self.read = {"student": 0, "teacher": 0}
        self.passes = {"student": 0, "teacher": 0}
        self.largest = 0
        models = {"student": trainer.model, "teacher": trainer.teacher_model}
        for role, model in models.items():
            model.get_input_embeddings().register_forward_hook(lambda _, ids, __, role=role: self.count(role, ids[0]))

    def count(self, role, ids):
        self.read[role] += ids.numel()
        self.passes[role] += 1
        if role == "student":
            self.largest = max(self.largest, ids.numel())


WAYS = {
    "equal numbers of rows": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 6},
    "a budget": {"max_tokens_per_microbatch": 300},
    "a budget within accumulation": {
        "per_device_train_batch_size": 12,
        "gradient_accumulation_steps": 2,
        "max_tokens_per_microbatch": 300,
    },
    "packed": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 6, "padding_free": True},
    "packed to a budget": {"max_tokens_per_microbatch": 300, "padding_free": True},
}


@pytest.fixture(scope="module")
def real():
    """Tokens of all rows, prompt and completion."""
    _, rollout = ragged()
    return sum(len(prompt) + len(answer) for prompt, answer in rollout._completions.items())


def dealt(make_trainer, way, family=tiny.qwen2, **more):
    rows, rollout = ragged()
    models = {"model": family(32, 0), "teacher_model": family(48, 1)}
    options = {"max_completion_length": 120, "max_steps": STEPS, "per_device_train_batch_size": ROWS, **way}
    trainer = make_trainer(**models, train_dataset=rows, rollout=rollout, **options, **more)
    counted = Counted(trainer)
    trainer.train()
    return tiny.weights(trainer), counted, trainer


@pytest.mark.parametrize(
    ("family", "ways"),
    [
        pytest.param(tiny.qwen2, [*WAYS], marks=pytest.mark.quick),
        (tiny.gemma2, ["a budget within accumulation"]),
        (tiny.gpt2, ["packed to a budget"]),
        pytest.param(tiny.gemma2, [*WAYS], marks=pytest.mark.long),
        pytest.param(tiny.gpt2, [*WAYS], marks=pytest.mark.long),
    ],
)
def test_batching_saves_tokens_without_changing_the_student(make_trainer, family, ways, real):
    plain, whole, trainer = dealt(make_trainer, {}, family)
    losses = tiny.logged(trainer, "loss")
    assert whole.passes["student"] == STEPS
    assert whole.read["student"] / real > 2
    for name in ways:
        weights, counted, other = dealt(make_trainer, WAYS[name], family)
        assert (weights - plain).abs().max() <= 1e-5, name
        assert tiny.logged(other, "loss") == pytest.approx(losses, rel=1e-4)
        share = {role: read / real for role, read in counted.read.items()}
        assert share["student"] <= (1.02 if "packed" in name else 1.25), name
        assert share["teacher"] <= (1.02 if "packed" in name else 1.15), name
        if "budget" in name:
            assert counted.largest <= 300, "no row is longer"
            assert counted.passes["student"] < STEPS * ROWS
            assert len(other.state.log_history) == len(trainer.state.log_history)


def test_batching_does_not_change_an_adapter(make_trainer):
    adapter = {"peft_config": LoraConfig(r=4, target_modules="all-linear"), "seed": 3}
    (plain, *_), (packed, *_), (budget, *_) = (
        dealt(make_trainer, way, **adapter) for way in ({}, WAYS["packed"], WAYS["packed to a budget"])
    )
    assert (packed - plain).abs().max() <= 1e-5
    assert (budget - plain).abs().max() <= 1e-5


def test_self_teacher_reads_packed_rows_and_generation_stays_padded(trained):
    rows = ragged(16)[0].add_column("privileged_context", ["hint"] * 16)
    given = {"teacher_model": None, "teacher_model_kind": "live", "train_dataset": rows, "rollout": HFRollout()}
    given |= {"max_completion_length": 20, "per_device_train_batch_size": 8, "max_steps": 2, "seed": 1}
    plain, packed = trained(**given), trained(padding_free=True, max_tokens_per_microbatch=400, **given)
    assert (plain.teacher.batching.packed, packed.teacher.batching.packed) == (False, True)
    assert not packed.batching.packed
    assert (tiny.weights(plain) - tiny.weights(packed)).abs().max() <= 1e-5


def test_packing_does_not_change_evaluation(make_trainer):
    rows, rollout = ragged(16)
    given = {"train_dataset": None, "eval_dataset": rows, "rollout": rollout, "max_completion_length": 120}
    plain, packed = (make_trainer(padding_free=one, **given).evaluate()["eval_loss"] for one in (False, True))
    assert packed == pytest.approx(plain, rel=1e-5)


def mamba() -> torch.nn.Module:
    sizes = {"vocab_size": 259, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
    model = tiny.model(MambaConfig(**sizes, tie_word_embeddings=False))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn_like(parameter) / parameter.size(1) ** 0.5)
    return model


def llama4() -> torch.nn.Module:
    sizes = {**tiny.sizes(32), "intermediate_size_mlp": 64, "num_local_experts": 2}
    return tiny.model(Llama4TextConfig(**sizes, head_dim=16, attention_chunk_size=32))


def gpt_neo() -> torch.nn.Module:
    sizes = {"vocab_size": 259, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 256}
    return tiny.model(GPTNeoConfig(**sizes, attention_types=[[["global", "local"], 1]], attention_dropout=0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (tiny.qwen2, None),
        (llama4, "attention_chunk_size=32"),
        (gpt_neo, "mask of the size of its context"),
        (mamba, "concatenated rows change each other"),
    ],
)
def test_packing_refuses_models_whose_rows_leak(make, message, dtype):
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        Probed(make().to(dtype), "student").prove(check_packing)


@pytest.mark.parametrize("role", ["student", "teacher"])
def test_packing_is_proved_of_student_and_teacher(make_trainer, role):
    models = {"model" if role == "student" else "teacher_model": mamba()}
    with pytest.raises(ValueError, match=rf"`padding_free=True`: in the {role} \(MambaForCausalLM\), .* Remove the"):
        make_trainer(**models, padding_free=True)


class UserLoader(OPSDTrainer):
    def get_train_dataloader(self):
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=2, shuffle=True, collate_fn=list)


def test_a_step_learns_from_all_rows_of_a_loader_of_ones_own(make_trainer):
    losses = []
    for kind in (OPSDTrainer, UserLoader):
        trainer = make_trainer(kind, gradient_accumulation_steps=4, max_steps=1)
        trainer.train()
        losses += tiny.logged(trainer, "loss")
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


class TwoFaced(torch.optim.SGD):
    """Keeps other weights while it evaluates, as schedule-free optimizers do."""

    def train(self):
        self.mode = "train"

    def eval(self):
        self.mode = "eval"


def test_generation_uses_training_weights_of_schedule_free_optimizers(trained):
    modes = []

    class Watched(FixedRollout):
        def complete(self, prompt_ids, step):
            modes.append(optimizer.mode)
            return super().complete(prompt_ids, step)

    student = tiny.qwen2()
    optimizer = TwoFaced(student.parameters(), lr=1e-3)
    given = {"eval_dataset": tiny.rows(2), "eval_strategy": "steps", "eval_steps": 1}
    trained(model=student, optimizers=(optimizer, None), rollout=Watched(tiny.recorded(tiny.tokenizer())), **given)
    assert modes == ["train", "eval"] * 3


def test_budget_is_refused_for_a_sharded_model_that_reads_row_by_row(monkeypatch, make_trainer):
    monkeypatch.setattr(dealing, "is_split_model", lambda _: True)
    trainer = make_trainer(max_tokens_per_microbatch=20)
    trainer.batching = BatchPolicy(0)
    with pytest.raises(ValueError, match="every process needs the same number of rows"):
        dealing.check_budget(trainer)


def test_token_budget_counts_padding_to_a_multiple(make_trainer):
    _, counted, _ = dealt(make_trainer, {"pad_to_multiple_of": 32, "max_tokens_per_microbatch": 200})
    longest = max(len(prompt) + len(answer) for prompt, answer in ragged()[1]._completions.items())
    assert counted.largest <= max(200, longest + 31)
