"""Each remedy for self-distillation equals a few lines of float64, alone and with others, in losses and weights."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from datasets import Dataset
from divergences import EntropyAwareKL
from peft import LoraConfig
from small_methods import AnchoredBy, ShortAtFirst
from support import tiny
from support.rollouts import Answering
from torch import Tensor

from trl_opsd import HFRollout, OPSDTrainer
from trl_opsd.losses import ForwardKL, ReverseKL
from trl_opsd.losses.registry import divergence_of

WORDS = tiny.tokenizer()
RATE = 1e-2


def answer(prompt_ids: list[int]) -> list[int]:
    start = sum(prompt_ids)
    return [5 + (start + 3 * place) % 60 for place in range(3 + start % 5)] + [WORDS.eos_token_id]


def rows(**columns: list[Any]) -> Dataset:
    contexts = {
        "privileged_context": [f"hint {row}" for row in range(8)],
        "contrast_context": [f"wrong {7 * row % 5}" for row in range(8)],
    }
    return Dataset.from_dict({"prompt": tiny.PROMPTS, **contexts, **columns})


@pytest.fixture
def trained(trained):
    options = {
        "learning_rate": RATE, "optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 1e9,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 2, "shuffle_dataset": False,
    }  # fmt: skip
    return lambda cls=OPSDTrainer, **given: trained(
        cls, **{"train_dataset": rows(), "rollout": Answering(answer), **options, **given}
    )


# ---- In float64 ------------------------------------------------------------------------------------------------------


def log_probs(model: Any, text: str, completion: list[int], temperature: float = 1.0) -> Tensor:
    """[C, V], float64, of a row alone."""
    prompt = WORDS(text)["input_ids"]
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return (logits.double() / temperature).log_softmax(-1)


def losses_in_float64(student: Any, teachers: dict[str, Any], data: Dataset, options: dict[str, Any]) -> list[float]:
    """Plain SGD, four rows a step; the losses of the steps, and the student changed in place."""
    own = options.get("teacher_model_kind")
    student, origin = student.double().train(), copy.deepcopy(student).double().eval()
    models = {name: one.double().eval() for name, one in teachers.items()}
    compared = divergence_of(options.get("divergence", "reverse_kl"))
    anchored = ForwardKL() if options.get("methods") == "anchored" else ReverseKL()
    weight, bound = options.get("contrast_weight", 0.0), options.get("contrast_clip")
    factor, anchor = options.get("extrapolation", 1.0), options.get("anchor_weight", 0.0)
    mine_at, target_at = (options.get(f"{one}_temperature", 1.0) for one in ("student", "teacher"))
    found = []
    for start in range(0, len(data), 4):
        total, weights = torch.zeros((), dtype=torch.float64), 0.0
        for row in data.select(range(start, start + 4)):
            completion = answer(WORDS(row["prompt"])["input_ids"])
            mine = log_probs(student, row["prompt"], completion, mine_at)
            with torch.no_grad():
                live = {"live": student, "base": origin}
                teacher = live.get(own) or models[row.get("teacher", "one")]
                told = log_probs(teacher, f"{row['privileged_context']}\n\n{row['prompt']}", completion, target_at)
                less = log_probs(teacher, f"{row['contrast_context']}\n\n{row['prompt']}", completion, target_at)
                first, held = (log_probs(origin, row["prompt"], completion, one) for one in (target_at, mine_at))
                gap = told - less
                gap = gap if bound is None else bound * (gap / bound).tanh()
                target = (first + factor * (told - first) + weight * gap).log_softmax(-1)
            from_target = compared.value(mine, target)
            each = from_target + anchor * anchored.value(mine, held)
            places = torch.arange(len(completion), dtype=torch.float64)
            scale = torch.ones(len(completion), dtype=torch.float64)
            if options.get("token_selection") == "prefix":
                scale = scale * (places < -(-len(completion) // 2))
            if options.get("token_selection") == "teacher_divergence":
                kept = from_target.detach().topk(-(-len(completion) // 2)).indices
                is_kept = torch.zeros_like(scale).index_fill(0, kept, 1)
                scale = scale * is_kept * scale.mean() * len(kept) / scale[kept].sum()
            total, weights = total + (scale * each).sum(), weights + float(scale.sum())
        loss = total / weights
        trainable = [one for one in student.parameters() if one.requires_grad]
        gradients = torch.autograd.grad(loss, trainable)
        found.append(float(loss.detach()))
        with torch.no_grad():
            for one, gradient in zip(trainable, gradients, strict=True):
                one.sub_(gradient, alpha=RATE)
    return found


REMEDIES: dict[str, dict[str, Any]] = {
    "contrast": {"contrast_weight": 0.5},
    "contrast, bounded": {"contrast_weight": 1.0, "contrast_clip": 3.0},
    "purified": {"contrast_weight": 1.0, "contrast_clip": 10.0, "extrapolation": 0.0},
    "beyond the teacher": {"extrapolation": 1.25},
    "anchor": {"anchor_weight": 0.3},
    "anchor, forward": {"anchor_weight": 0.3, "methods": "anchored"},
    "entropy-aware": {"divergence": EntropyAwareKL()},
}
WITH: dict[str, dict[str, Any]] = {
    "itself": {},
    "forward KL": {"divergence": "forward_kl"},
    "JSD, selection": {"divergence": "jsd", "token_selection": "prefix", "token_fraction": 0.5},
    "two temperatures": {"student_temperature": 1.4, "teacher_temperature": 0.6},
    "the tokens that differ most": {"token_selection": "teacher_divergence", "token_fraction": 0.5},
    "two teachers": {"teacher_model": "two"},
    "itself as a teacher": {"teacher_model_kind": "live"},
    "one micro-batch": {"max_tokens_per_microbatch": 100_000},
    "rows as they end": {"overlap": "step"},
    "tiles of two": {"loss_chunk_tokens": 2},
}
PAIRS = {
    **{(one, "itself"): {} for one in REMEDIES},
    **{("contrast, bounded", one): {} for one in WITH},
    **{(remedy, one): {} for remedy, one in itertools.product(("anchor", "beyond the teacher"), WITH)},
}


def options_of(*names: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        found.update(REMEDIES.get(name, WITH.get(name, {})))
    return found


def assert_equals_float64(trained, options: dict[str, Any]) -> None:
    options, data = dict(options), rows()
    own = options.get("teacher_model_kind")
    teachers = {} if own else {"one": tiny.qwen2(48, 1)}
    if options.pop("teacher_model", None) == "two":
        teachers["two"] = tiny.qwen2(40, 2)
        data = rows(teacher=["one", "two", "two", "one"] * 2)
    student = tiny.qwen2(32, 0)
    given = teachers if len(teachers) > 1 else teachers.get("one")
    methods = [AnchoredBy()] if options.pop("methods", None) else []
    expected_options = options | ({"methods": "anchored"} if methods else {})
    ours = trained(
        model=copy.deepcopy(student), teacher_model=copy.deepcopy(given), train_dataset=data, methods=methods, **options
    )
    expected = losses_in_float64(student, teachers, data, expected_options)
    found = tiny.logged(ours, "loss")
    assert found == pytest.approx(expected, rel=2e-5)
    for mine, wanted in zip(ours.model.parameters(), student.parameters(), strict=True):
        torch.testing.assert_close(mine.double(), wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("pair", PAIRS, ids=", ".join)
def test_a_remedy_equals_float64(trained, pair):
    assert_equals_float64(trained, options_of(*pair))


def test_contrast_of_sampled_tokens_is_log_ratio_to_contrasted_target(trained):
    student, teacher, data = tiny.qwen2(32, 0), tiny.qwen2(48, 1), rows()
    given = {"contrast_weight": 0.5, "divergence": "sampled_reverse_kl", "top_k": 0, "max_steps": 1}
    ours = trained(model=copy.deepcopy(student), teacher_model=copy.deepcopy(teacher), **given)
    ratios = []
    for row in data.select(range(4)):
        completion = answer(WORDS(row["prompt"])["input_ids"])
        told, less = (
            log_probs(teacher.double(), f"{row[name]}\n\n{row['prompt']}", completion)
            for name in ("privileged_context", "contrast_context")
        )
        gap = log_probs(student.double(), row["prompt"], completion) - (told + 0.5 * (told - less)).log_softmax(-1)
        ratios.append(gap.gather(1, torch.tensor(completion)[:, None]))
    assert tiny.logged(ours, "loss") == pytest.approx([float(torch.cat(ratios).detach().mean())], rel=2e-5)


@pytest.mark.long
@pytest.mark.parametrize("pair", list(itertools.combinations(REMEDIES, 2)), ids=", ".join)
@pytest.mark.parametrize("other", WITH)
def test_two_remedies_equal_float64(trained, pair, other):
    assert_equals_float64(trained, options_of(*pair, other))


@pytest.mark.parametrize("other", ["itself", "two temperatures", "the tokens that differ most"])
def test_all_remedies_at_once_equal_float64(trained, other):
    together = "contrast, bounded", "beyond the teacher", "anchor, forward", "rising weights"
    assert_equals_float64(trained, options_of(*together, other))


def test_an_anchor_does_not_choose_tokens(trained):
    assert_equals_float64(trained, {"anchor_weight": 300.0, **WITH["the tokens that differ most"]})


@pytest.mark.parametrize("options", [{}, {"extrapolation": 1.25}, {"contrast_weight": 0.5}], ids=str)
def test_a_student_has_not_left_its_anchor_at_first(trained, options):
    trainer = trained(anchor_weight=0.3, student_temperature=1.4, teacher_temperature=0.6, **options)
    first, second = tiny.logged(trainer, "anchor/mean")
    assert abs(first) < 1e-6 < second


# ---- Short completions first -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("resumes", [False, True])
def test_completions_grow_to_their_limit(make_trainer, tmp_path, resumes):
    class Noting(OPSDTrainer):
        def teach(self, rollout, rows):
            if self.model.training:
                longest.append(rollout.completion_mask.sum(1).max().item())
            return super().teach(rollout, rows)

    longest: list[int] = []
    options = {
        "rollout": HFRollout(), "max_completion_length": 20, "max_steps": 6,
        "learning_rate": 1e-9, "save_strategy": "steps", "save_steps": 2,
    }  # fmt: skip
    trainer = make_trainer(Noting, **options, methods=[ShortAtFirst(4, 4)])
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    limits = [4, 8, 12, 16, 20, 20]
    assert [entry["completions/limit"] for entry in logs] == limits
    assert longest == limits
    evaluated = trainer.predict(tiny.rows(4)).predictions
    assert evaluated.shape[1] > 16, "an evaluation has the whole length"
    if resumes:
        again = make_trainer(Noting, **options, methods=[ShortAtFirst(4, 4)])
        longest.clear()
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert [entry["completions/limit"] for entry in again.state.log_history if "loss" in entry] == limits


# ---- The student as it was passed ------------------------------------------------------------------------------------


def test_it_stays_when_a_run_resumes(make_trainer, tmp_path):
    options = {
        "train_dataset": rows(), "rollout": Answering(answer), "learning_rate": 1e-2, "max_steps": 4,
        "anchor_weight": 0.2, "extrapolation": 1.2, "contrast_weight": 0.5, "save_strategy": "steps", "save_steps": 2,
    }  # fmt: skip
    whole, resumed = make_trainer(**options), make_trainer(**options)
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert torch.equal(tiny.weights(resumed), tiny.weights(whole))
    for mine, first in zip(resumed.teachers.origin.model.parameters(), tiny.qwen2(32).parameters(), strict=True):
        assert torch.equal(mine, first)


def test_it_is_the_base_teacher_where_there_is_one(make_trainer):
    lora = {"peft_config": LoraConfig(r=4, target_modules="all-linear"), "anchor_weight": 0.2, "train_dataset": rows()}
    trainer = make_trainer(teacher_model=None, teacher_model_kind="base", **lora)
    assert trainer.teachers.origin is trainer.teacher
    moved = make_trainer(teacher_model=None, teacher_model_kind="ema", **lora)
    assert moved.teachers.origin is not moved.teacher
    assert moved.teachers.origin.model is moved.model, "without its adapter: no copy"
