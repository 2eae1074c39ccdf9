"""Methods of a user: each hook is asked when it should be, and does what the package's own way of doing it does."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from support import faults, tiny

from trl_opsd import Method, OPSDTrainer
from trl_opsd.methods import Rewards

OPTIONS = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 2, "shuffle_dataset": False,
    "optim": "sgd", "learning_rate": 1e-2, "lr_scheduler_type": "constant",
}  # fmt: skip


def trained(
    make_trainer: Any, *methods: Method, cls: type = OPSDTrainer, resume: str | None = None, **given: Any
) -> Any:
    trainer = make_trainer(cls, methods=methods, **{**OPTIONS, **given})
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def assert_same(one: Any, other: Any) -> None:
    assert torch.equal(tiny.weights(one), tiny.weights(other))
    assert tiny.logged(one, "loss") == tiny.logged(other, "loss")


@dataclass
class Early(Method):
    power: float = 0.5

    def token_weights(self, weights, rollout, rows, targets):
        return weights * self.power ** torch.arange(weights.size(1))


HOOKS = [
    "before", "generated", "select", "teacher_prompt", "token_weights", "final_weights", "objective",
    "tally", "stepped",
]  # fmt: skip


def noting(name: str) -> Any:
    def hook(self, *given):
        self.hooks.append(name)
        return getattr(Method, name)(self, *given)

    return hook


Asked = type("Asked", (Method,), {name: noting(name) for name in HOOKS})
"""Notes which hooks are asked."""


def test_hooks_are_asked_in_order_in_steps_and_evaluations(make_trainer):
    method = Asked()
    method.hooks = []
    trainer = trained(make_trainer, method, max_steps=1)
    assert list(dict.fromkeys(method.hooks)) == HOOKS
    counts = Counter(method.hooks)
    assert {name for name, count in counts.items() if count == 1} == {*HOOKS} - {"teacher_prompt", "objective", "tally"}
    assert (counts["teacher_prompt"], counts["tally"]) == (4, 2)
    method.hooks.clear()
    trainer.evaluate(tiny.rows(2))
    assert list(dict.fromkeys(method.hooks)) == [
        "generated", "teacher_prompt", "final_weights", "objective",
    ]  # fmt: skip


def test_what_a_method_keeps_is_saved_resumed_and_cleared(make_trainer, tmp_path):
    class Counting(Method):
        def begin(self):
            self.tokens, self.seen = 0.0, []

        def token_weights(self, weights, rollout, rows, targets):
            self.seen.append(self.tokens)
            return weights * (1 + self.tokens)

        def stepped(self, sums, tally):
            self.tokens += sums["tokens"]

        def state(self):
            return {"tokens": self.tokens}

        def restore(self, state):
            self.tokens = state["tokens"]

    given = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    whole, again = Counting(), Counting()
    first = trained(make_trainer, whole, output_dir=str(tmp_path / "whole"), **given)
    folder = tmp_path / "whole" / "checkpoint-1"
    assert (folder / "opsd_method_Counting.json").exists()
    second = trained(make_trainer, again, output_dir=str(tmp_path / "again"), resume=str(folder), **given)
    assert whole.seen == [0.0, *again.seen]
    assert again.seen[0] > 0
    assert torch.equal(tiny.weights(first), tiny.weights(second))
    first.train()
    assert (whole.seen[0], len(whole.seen)) == (0, 2), "it has begun anew"


def test_a_resume_with_another_setting_of_a_method_is_refused(make_trainer, tmp_path):
    given = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "output_dir": str(tmp_path)}
    trained(make_trainer, Early(0.5), **given)
    for methods in ((Early(0.25),), ()):
        with pytest.raises(ValueError, match=r"methods: \['Early\(power=0.5\)'\] in the checkpoint"):
            trained(make_trainer, *methods, resume=str(tmp_path / "checkpoint-1"), **given)


def test_a_prompt_weight_multiplies_those_of_its_tokens(make_trainer):
    """A row of weight 0 is in no mean: neither that of gates, nor that of the loss."""

    class Weighing(Method):
        skips = True

        def before(self, rows):
            for number, row in enumerate(rows):
                row.prompt_weight = (0.0, 0.5, 1.0, 0.25)[number]

        def generated(self, batch):
            for row, gate in zip(batch.rows, (1.0, 1.0, 0.0, 1.0), strict=True):
                row.gate = gate

    def alike(completions, **_):
        return [1.0] * len(completions)

    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": 1}
    trainer = make_trainer(methods=[Weighing(), Rewards([alike], gate=0.0)], **{**OPTIONS, **options})
    rollout = trainer.score([{"prompt": text} for text in tiny.PROMPTS[:4]]).rollout
    assert (
        rollout.weights.sum(1).tolist() == (torch.tensor([0, 0.5, 0, 0.25]) * rollout.completion_mask.sum(1)).tolist()
    )
    trainer.train()
    assert tiny.logged(trainer, "gate/mean") == [pytest.approx(2 / 3)]


def test_a_pull_and_an_objective_reach_the_loss(make_trainer):
    class Pulling(Method):
        adds_nll = True

        def before(self, rows):
            for row in rows:
                row.nll_weight += 0.5

    class Colder(Method):
        def objective(self, objective):
            return replace(objective, temperatures=(2.0, 2.0))

    plain, pulled = trained(make_trainer), trained(make_trainer, Pulling())
    names = ("divergence/mean", "loss", "nll/mean")
    divergence, loss, nll = (tiny.logged(pulled, name)[0] for name in names)
    assert tiny.logged(plain, "divergence/mean")[0] == pytest.approx(divergence)
    assert loss == pytest.approx(tiny.logged(plain, "loss")[0] + nll, rel=1e-5)
    assert nll > 0.1
    warmer = trained(make_trainer, student_temperature=2.0, teacher_temperature=2.0)
    assert_same(trained(make_trainer, Colder()), warmer)


def test_sums_of_micro_batches_are_added_once_a_step(make_trainer):
    class Adding(Method):
        def __init__(self) -> None:
            self.found: list[tuple[float, float]] = []

        def tally(self, part):
            are_its_rows = words.batch_decode(part.rollout.prompt_lists()) == [row["prompt"] for row in part.rows]
            return torch.tensor([float(len(part.rows) * are_its_rows)])

        def stepped(self, sums, tally):
            self.found.append((tally.item(), sums["tokens"]))
            self.host.record("adding/rows", tally.item())

    method, words = Adding(), tiny.tokenizer()
    trainer = trained(make_trainer, method, logging_steps=2)
    tokens = [len(words(one)["input_ids"]) for one in tiny.ANSWERS]
    assert method.found == [(4, sum(tokens[:4])), (4, sum(tokens[4:]))]
    assert trainer.state.global_step == 2
    assert tiny.logged(trainer, "adding/rows") == [4]


def test_no_method_is_told_of_a_step_left_out(make_trainer):
    class Noting(Method):
        steps: ClassVar[list[int]] = []

        def stepped(self, sums, tally):
            self.steps.append(self.host.state.global_step)

    trainer = make_trainer(methods=[Noting()], nonfinite="skip", max_steps=3)
    faults.poison(trainer, "teacher", steps=(2,), rank=0)
    trainer.train()
    assert Noting.steps == [0, 2]


class Keeping(Method):
    def state(self):
        return {}


class Rewarded(Method):
    needs_rewards = True


class Skipping(Method):
    skips = True


@pytest.mark.quick
@pytest.mark.parametrize(
    ("named", "methods", "overlap", "error"),
    [
        ("class Early", [Early], None, TypeError),
        ("two of the name 'Early'", [Early(), Early(0.1)], None, ValueError),
        ("Keeping.*restore", [Keeping()], None, TypeError),
        ("overlap.*Mine", [type("Mine", (Method,), {"generated": lambda self, batch: None})()], "step", ValueError),
        ("overlap.*Rewarded", [Rewarded()], "step", ValueError),
        ("overlap.*Skipping", [Skipping()], "ahead", ValueError),
    ],
)
def test_wrong_methods_are_refused_before_loading(make_trainer, named, methods, overlap, error):
    with pytest.raises(error, match=named):
        make_trainer(model="nowhere", teacher_model="nowhere", methods=methods, overlap=overlap)


def of_hook(name: str, hook: Any, **members: Any) -> Method:
    return type("Mine", (Method,), {name: hook, **members})()


def setting(column: str, value: Any) -> Any:
    def hook(self: Method, rows: Any) -> None:
        for row in getattr(rows, "rows", rows):
            setattr(row, column, value)

    return hook


@pytest.mark.parametrize(
    ("method", "named"),
    [
        (of_hook("select", lambda self, weights, *_: weights[:, :1]), "Mine.select"),
        (of_hook("select", lambda self, weights, *_: None), "Mine.select"),
        (of_hook("select", lambda self, weights, *_: weights.fill_(1.0)), "Mine.select.*padding"),
        (of_hook("token_weights", lambda self, weights, *_: weights + 1), "Mine.token_weights.*token 2 of row 0"),
        (of_hook("final_weights", lambda self, weights, *_: -weights), "Mine.final_weights"),
        (of_hook("final_weights", lambda self, weights, *_: weights + 1), "Mine.final_weights"),
        (of_hook("before", setting("prompt_weight", -1.0)), "row.prompt_weight=-1.0"),
        (of_hook("before", setting("prompt_weight", 0.0)), "skips = True"),
        (of_hook("before", setting("nll_weight", 1.0)), "adds_nll = True"),
        (of_hook("generated", setting("gate", float("nan"))), "row.gate=nan"),
        (of_hook("limit", lambda self, tokens: tokens + 1), "Mine.limit"),
        (of_hook("state", lambda self: {1, 2}, restore=lambda self, state: None), "not JSON serializable"),
        (of_hook("select", lambda self, weights, *_: weights, reads=("mine",)), r"Mine.reads` has \['mine'\]"),
    ],
)
def test_a_value_that_fits_nowhere_is_refused_by_name(make_trainer, method, named):
    with pytest.raises((TypeError, ValueError), match=named):
        trained(make_trainer, method, max_steps=1, save_strategy="steps", save_steps=1)


def test_a_method_has_begun_before_an_evaluation_and_belongs_to_one_trainer(make_trainer):
    class Told(Method):
        def begin(self):
            self.steps = 0

        def teacher_prompt(self, row, completion_text, prompt):
            return f"{row['prompt']} {self.steps}"

        def stepped(self, sums, tally):
            self.steps += 1

    method = Told()
    first = make_trainer(methods=[method], **OPTIONS)
    first.evaluate(tiny.rows(2))
    assert method.steps == 0
    first.train()
    assert method.steps == 2
    with pytest.raises(ValueError, match="`Told` belongs to another trainer: make another instance"):
        OPSDTrainer(
            tiny.qwen2(), tiny.qwen2(48), first.args, tiny.rows(), processing_class=tiny.tokenizer(), methods=[method]
        )


@pytest.mark.quick
def test_an_anchor_is_of_whole_distributions(make_trainer):
    """The teacher's divergence may be of its likeliest tokens."""
    trainer = make_trainer(anchor_weight=1.0, top_k_teacher=5)
    assert repr(trainer.methods.objective(trainer.current_objective).anchor) == "ReverseKL()"


def test_a_method_may_be_all_that_tells_a_self_teacher(trained):
    class Telling(Method):
        def teacher_prompt(self, row, completion_text, prompt):
            return f"{row['prompt']} (think twice)"

    trainer = trained(teacher_model=None, teacher_model_kind="base", methods=[Telling()], max_steps=1)
    assert trainer.state.log_history[0]["divergence/mean"] > 0
