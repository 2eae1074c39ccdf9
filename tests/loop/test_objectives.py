"""Options that shape the objective reach the loss, and change nothing else."""

from __future__ import annotations

import pytest
import torch
from small_methods import Discounted
from support import tiny
from support.rollouts import Apart

from trl_opsd import OPSDTrainer
from trl_opsd.losses import (
    DIVERGENCES,
    LazyLogits,
    OutputHead,
    Sampled,
    SampledReverseKL,
    TotalVariation,
    dense_divergence,
)


def expected(trainer, divergence, temperatures=(1.0, 1.0), kl_clip=None, value="divergence"):
    """The mean of a value over all tokens of the rows, by the models' own logits, in float64."""
    words, values = tiny.tokenizer(), []
    for prompt, completion in tiny.recorded(words).items():
        if list(prompt) not in [words(row["prompt"])["input_ids"] for row in trainer.eval_dataset]:
            continue
        ids = torch.tensor([[*prompt, *completion]])
        sides = []
        for model, temperature in zip((trainer.model, trainer.teacher_model), temperatures, strict=True):
            with torch.no_grad():
                logits = model(ids).logits[0, len(prompt) - 1 : -1]
            sides.append(LazyLogits(logits, OutputHead(torch.eye(logits.size(-1))), temperature))
        sampled = Sampled(torch.tensor(completion))
        values.append(getattr(dense_divergence(*sides, divergence, kl_clip=kl_clip, sampled=sampled), value))
    return torch.cat(values).mean().item()


@pytest.mark.parametrize("name", ["total_variation", "negative_log_acceptance", "forward_kl"])
def test_acceptance_is_logged_where_the_divergence_tells_it(make_trainer, name):
    trainer = make_trainer(divergence=name, eval_dataset=tiny.rows(), temperature=0.7, teacher_temperature=2.0)
    found = trainer.evaluate().get("eval_acceptance")
    if name == "forward_kl":
        assert found is None
    else:
        assert found == pytest.approx(expected(trainer, trainer.divergence, (0.7, 2.0), value="accepted"), rel=1e-4)
        assert found == pytest.approx(1 - expected(trainer, TotalVariation(), (0.7, 2.0)), rel=1e-4)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_named_divergence_is_what_is_minimised(make_trainer, name):
    trainer = make_trainer(divergence=name, eval_dataset=tiny.rows())
    found = trainer.evaluate()
    assert found["eval_loss"] == pytest.approx(expected(trainer, trainer.divergence), rel=1e-4)
    assert "eval_divergence/clipped" not in found


@pytest.mark.parametrize("kind", ["base", "live", "ema"])
def test_self_teacher_at_low_temperature_needs_no_privileged_column(make_trainer, kind):
    trainer = make_trainer(
        teacher_model=None, teacher_model_kind=kind, teacher_temperature=0.5, eval_dataset=tiny.rows()
    )
    before = trainer.evaluate()
    assert before["eval_loss"] > 1e-4
    assert before["eval_entropy/teacher"] < before["eval_entropy/student"]
    trainer.train()
    assert trainer.evaluate()["eval_entropy/student"] < before["eval_entropy/student"]


def test_a_discount_weighs_training_tokens_only(make_trainer):
    trainer = make_trainer(methods=[Discounted(0.5)], max_steps=1, eval_dataset=tiny.rows())
    seen, weigh = [], trainer.weigh
    trainer.weigh = lambda *given: seen.append((given[0].weights, weigh(*given))) or seen[-1][1]
    trainer.train()
    ((plain, weights),) = seen
    assert plain.size(1) > 2
    torch.testing.assert_close(weights, plain * torch.tensor([0.5**place for place in range(plain.size(1))]))
    found = trainer.evaluate()
    assert torch.equal(*seen[-1])
    assert found["eval_loss"] == pytest.approx(expected(trainer, trainer.divergence), rel=1e-4)


def test_agreement_on_top_tokens_is_logged(make_trainer):
    trainer = make_trainer(divergence="forward_kl", eval_dataset=tiny.rows())
    found, same, first, tokens = trainer.evaluate(), 0, 0, 0
    for row in trainer.eval_dataset:
        prompt = tiny.tokenizer()(row["prompt"])["input_ids"]
        completion = tiny.recorded(tiny.tokenizer())[tuple(prompt)]
        ids = torch.tensor([[*prompt, *completion]])
        student, teacher = (
            model(ids).logits[0, len(prompt) - 1 : -1].argmax(-1) for model in (trainer.model, trainer.teacher_model)
        )
        same, tokens = same + (student == teacher).sum().item(), tokens + len(completion)
        first += (teacher == torch.tensor(completion)).sum().item()
    assert found["eval_agreement/first"] == pytest.approx(same / tokens)
    assert found["eval_agreement/sampled"] == pytest.approx(first / tokens)
    assert "eval_importance/mean" not in found
    assert 0 < found["eval_agreement/top"] < 1
    assert 0 < found["eval_agreement/top_mass"] < 1


class TestPolicyGradient:
    """`divergence="sampled_reverse_kl"`: what it cannot be combined with."""

    def test_importance_bound_comes_from_the_config(self, tmp_path):
        args = tiny.config(tmp_path, divergence={"sampled_reverse_kl": {"clip_max": 2.0}})
        assert args.build_divergence() == SampledReverseKL(2.0)
        args = tiny.config(tmp_path, divergence={"sampled_reverse_kl": {"clip_max": None}})
        assert args.build_divergence() == SampledReverseKL(None)


class Told(Apart):
    """Knows what each token was drawn with: a number that follows from the token, its place, and the prompt."""

    returns_logprobs = True

    def logprobs(self, prompt_ids, completion_ids):
        return [-(20 + token + place / 64 + sum(prompt_ids) / 8192) for place, token in enumerate(completion_ids)]


class Weighing(OPSDTrainer):
    """Keeps what each row of a training was weighed by."""

    def compare(self, student, rollout, targets, num_items):
        if self.model.training:
            for row, (prompt, ids) in enumerate(zip(rollout.prompt_lists(), rollout.completion_lists(), strict=True)):
                told = None if rollout.logprobs is None else rollout.logprobs[row, : len(ids)].tolist()
                self.seen.append((prompt, ids, told))
        return super().compare(student, rollout, targets, num_items)


class TestImportance:
    """What a rollout says that tokens were drawn with reaches the same tokens in the loss."""

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"padding_free": True, "max_tokens_per_microbatch": 90},
            {"num_generations": 2},
            {"overlap": "step"},
            {"overlap": "ahead"},
        ],
        ids=str,
    )
    def test_log_probabilities_of_the_rollout_reach_their_own_tokens(self, make_trainer, options):
        rollout = Told(tiny.recorded(tiny.tokenizer()))
        trainer = make_trainer(
            cls=Weighing,
            rollout=rollout,
            divergence="sampled_reverse_kl",
            max_steps=3,
            eval_strategy="steps",
            eval_steps=1,
            eval_dataset=tiny.rows(2),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            **options,
        )
        trainer.seen = []
        trainer.train()
        assert len({tuple(prompt) for prompt, _, _ in trainer.seen}) > 4 // options.get("num_generations", 1)
        for prompt, ids, told in trainer.seen:
            assert told == pytest.approx(rollout.logprobs(prompt, ids), abs=1e-5)
        logged = [row for row in trainer.state.log_history if "loss" in row]
        assert [row["importance/mean"] for row in logged] == [3.0] * 3  # its bound: all are likelier than was told

    @pytest.mark.parametrize("why", ["temperature", "an own complete", "not told"])
    def test_importance_is_off_where_log_probabilities_are_unknown(self, make_trainer, why):
        class Own(Weighing):
            def complete(self, prompt_ids):
                return [ids[:2] for ids in super().complete(prompt_ids)]

        options = {"divergence": "sampled_reverse_kl", "temperature": 0.5 if why == "temperature" else 1.0}
        rollout = (Apart if why == "not told" else Told)(tiny.recorded(tiny.tokenizer()))
        if why == "an own complete":
            told = rollout.logprobs
            rollout.logprobs = lambda prompt, ids: None if len(ids) == 2 else told(prompt, ids)
        trainer = make_trainer(
            cls=Own if why == "an own complete" else Weighing,
            rollout=rollout,
            max_steps=2,
            **options,
        )
        trainer.seen = []
        trainer.train()
        assert [told for *_, told in trainer.seen] == [None] * len(trainer.seen)
        assert len(trainer.seen) == 4
        assert not [row for row in trainer.state.log_history if "importance/mean" in row]
