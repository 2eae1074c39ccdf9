"""Several teachers: each row is read by its own teacher only."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from support import tiny

NAMES = ["math", "prose", "prose", "math", "prose", "math", "math", "prose"]


def rows() -> Dataset:
    return tiny.rows().add_column("teacher", NAMES)


def teachers():
    """Two, of different width and family."""
    return {"math": tiny.qwen2(48, 1), "prose": tiny.llama(64, 2)}


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.quick
def test_losses_and_gradients_are_each_teachers_on_its_rows(make_trainer, divergence):
    trainer = make_trainer(teacher_model=teachers(), train_dataset=rows(), per_device_train_batch_size=8, max_steps=1)
    trainer.divergence = make_trainer(divergence=divergence).divergence
    batch = list(trainer.train_dataset)
    total = torch.tensor(50.0)
    parts = trainer.compute_loss(trainer.model, trainer.score(batch), num_items_in_batch=total)
    parts.backward()
    routed = [parameter.grad.clone() for parameter in trainer.model.parameters()]
    expected_loss, expected = 0.0, [torch.zeros_like(gradient) for gradient in routed]
    for name, teacher in teachers().items():
        theirs = [{"prompt": row["prompt"]} for row in batch if row["teacher"] == name]
        alone = make_trainer(teacher_model=teacher)
        alone.divergence = trainer.divergence
        loss = alone.compute_loss(alone.model, alone.score(theirs), num_items_in_batch=total)
        loss.backward()
        expected_loss += loss.item()
        for summed, parameter in zip(expected, alone.model.parameters(), strict=True):
            summed += parameter.grad
    assert parts.item() == pytest.approx(expected_loss, abs=1e-6)
    torch.testing.assert_close(routed, expected, rtol=1e-4, atol=1e-6)


def test_each_teacher_reads_its_rows_in_one_call(make_trainer):
    trainer = make_trainer(
        teacher_model=teachers(),
        train_dataset=rows(),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        max_steps=1,
    )
    read = []
    for name, one in trainer.teachers.items():
        reading = one.targets
        one.targets = lambda rows, name=name, reading=reading: read.append((name, len(rows.weights))) or reading(rows)
    trainer.train()
    assert sorted(read) == [("math", 4), ("prose", 4)]


@pytest.mark.parametrize("ids", [("math", "prose"), (0, 7)], ids=["text", "numbers"])
def test_teachers_as_trl_has_them_teach_the_same(trained, ids):
    def run(column, names, **given):
        some = tiny.rows().add_column(column, names)
        trainer = trained(train_dataset=some, eval_dataset={"own": some}, learning_rate=1e-2, max_steps=4, **given)
        losses = trainer.evaluate(some)["eval_loss"], trainer.evaluate()["eval_own_loss"]
        return [*tiny.logged(trainer, "loss"), *losses], tiny.weights(trainer).tolist()

    known = dict(zip(("math", "prose"), ids, strict=True))
    theirs = {known[name]: one for name, one in teachers().items()}
    found = run("teacher_id", [known[name] for name in NAMES], teacher_model=None, teacher_models=theirs)
    assert found == run("teacher", NAMES, teacher_model=teachers())
    alone = {"teacher_model": None, "teacher_models": {"math": tiny.qwen2(48, 1)}}
    assert run("teacher_id", ["math"] * 8, **alone) == run("topic", NAMES, teacher_model=tiny.qwen2(48, 1))


@pytest.mark.parametrize("names", [NAMES, ["prose"] * 8], ids=["both", "one"])
def test_teachers_of_different_precision_train_and_evaluate(trained, names):
    models = teachers()
    models["prose"] = models["prose"].to(torch.bfloat16)
    some = tiny.rows().add_column("teacher", names)
    trainer = trained(teacher_model=models, train_dataset=some, eval_dataset=some, gradient_accumulation_steps=2)
    assert all(loss > 0 for loss in tiny.logged(trainer, "loss"))
    assert trainer.evaluate()["eval_loss"] > 0


@pytest.mark.refusal
@pytest.mark.before_loading
@pytest.mark.parametrize(
    ("column", "message"),
    [
        (
            [*NAMES[:3], "maths", *NAMES[4:]],
            r"row 3 .* the teacher 'maths' .* expected one of \['math', 'prose'\]",
        ),
        ([*NAMES[:3], None, *NAMES[4:]], "row 3 of train_dataset names the teacher None in the column 'teacher'"),
        (None, "row 0 of train_dataset names the teacher None in the column 'teacher'"),
    ],
)
def test_an_unknown_teacher_name_is_refused_before_loading(make_trainer, column, message):
    some = tiny.rows() if column is None else tiny.rows().add_column("teacher", column)
    with pytest.raises(ValueError, match=message):
        make_trainer(teacher_model=teachers(), train_dataset=some)


def test_several_offloaded_teachers_keep_no_head_on_the_device(trained):
    found = []
    for offload in ("none", "cpu", "stream"):
        given = {"train_dataset": rows(), "max_steps": 2, "learning_rate": 1e-2, "teacher_offload": offload}
        trainer = trained(teacher_model=teachers(), **given)
        found.append((tiny.logged(trainer, "loss"), tiny.weights(trainer)))
        if offload != "none":
            assert [one.placement.prefetcher.held_bytes for one in trainer.teachers.values()] == [0, 0]
        assert found[-1][0] == found[0][0]
        assert torch.equal(found[-1][1], found[0][1])


@pytest.mark.refusal
@pytest.mark.before_loading
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"math": tiny.qwen2(48, 1)}, ValueError, "a dict with one teacher: expected at least two names"),
        ({"math": tiny.qwen2(48, 1), "prose": 3}, TypeError, r"`teacher_model\['prose'\]` is a int: expected a path"),
        (tiny.qwen2(48, 1), ValueError, "`teacher_model` with `teacher_models`: both are teachers"),
    ],
)
def test_an_invalid_dict_of_teachers_is_refused(make_trainer, given, error, message):
    beside = {} if isinstance(given, dict) else {"teacher_models": teachers()}
    with pytest.raises(error, match=message):
        make_trainer(teacher_model=given, train_dataset=rows(), **beside)
