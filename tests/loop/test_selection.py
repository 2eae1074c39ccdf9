"""With `token_selection` the student learns the mean over the kept tokens of a step, and forms no product of others."""

from __future__ import annotations

import math

import pytest
import torch
from peft import LoraConfig
from support import tiny

from trl_opsd import OPSDTrainer
from trl_opsd.losses import ForwardKL, LazyLogits, OutputHead, ReverseKL, SampledReverseKL, dense_divergence
from trl_opsd.losses.objective import Objective
from trl_opsd.methods.selection import LATE, TokenSelection
from trl_opsd.teacher.comparison import Comparison, best, compared, tokens_by_teacher
from trl_opsd.types import Rollout, RowTargets, Sampled, TeacherTargets

EARLY = ("prefix", "random")
CRITERIA = (*EARLY, *LATE)
FRACTION = 0.4
SGD = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "max_steps": 1}
ONE_STEP = {**SGD, "per_device_train_batch_size": 8, "token_fraction": FRACTION}


class Seeing(OPSDTrainer):
    def __init__(self, *args, **kwargs):
        self.weighed = []
        super().__init__(*args, **kwargs)

    def weigh(self, rollout, rows, targets):
        found = super().weigh(rollout, rows, targets)
        self.weighed.append((rollout, rows, found))
        return found


def parameters(trainer):
    return [one for one in trainer.model.parameters() if one.requires_grad]


def oracle(trainer, criterion):
    """The loss of the step that was weighed and its gradient, in float64: each row is read alone and whole, all of its
    tokens are compared, some of them are kept, and the mean is over those of the whole step.
    """
    models = [trainer.model, *(teacher.model for teacher in trainer.teachers.values())]
    student, *teachers = (model.double().eval() for model in models)
    total, divisor = torch.zeros((), dtype=torch.float64), 0.0
    ((rollout, rows, weights),) = trainer.weighed
    pairs = zip(rollout.prompt_lists(), rollout.completion_lists(), strict=True)
    for number, (prompt, completion) in enumerate(pairs):
        teacher = teachers[0 if len(teachers) == 1 else list(trainer.teachers).index(rows[number]["teacher"])]
        ids, first = torch.tensor([[*prompt, *completion]]), len(prompt) - 1
        sides = [
            LazyLogits(logits, OutputHead(torch.eye(logits.size(-1), dtype=torch.float64)))
            for logits in (student(ids).logits[0, first:-1], teacher(ids).logits[0, first:-1].detach())
        ]
        drawn = Sampled(torch.tensor(completion))
        of_all = dense_divergence(*sides, trainer.divergence, kl_clip=trainer.args.kl_clip, sampled=drawn)
        value = of_all.divergence.detach()
        chosen = sides[0].hidden.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None]).squeeze(-1)
        scores = {
            "student_entropy": of_all.student_entropy,
            "teacher_divergence": value.abs() if trainer.learns_from_draws else value,
            "teacher_confidence": -of_all.teacher_entropy,
            "student_surprise": -chosen,
        }[criterion]
        n, k = len(completion), math.ceil(FRACTION * len(completion))
        kept = torch.zeros(n, dtype=torch.bool).index_fill(0, scores.detach().topk(k).indices, True)
        # A row counts as much as k of its n tokens would on average.
        wanted = kept / n * weights[number].double().sum()
        total = total + (wanted * of_all.divergence).sum()
        divisor += float(wanted.sum())
    gradients = torch.autograd.grad(total / divisor, parameters(trainer))
    for model in models:
        model.float()
    return float(total.detach()) / divisor, [one.float() for one in gradients]


WAYS = {
    "packed": ("teacher_divergence", {"padding_free": True, "kl_clip": 0.005}),
    "draws": ("teacher_divergence", {"divergence": "sampled_reverse_kl"}),
    "a budget": ("student_surprise", {"max_tokens_per_microbatch": 16, "loss_chunk_tokens": 2}),
    "lora": ("student_entropy", {"peft_config": LoraConfig(r=4, target_modules="all-linear")}),
    "several teachers": ("teacher_confidence", {"train_dataset": tiny.rows().add_column("teacher", ["a", "b"] * 4)}),
}
"""What `equivalence/test_pairs.py` does not have."""


@pytest.mark.parametrize("way", WAYS)
def test_gradient_is_that_of_the_mean_over_kept_tokens(make_trainer, way):
    criterion, options = WAYS[way]
    if way == "several teachers":
        options = {**options, "teacher_model": {"a": tiny.qwen2(48, seed=1), "b": tiny.llama(64, seed=2)}}
    trainer = make_trainer(Seeing, token_selection=criterion, **ONE_STEP, **options)
    before = [one.detach().clone() for one in parameters(trainer)]
    trainer.train()
    moved = [was - now.detach() for was, now in zip(before, parameters(trainer), strict=True)]
    with torch.no_grad():
        for parameter, value in zip(parameters(trainer), before, strict=True):
            parameter.copy_(value)
    loss, gradients = oracle(trainer, criterion)
    largest = max(float(one.abs().max()) for one in gradients)
    for step, gradient in zip(moved, gradients, strict=True):
        assert (step - gradient).abs().max() <= 1e-5 * largest + 1e-7
    (logged,) = (row for row in trainer.state.log_history if "loss" in row)
    assert logged["loss"] == pytest.approx(loss, rel=1e-5)
    assert logged["divergence/mean"] == pytest.approx(loss, rel=1e-5)


# ---- Which tokens ----------------------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize(
    ("fraction", "tokens", "kept"), [(0.3, 10, 3), (0.3, 11, 4), (0.07, 100, 7), (0.01, 1, 1), (0.5, 0, 0)]
)
def test_kept_share_is_rounded_up_to_whole_tokens(fraction, tokens, kept):
    assert TokenSelection("prefix", fraction).kept(tokens) == kept


def share_of(weights_BC, fraction):
    rows, columns = weights_BC.shape
    targets = TeacherTargets.by_row([RowTargets(torch.zeros(columns, 2), torch.arange(columns))] * rows, columns)
    (share,) = tokens_by_teacher(
        [OutputHead(torch.zeros(3, 2))], targets, weights_BC, TokenSelection("student_entropy", fraction)
    )
    return share


@pytest.mark.quick
def test_highest_scores_of_a_row_carry_its_whole_weight():
    weights_BC = torch.tensor([[1.0, 1, 1, 1, 0], [0, 0.5, 0, 0.25, 0.25], [0, 0, 0, 0, 0]])
    found = best(share_of(weights_BC, 0.5), torch.tensor([1.0, 3.0, 3.0, 3.0, 0.1, torch.nan, 9.0]))
    assert found.places_N.tolist() == [1, 2, 8, 9], "the first of equal ones, and what is not a number"
    torch.testing.assert_close(found.weights_N, torch.tensor([2.0, 2.0, 0.5, 0.5]))
    torch.testing.assert_close(found.weights_BC.flatten()[found.places_N], found.weights_N)
    assert found.weights_BC.count_nonzero() == 4
    uneven = best(share_of(weights_BC[1:2], 0.6), torch.tensor([2.0, 3.0, 1.0]))
    torch.testing.assert_close(uneven.weights_N, torch.tensor([2 / 3, 1 / 3]))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("divergence", "clip"), [(ForwardKL(), 0.01), (ReverseKL(), 0.01), (SampledReverseKL(), None)], ids=str
)
def test_largest_values_are_kept_and_of_draws_the_largest_by_size(divergence, clip):
    """Six tokens of a student that is near its teacher at three of them; half are kept."""
    drawn = torch.Generator().manual_seed(1)
    teacher_CV = 2 * torch.randn(6, 5, generator=drawn)
    student_CV = teacher_CV + torch.tensor([0.1, 3, 0.1, 3, 0.1, 3])[:, None] * torch.randn(6, 5, generator=drawn)
    head, weights_BC, ids = OutputHead(torch.eye(5)), torch.ones(1, 6), torch.zeros(1, 6, dtype=torch.long)
    rollout = Rollout(prompt_ids=ids, prompt_mask=ids, completion_ids=ids, completion_mask=ids + 1, weights=weights_BC)
    targets = TeacherTargets.by_row([RowTargets(teacher_CV, torch.arange(6))], 6)
    selection = TokenSelection("teacher_divergence", 0.5)
    given = tokens_by_teacher([head], targets, weights_BC, selection)
    objective = Objective(divergence=divergence, kl_clip=clip, selection=selection)
    found = compared(Comparison(rollout, targets, given, student_CV[None]), head, [head], 6.0, objective)
    sides = LazyLogits(student_CV, head), LazyLogits(teacher_CV, head)
    values = dense_divergence(*sides, divergence, kl_clip=clip, sampled=Sampled(ids[0])).divergence
    order, by_size = values.argsort(descending=True), values.abs().argsort(descending=True)
    assert {*order[:3].tolist()} != {*by_size[:3].tolist()}
    expected = values[order if clip else by_size][:3].mean()
    assert float(found.loss) == pytest.approx(float(expected), rel=1e-4)


def test_random_selection_depends_on_seed_step_and_row_only(trained, tmp_path):
    def kept(**options):
        given = {"per_device_train_batch_size": 8, "token_selection": "random", "token_fraction": 0.5, "max_steps": 2}
        return [
            {row["prompt"]: kept[:n] for row, kept, n in zip(rows, one.weights.tolist(), lengths(one), strict=True)}
            for one, rows, _ in trained(Seeing, shuffle_dataset=False, **given, **options).weighed
        ]

    def lengths(rollout):
        return [one.completion for one in rollout.measured()]

    whole = kept(save_strategy="steps", save_steps=1)
    assert whole[0] != whole[1], "another part in each step"
    assert any(sum(each[: len(each) // 2]) < len(each) // 2 for each in whole[0].values()), "not the first"
    assert kept(resume=str(tmp_path / "checkpoint-1")) == whole[1:]
    assert kept(seed=43)[0] != whole[0]


# ---- What it saves ---------------------------------------------------------------------------------------------------


def test_neither_model_reads_beyond_the_prefix(make_trainer):
    rows = tiny.recorded(tiny.tokenizer())
    trainer = make_trainer(token_selection="prefix", padding_free=True, **ONE_STEP)
    read = {trainer.model: 0, trainer.teacher_model: 0}
    for model in read:

        def count(_, ids, __, model=model):
            read[model] += ids[0].numel()

        model.get_input_embeddings().register_forward_hook(count)
    trainer.train()
    expected = sum(
        len(prompt) + TokenSelection("prefix", FRACTION).kept(len(answer)) for prompt, answer in rows.items()
    )
    assert list(read.values()) == [expected] * 2
    assert expected < sum(len(prompt) + len(answer) for prompt, answer in rows.items())


# ---- What holds beside it --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("criterion", CRITERIA)
def test_evaluation_uses_all_tokens_and_training_logs_the_kept_share(make_trainer, criterion):
    trainer = make_trainer(token_selection=criterion, eval_dataset=tiny.rows(), **ONE_STEP)
    before = make_trainer(eval_dataset=tiny.rows(), **SGD).evaluate()
    found = trainer.evaluate()
    assert found["eval_loss"] == before["eval_loss"]
    assert not [name for name in found if "selection/" in name]
    trainer.train()
    (logged,) = (row for row in trainer.state.log_history if "loss" in row)
    lengths = [len(ids) for ids in tiny.recorded(tiny.tokenizer()).values()]
    kept = sum(TokenSelection(criterion, FRACTION).kept(n) for n in lengths)
    assert logged["selection/share"] == pytest.approx(kept / sum(lengths))
