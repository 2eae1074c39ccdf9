"""A step that learns from rows while others are written learns what a step does that waits for all of them."""

from __future__ import annotations

import math
import threading
import time
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from support import faults, tiny
from support.rollouts import Apart
from test_dealing import ragged

from trl_opsd import FrozenTeacher, OPSDTrainer
from trl_opsd._compat.versions import set_known
from trl_opsd.loop.overlap import Waiting
from trl_opsd.teacher.frozen import Resident

STEPS = 2
LORA = {"peft_config": LoraConfig(r=4, target_modules="all-linear"), "seed": 3}


def recorded(rows: int = 8 * STEPS, empty: int = 2) -> tuple[Dataset, dict[tuple[int, ...], list[int]]]:
    """Rows of unequal lengths, and a completion of each, a few of them empty."""
    dataset, rollout = ragged(rows)
    answers = {prompt: list(ids) for prompt, ids in rollout._completions.items()}
    for prompt in list(answers)[:empty]:
        answers[prompt] = []
    return dataset.add_column("privileged_context", [f"hint {row}" for row in range(rows)]), answers


class Watched(OPSDTrainer):
    """Keeps what is known before each step: its gradient, and what it divides by."""

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        self.gradients = getattr(self, "gradients", [])
        self.gradients.append([one.grad.clone() for one in model.parameters() if one.grad is not None])
        return super()._get_grad_norm(model, grad_norm)


class ByLength(Watched):
    def weigh(self, rollout, rows, targets):
        return rollout.weights * rollout.weights.sum(1, keepdim=True) / 7


def built(make_trainer, cls=Watched, rollout=Apart, rows=8 * STEPS, empty=2, **options):
    """A trainer of steps of eight ragged rows."""
    dataset, answers = recorded(rows, empty)
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": STEPS, **options}
    if isinstance(options.get("teacher_model"), dict):
        dataset = dataset.add_column("teacher", [("one", "two", "two")[row % 3] for row in range(len(dataset))])
    given = {"train_dataset": dataset, "rollout": rollout(answers), "max_completion_length": 120}
    return make_trainer(cls, **given, shuffle_dataset=False, **options)


def trained(make_trainer, cls=Watched, **options):
    trainer = built(make_trainer, cls, **options)
    trainer.train()
    return trainer


def relative(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest difference, relative to the largest number."""
    flat = [torch.cat([tensor.detach().flatten().double() for tensor in tensors]) for tensors in (mine, theirs)]
    return float((flat[0] - flat[1]).abs().max() / flat[1].abs().max())


def worth(completions, **_):
    return [float(len(text)) for text in completions]


WAYS: dict[str, dict[str, Any]] = {
    "full": {"reward_funcs": worth},
    "an adapter, packed": {**LORA, "padding_free": True},
    "weights by row, clipped": {"cls": ByLength, "max_grad_norm": 1e-3},
    "several teachers, a budget": {
        "teacher_model": "two",
        "max_tokens_per_microbatch": 200,
        "pad_to_multiple_of": 16,
    },
    "own average, packed to a budget, one call": {
        "teacher_model": None,
        "teacher_model_kind": "ema",
        "padding_free": True,
        "max_tokens_per_microbatch": 150,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
    },
    "one micro-batch": {"max_tokens_per_microbatch": 100_000, "deterministic": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_overlapped_gradient_equals_that_of_a_waiting_step(make_trainer, way):
    def options():
        found = dict(WAYS[way])
        if found.get("teacher_model") == "two":
            found["teacher_model"] = {"one": tiny.qwen2(48, 1), "two": tiny.qwen2(40, 2)}
        return found

    waits = trained(make_trainer, **options())
    overlaps = trained(make_trainer, overlap="step", **options())
    assert relative(overlaps.gradients[0], waits.gradients[0]) <= 1e-6
    # the optimizer divides rounding by small second moments: 1.2e-6 was measured
    assert relative(list(overlaps.model.parameters()), list(waits.model.parameters())) <= 2e-6
    assert overlaps.rollout.events.count("ended") == STEPS
    mine, theirs = overlaps.state.log_history, waits.state.log_history
    assert len(mine) == len(theirs)
    for entry, other in zip(mine, theirs, strict=True):
        for name in {"loss", "grad_norm", "divergence/mean", "entropy/student", "entropy/teacher"} & set(other):
            assert entry[name] == pytest.approx(other[name], rel=1e-5), name
        for name in other:
            if name.startswith(("completions/", "num_tokens", "epoch", "learning_rate", "reward")):
                assert entry[name] == other[name], name
        assert set(other) <= set(entry)


class Listening(Watched):
    """Notes the passes of the student among the events of its rollout: rows, and the denominator of the loss."""

    def compare(self, student, rollout, targets, num_items):
        self.rollout.events.append(("learns", len(rollout.completion_ids), float(num_items)))
        return super().compare(student, rollout, targets, num_items)


def test_rows_are_learned_before_the_last_is_written(make_trainer):
    def before(number):
        if number == 7:
            until = time.monotonic() + 30
            while [event[0] for event in rollout.events].count("learns") < 2 and time.monotonic() < until:
                time.sleep(0.01)

    trainer = built(make_trainer, Listening, partial(Apart, before=before), max_steps=1, overlap="step")
    rollout = trainer.rollout
    trainer.train()
    events = [event for event in rollout.events if isinstance(event, tuple)]
    assert [event[0] for event in events].index("learns") < 8, "nothing was learned before the last row came"
    learned = [event[1:] for event in events if event[0] == "learns"]
    assert learned == [(2, 1024.0)] * 4, "2 ** round(log2(8 rows x 120 tokens))"
    first, last, end = (
        trainer.state.log_history[0][f"overlap/{name}"] for name in ("first_backward", "last_row", "end")
    )
    assert 0 < first < last < end


def test_loss_divisor_is_power_of_two_near_the_last_step(make_trainer):
    trainer = trained(make_trainer, Listening, overlap="step", max_tokens_per_microbatch=200, max_steps=2)
    divided = [event[2] for event in trainer.rollout.events if event[0] == "learns"]
    lengths = [len(ids) for ids in list(recorded()[1].values())[:8]]
    assert set(divided) == {1024.0, 2.0 ** round(math.log2(sum(lengths)))}, "nothing is rounded by a power of two"
    assert sum(lengths) < 300, "far from the 960 tokens that options would allow"


def in_float16(make_trainer, overlap):
    """Steps in float16 with a scaler of the loss, which accelerate has on accelerators only."""
    trainer = built(make_trainer, overlap=overlap, learning_rate=1e-12)  # the same weights in each step
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    set_known(trainer.accelerator.state, _mixed_precision="fp16")
    set_known(trainer.accelerator, native_amp=True)
    trainer.remember_launch()
    trainer.train()
    return trainer


def test_overlap_keeps_the_precision_of_float16_with_a_loss_scale(make_trainer):
    exact = trained(make_trainer, learning_rate=1e-12).gradients
    errors = {
        overlap: [relative(*pair) for pair in zip(in_float16(make_trainer, overlap).gradients, exact, strict=True)]
        for overlap in (None, "step")
    }
    for waits, overlaps in zip(errors[None][1:], errors["step"][1:], strict=True):
        assert 1e-5 < overlaps < 1.2 * waits


def test_deterministic_overlap_does_not_depend_on_the_order_of_arrival(make_trainer):
    options = {"overlap": "step", "max_tokens_per_microbatch": 200}
    found = {
        deterministic: [
            trained(make_trainer, rollout=partial(Apart, order=order), deterministic=deterministic, **options)
            for order in (0, 10)
        ]
        for deterministic in (True, False)
    }
    for deterministic, trainers in found.items():
        assert torch.equal(*map(tiny.weights, trainers)) is deterministic
    orders = [[event[1] for event in one.rollout.events if event[0] == "row"] for one in found[True]]
    assert orders[0] != orders[1]


# ---- Failures, and what comes between steps --------------------------------------------------------------------------


class Failing(OPSDTrainer):
    """Fails once in a given verb, in the second micro-batch."""

    verb = ""
    calls = 0

    def _fails(self, verb):
        if verb == self.verb:
            self.calls += 1
            if self.calls == 2:
                raise RuntimeError(f"{verb} failed")

    def teach(self, rollout, rows):
        self._fails("teach")
        return super().teach(rollout, rows)

    def compare(self, *args):
        self._fails("compare")
        return super().compare(*args)


def fast(make_trainer, cls=OPSDTrainer, rollout=None, **options):
    """A trainer of three steps of four short rows, in two calls each."""
    given = {"gradient_accumulation_steps": 2, "overlap": "step", **options}
    return make_trainer(cls, rollout=rollout or Apart(tiny.recorded(tiny.tokenizer())), **given)


@pytest.mark.parametrize("verb", ["stream", "teach", "compare"])
def test_a_step_that_fails_leaves_nothing_behind(make_trainer, verb):
    expected = fast(make_trainer)
    expected.train()

    def before(number):
        if verb == "stream" and number == 2 and len(rollout.events) < 4:
            raise RuntimeError("stream failed")

    rollout = Apart(tiny.recorded(tiny.tokenizer()), before=before)
    trainer = fast(make_trainer, Failing, rollout)
    trainer.verb = verb
    with pytest.raises(RuntimeError, match=f"{verb} failed"):
        trainer.train()
    until = time.monotonic() + 10
    while "closed" not in rollout.events and time.monotonic() < until:
        time.sleep(0.01)
    assert "closed" in rollout.events
    assert torch.equal(tiny.weights(trainer), tiny.weights(fast(make_trainer)))
    trainer.train()
    assert torch.allclose(tiny.weights(trainer), tiny.weights(expected), atol=1e-6)
    assert threading.active_count() < 20


def test_a_skipped_step_changes_nothing_and_the_next_one_learns(make_trainer):
    trainer = fast(make_trainer, nonfinite="skip")
    faults.poison(trainer, "teacher", rank=0)
    watching = faults.Watching(trainer.model)
    trainer.add_callback(watching)
    trainer.train()
    before, after, skipped = (watching.before[step] for step in (1, 2, 3))
    assert not faults.same(before, after)
    assert faults.same(after, skipped)
    assert not faults.same(skipped, watching.now())
    assert tiny.logged(trainer, "nonfinite/skipped_steps") == [0, 1, 1]


def test_resumed_deterministic_overlap_is_bit_equal(make_trainer, tmp_path):
    options = {"deterministic": True, "seed": 5, "model": tiny.gpt2(dropout=0.1)}
    between = {"eval_dataset": tiny.rows(4), "eval_strategy": "steps", "eval_steps": 1}
    whole = fast(make_trainer, save_strategy="steps", save_steps=1, **between, **options)
    whole.train()
    options["model"] = tiny.gpt2(dropout=0.1)
    resumed = fast(make_trainer, rollout=Apart(tiny.recorded(tiny.tokenizer()), order=7), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert torch.equal(tiny.weights(resumed), tiny.weights(whole))
    assert tiny.logged(whole, "eval_loss") != []


# ---- A teacher that begins early -------------------------------------------------------------------------------------


class Early(FrozenTeacher):
    def __init__(self):
        super().__init__(Resident(tiny.qwen2(48, seed=1), torch.device("cpu")))
        self.events = []

    def expect(self, rollout):
        self.events.append(("expects", _rows(rollout)))

    def forget_expected(self):
        self.events.append(("forgets", []))

    def targets(self, rollout):
        self.events.append(("reads", _rows(rollout)))
        return super().targets(rollout)


def _rows(rollout):
    return sorted(zip(rollout.prompt_lists(), rollout.completion_lists(), strict=True))


class Streaming(Apart):
    """Ends rows one by one in the trainer's own process."""

    generates_out_of_process = False


@pytest.mark.parametrize("kind", [Apart, Streaming])
def test_teacher_expects_each_row_before_reading_it(make_trainer, kind):
    words, teacher = tiny.tokenizer(), Early()
    rows = tiny.rows().add_column("teacher_prompt", [f"{prompt}?" for prompt in tiny.PROMPTS])
    fast(
        make_trainer, teacher_model=teacher, rollout=kind(tiny.recorded(words)), train_dataset=rows, max_steps=1
    ).train()
    (what, _), *events = teacher.events
    assert what == "forgets", "what an interrupted step has left"
    assert "forgets" not in dict(events)
    told = [row for what, rows in events if what == "expects" for row in rows]
    assert len(told) == 4
    for row in told:
        assert [what for what, rows in events if row in rows][:2] == ["expects", "reads"]
    if kind is Streaming:  # row by row, and then the whole batch at once
        assert [what for what, _ in events][:5] == ["expects"] * 4 + ["reads"]
        assert len(events[4][1]) == 4
    ends = {words(f"{prompt}?")["input_ids"][-1] for prompt in tiny.PROMPTS}
    assert {prompt[-1] for prompt, _ in told} == ends, "after the teacher's own prompt"


def test_a_process_without_rows_left_repeats_one_without_weight(make_trainer):
    trainer = fast(make_trainer)
    overlap, rows = trainer._overlap, trainer._batches.begin(list(trainer.train_dataset)[:2])
    prompt_ids = trainer.prompt_ids_of(rows)
    waiting = overlap._waiting(prompt_ids)
    with closing(overlap._begun(prompt_ids)) as prefetched:
        last, surplus = (overlap._next(waiting, prefetched, prompt_ids, rows) for _ in range(2))
    assert (len(last.rows), len(surplus.rows)) == (2, 1)
    assert last.rollout.weights.sum() > surplus.rollout.weights.sum() == 0


def test_evaluation_does_not_stream_rows(make_trainer):
    """Else it would take the seeds of the training's rows, and a resumed run would write others."""
    teacher = Early()
    trainer = fast(make_trainer, teacher_model=teacher, eval_dataset=tiny.rows(4))
    trainer.evaluate()
    assert trainer.rollout.events == []
    assert {what for what, _ in teacher.events} == {"reads"}


# ---- Which rows are read together ------------------------------------------------------------------------------------


def waiting(lengths, arriving=(), rows=2, budget=None, packed=False, multiple=1, in_order=False):
    found = Waiting([1] * len(lengths), rows=rows, budget=budget, packed=packed, multiple=multiple, in_order=in_order)
    for row in arriving:
        found.add(row, [7] * (lengths[row] - 1))
    return found


def groups(arriving, lengths, **how):
    """The micro-batches after each row that comes."""
    rows, found = waiting(lengths, **how), []
    for row in arriving:
        rows.add(row, [7] * (lengths[row] - 1))
        found.append([])
        while rows.left and (group := rows.take()) is not None:
            found[-1].append(group)
    assert rows.left == 0
    assert rows.take() == []
    return found


def test_rows_are_read_as_they_come():
    lengths = [3, 3, 3, 3, 3]
    assert groups([4, 0, 2, 1, 3], lengths) == [[], [[4, 0]], [], [[2, 1]], [[3]]]
    assert groups([4, 0, 2, 1, 3], lengths, in_order=True) == [[], [], [], [[0, 1]], [[2, 3], [4]]]


def test_budget_reads_arrived_rows_at_once_unless_in_order():
    assert groups([2, 0, 1], [4, 4, 9], budget=8) == [[[2]], [[0]], [[1]]], "a longer row by itself"
    assert groups([2, 0, 1], [4, 4, 9], budget=8, in_order=True) == [[], [], [[0, 1], [2]]]
    given = [4, 5, 3], (1, 0, 2)
    assert waiting(*given, budget=12).take() == [1, 0], "padded to the longest: 10 of 12 tokens, three would be 15"
    assert waiting(*given, budget=12, packed=True).take() == [1, 0, 2]
    padded = waiting(*given, budget=12, multiple=8)
    assert padded.take() == [1], "8 of 12 tokens"
    assert padded.shortest() == 2
