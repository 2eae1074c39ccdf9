"""Options that shape the objective reach the loss, and change nothing else."""

from __future__ import annotations

import pytest
import torch
from support import tiny
from support.rollouts import Apart

from trl_opsd import OPSDTrainer
from trl_opsd.losses import (
    DIVERGENCES,
    LazyLogits,
    OutputHead,
    Sampled,
    TotalVariation,
    dense_divergence,
)


def read(trainer):
    """The completion of each row, and the logits of student and teacher that predict it."""
    words = tiny.tokenizer()
    for prompt in words(list(trainer.eval_dataset["prompt"]))["input_ids"]:
        completion = tiny.recorded(words)[tuple(prompt)]
        with torch.no_grad():
            logits = [
                model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
                for model in (trainer.model, trainer.teacher_model)
            ]
        yield torch.tensor(completion), *logits


def expected(trainer, divergence, temperatures):
    """The mean over all tokens of the rows, by the models' own logits."""
    values = []
    for completion, *logits in read(trainer):
        head = OutputHead(torch.eye(logits[0].size(-1)))
        sides = [LazyLogits(one, head, temperature) for one, temperature in zip(logits, temperatures, strict=True)]
        values.append(dense_divergence(*sides, divergence, sampled=Sampled(completion)).divergence)
    return torch.cat(values).mean().item()


@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_named_divergence_is_minimised_and_acceptance_logged_where_it_tells(make_trainer, name):
    both = (1.0, 1.0) if name == "sampled_reverse_kl" else (0.7, 2.0)
    given = {"temperature": both[0], "teacher_temperature": both[1]}
    trainer = make_trainer(divergence=name, eval_dataset=tiny.rows(), **given)
    found = trainer.evaluate()
    assert found["eval_loss"] == pytest.approx(expected(trainer, trainer.divergence, both), rel=1e-4)
    assert "eval_divergence/clipped" not in found
    assert ("eval_acceptance" in found) == (name in ("total_variation", "negative_log_acceptance"))
    if "eval_acceptance" in found:
        assert found["eval_acceptance"] == pytest.approx(1 - expected(trainer, TotalVariation(), both), rel=1e-4)


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


def test_agreement_on_top_tokens_is_logged(make_trainer):
    trainer = make_trainer(divergence="forward_kl", eval_dataset=tiny.rows())
    found = trainer.evaluate()
    rows = [(completion, *(one.argmax(-1) for one in logits)) for completion, *logits in read(trainer)]
    sampled, student, teacher = (torch.cat(column) for column in zip(*rows, strict=True))
    assert found["eval_agreement/first"] == pytest.approx((student == teacher).float().mean().item())
    assert found["eval_agreement/sampled"] == pytest.approx((teacher == sampled).float().mean().item())
    assert "eval_importance/mean" not in found
    assert 0 < found["eval_agreement/top"] < 1
    assert 0 < found["eval_agreement/top_mass"] < 1


class Told(Apart):
    """Knows what each token was drawn with: a number that follows from the token, its place, and the prompt."""

    returns_logprobs = True

    def logprobs(self, prompt_ids, completion_ids):
        return [-(20 + token + place / 64 + sum(prompt_ids) / 8192) for place, token in enumerate(completion_ids)]


class Weighing(OPSDTrainer):
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
            {"divergence": {"sampled_reverse_kl": {"clip_max": 2.0}}},
            {"overlap": "ahead"},
        ],
        ids=str,
    )
    def test_log_probabilities_of_the_rollout_reach_their_own_tokens(self, make_trainer, options):
        rollout = Told(tiny.recorded(tiny.tokenizer()))
        evaluated = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": tiny.rows(2)}
        options = {"divergence": "sampled_reverse_kl", "gradient_accumulation_steps": 2, **evaluated, **options}
        trainer = make_trainer(cls=Weighing, rollout=rollout, **options)
        trainer.seen = []
        trainer.train()
        assert len({tuple(prompt) for prompt, _, _ in trainer.seen}) > 4 // options.get("num_generations", 1)
        for prompt, ids, told in trainer.seen:
            assert told == pytest.approx(rollout.logprobs(prompt, ids), abs=1e-5)
        # all are likelier than was told: the ratio is at its bound
        assert tiny.logged(trainer, "importance/mean") == [trainer.divergence.clip_max] * 3

    @pytest.mark.parametrize("why", ["temperature", "an own complete", "not told"])
    def test_importance_is_off_where_log_probabilities_are_unknown(self, make_trainer, why):
        class Own(Weighing):
            def complete(self, prompt_ids):
                return [ids[:2] for ids in super().complete(prompt_ids)]

        rollout = (Apart if why == "not told" else Told)(tiny.recorded(tiny.tokenizer()))
        if why == "an own complete":
            told = rollout.logprobs
            rollout.logprobs = lambda prompt, ids: None if len(ids) == 2 else told(prompt, ids)
        options = {"divergence": "sampled_reverse_kl", "temperature": 0.5 if why == "temperature" else 1.0}
        cls = Own if why == "an own complete" else Weighing
        trainer = make_trainer(cls=cls, rollout=rollout, max_steps=2, **options)
        trainer.seen = []
        trainer.train()
        assert [told for *_, told in trainer.seen] == [None] * 4
        assert not tiny.logged(trainer, "importance/mean")
