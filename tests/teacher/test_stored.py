"""Targets on disk: training from them is the run with the teacher, bit for bit; nothing that differs is accepted."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from datasets import Dataset, load_from_disk
from peft import LoraConfig
from support import tiny, vision_language
from support.scores import known_teacher

from trl_opsd import FrozenTeacher, OPSDTrainer, Teacher
from trl_opsd.cli.targets import write_completions, write_targets
from trl_opsd.losses.streamed import streamed_known
from trl_opsd.teacher import Resident
from trl_opsd.teacher.stored import HEADER, Store, StoredTeacher, keys_of, write_header
from trl_opsd.types import LazyLogits, OutputHead, Rollout, TeacherTargets

WORDS = tiny.tokenizer()
GIVEN = [f"the {number}th of {'many ' * number}" for number in range(8)]
ROWS = tiny.rows().add_column("completion", GIVEN)
OPTIONS = {
    "lmbda": 0.0,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 2,
    "rollout": None,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "train_dataset": ROWS,
}
TWO = {"train_dataset": ROWS.add_column("teacher", ["one", "other"] * 4)}
TOLD = {"train_dataset": ROWS.add_column("privileged_context", [f"hint {one}" for one in range(8)])}


def teachers():
    return {"one": tiny.qwen2(48, seed=1), "other": tiny.llama(24, seed=2)}


@pytest.fixture
def written(make_trainer, tmp_path):
    """Writes targets, and returns their folder."""

    def written(top_k=None, **given):
        write_targets(make_trainer(**{**OPTIONS, **given}), tmp_path / "targets", top_k)
        return tmp_path / "targets"

    return written


@pytest.fixture
def lived(trained):
    """Trains with the teacher."""
    return lambda **given: trained(**{**OPTIONS, **given})


@pytest.fixture
def stored(trained, tmp_path):
    """Trains from what was written."""
    folder = {"teacher_model": None, "teacher_targets": str(tmp_path / "targets")}
    return lambda **given: trained(**{**OPTIONS, **folder, **given})


def outcome(trainer):
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return losses, {name: one.clone() for name, one in trainer.model.state_dict().items()}


def assert_same(one, other):
    assert one[0] == other[0]
    assert len(one[0]) == 2
    assert all(torch.equal(weight, other[1][name]) for name, weight in one[1].items())


class Mine(Teacher):
    """One of the user's own, whose targets are padded."""

    reader = FrozenTeacher(Resident(tiny.qwen2(48, 1), torch.device("cpu")))
    head, context = reader.head, None

    def targets(self, rollout):
        return TeacherTargets(hidden=self.reader.targets(rollout).hidden)


# Options of both runs, and of that with the teacher.
CASES = {
    "jsd": ({"divergence": "jsd"}, dict),
    "total variation": ({"divergence": "total_variation"}, dict),
    "two": (TWO, lambda: {"teacher_model": teachers()}),
    "told": ({**TOLD, "teacher_prompt_template": "{privileged_context}: {prompt}"}, dict),
    "of one's own": ({}, lambda: {"teacher_model": Mine()}),
    "some tokens": ({}, lambda: {"teacher_model": known_teacher(tiny.qwen2(48, seed=1), "teacher_top_k", 8)}),
    "base": ({**TOLD, "peft_config": LoraConfig(r=4)}, lambda: {"teacher_model": None, "teacher_model_kind": "base"}),
}


@pytest.mark.parametrize("case", CASES)
def test_states_train_bit_for_bit_as_the_teacher(lived, written, stored, case):
    given, of_teacher = CASES[case]
    written(**given, **of_teacher())
    trainer = stored(**given)
    assert_same(outcome(lived(**given, **of_teacher())), outcome(trainer))
    assert not [one for each in trainer.teachers.values() for one in vars(each).values() if hasattr(one, "parameters")]


def test_resumed_run_goes_on_from_stored_targets(lived, written, stored, tmp_path):
    written()
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    whole = lived(**options, output_dir=str(tmp_path / "whole"))
    resumed = stored(**options, output_dir=str(tmp_path / "resumed"), resume=str(tmp_path / "whole/checkpoint-1"))
    assert_same(outcome(whole), outcome(resumed))


def test_every_row_is_written_also_those_no_whole_batch_has(written, stored):
    more = [{**row, "completion": f"{row['completion']}!"} for row in ROWS]
    rows = Dataset.from_list([*ROWS, *more]).select(range(11))
    assert len(Store(written(train_dataset=rows)).rows) == 11
    stored(max_steps=9, shuffle_dataset=True, train_dataset=rows)  # several epochs, in other orders


def test_top_k_keeps_each_token_and_exact_mass_of_others():
    torch.manual_seed(0)
    head = OutputHead(torch.randn(40, 6) * 3, torch.randn(40), 1.5, 20.0)
    hidden, ids = torch.randn(9, 6) * 2, torch.randint(0, 33, (9,))
    known = streamed_known(LazyLogits(hidden, head), ids, k=5, chunk_tokens=4, vocabulary=33)
    logits = 20 * torch.tanh(1.5 * (hidden.double() @ head.weight.double().T + head.bias.double()) / 20)
    probs = logits[:, :33].softmax(1)
    for row in range(9):
        kept = {int(ids[row]), *probs[row].topk(5).indices.tolist()}
        assert set(known.ids[row].tolist()) == kept
        assert torch.allclose(known.logprobs[row].double(), probs[row, known.ids[row]].log(), atol=2e-5)
        others = [token for token in range(33) if token not in kept]
        assert float(known.rest[row]) == pytest.approx(float(probs[row, others].sum().log()), abs=2e-5)


def test_top_k_targets_train_like_buckets_of_the_teacher(lived, written, stored):
    folder = written(top_k=3)
    losses, _ = outcome(stored(divergence="forward_kl"))
    everything = outcome(lived(divergence="forward_kl"))[0]
    assert 0 < losses[0] < everything[0]
    shutil.rmtree(folder)
    written(top_k=tiny.VOCABULARY)
    losses, _ = outcome(stored(divergence="forward_kl"))
    assert losses[0] == pytest.approx(everything[0], rel=1e-5)


def test_only_tokens_that_count_are_looked_up(make_trainer, tmp_path):
    teacher = make_trainer(**OPTIONS).teacher
    rollout = Rollout.of([[5, 6], [7]], [[8, 9, 10], [11, 12]], torch.device("cpu"))
    [first, _] = teacher.targets(rollout).rows
    said = {"is": "x", "context": None, "head": {}}
    write_header(tmp_path, {"teachers": {"teacher": said}}, {"teacher": teacher.head})
    store = Store(tmp_path)
    store.add("teacher", keys_of(rollout)[0], [5, 6], [8, 9, 10], first.hidden)
    store.flush()
    teacher = StoredTeacher(store, "teacher", store.heads(torch.device("cpu"))["teacher"])
    found = teacher.targets(replace(rollout, weights=torch.tensor([[1.0, 0, 1], [0, 0, 0]]))).rows
    assert torch.equal(found[0].hidden, first.hidden[[0, 2]])
    assert len(found[1].hidden) == 0
    with pytest.raises(ValueError, match=r"no targets of 'teacher' for 1 of 2 rows, .*'\[7\]' before .* '\[11, 12\]'"):
        teacher.targets(rollout)


def test_datasets_loads_what_was_written(written, make_trainer):
    teacher, folder = make_trainer(**OPTIONS).teacher, written()
    rows = load_from_disk(str(folder))
    assert sorted(len(ids) for ids in rows["completion_ids"]) == sorted(min(24, len(text) + 1) for text in GIVEN)
    row = rows[0]
    states = torch.frombuffer(bytearray(row["targets"]), dtype=getattr(torch, row["dtype"]))
    [read] = teacher.targets(Rollout.of([row["prompt_ids"]], [row["completion_ids"]], torch.device("cpu"))).rows
    torch.testing.assert_close(states.view(len(row["completion_ids"]), -1), read.hidden)


# ---- A kill, and what else may happen to files -----------------------------------------------------------------------


@pytest.mark.parametrize("at", range(4), ids=["header", "first part", "second part", "list of parts"])
def test_killed_run_goes_on_where_it_ended(make_trainer, written, monkeypatch, at):
    monkeypatch.setattr("trl_opsd.cli.targets.PART_BYTES", 1)  # a part for each batch
    folder, rename, writes = written(), os.replace, iter(range(at))
    expected = load_from_disk(str(folder)).sort("key")[:]
    shutil.rmtree(folder)

    def killed(source, to):
        if next(writes, None) is None:
            raise KeyboardInterrupt
        rename(source, to)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        written()
    monkeypatch.undo()
    trainer, reads = make_trainer(**OPTIONS), []
    scored = trainer.teacher.targets
    trainer.teacher.targets = lambda rollout: reads.append(len(rollout.weights)) or scored(rollout)
    write_targets(trainer, folder)
    assert reads == [4, 4][max(0, at - 1) :]  # whole batches, as rows that are read together are rounded alike
    assert load_from_disk(str(folder)).sort("key")[:] == expected


def test_completions_are_generated_once_for_each_row(make_trainer, tmp_path):
    trainer = make_trainer(**OPTIONS | {"lmbda": 1.0, "num_generations": 2, "per_device_train_batch_size": 3})
    rows = write_completions(trainer, tmp_path)
    assert rows["prompt"] == [prompt for prompt in ROWS["prompt"] for _ in range(2)]
    assert rows["completion"] == WORDS.batch_decode([*rows["completion_ids"]], skip_special_tokens=True)
    [_, part, _] = sorted(tmp_path.iterdir())
    part.unlink()
    lengths, generate = [], trainer._generation.write
    trainer._generation.write = lambda rows, ids: lengths.append(len(rows)) or generate(rows, ids)
    assert len(write_completions(trainer, tmp_path)) == 16
    assert lengths == [6]


# ---- Other runs ------------------------------------------------------------------------------------------------------


OTHER = tiny.tokenizer()
OTHER.chat_template = OTHER.chat_template.replace("assistant", "robot")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"processing_class": OTHER}, "chat_template: 'sha256 .* there, 'sha256 .* here"),
        ({"teacher_prompt_template": "{privileged_context} {prompt}"}, "teacher_prompt_template: 'none' there"),
        (
            {"train_dataset": ROWS.map(lambda row: {"completion": row["completion"] + "?"})},
            "no targets of 'teacher' for",
        ),
        ({"train_dataset": ROWS.map(lambda row: {"prompt": "new"})}, "for 4 of 4 rows, .* 'new' before the"),
        ({"max_completion_length": 4}, "no targets .* prompt, completion or `max_completion_length`"),
        ({"lmbda": 0.5}, "set `lmbda=0`"),
        ({"eval_dataset": ROWS}, "or an `eval_dataset`"),
        ({"teacher_model": tiny.qwen2(48, seed=1)}, "^`teacher_targets=.* with `teacher_model`: .* remove one of them"),
        ({"teacher_model_kind": "base"}, "with `teacher_model_kind='base'`: .* no teacher is loaded"),
        ({"cross_tokenizer": "bytes"}, "other tokens than the student"),
        ({"teacher_targets": "nowhere"}, "expected a folder that `trl-opsd targets` has written"),
    ],
)
def test_targets_of_another_run_are_refused(written, stored, given, message):
    written()
    with pytest.raises(ValueError, match=f"(?s){message}"):
        stored(**given)


def test_teachers_on_disk_weigh_as_asked(lived, written, stored):
    """Though the first has a quarter of the rows."""
    rows = ROWS.add_column("teacher", ["one", *["other"] * 3] * 2)
    options = {"train_dataset": rows, "shuffle_dataset": False, "loss_aggregation": "teachers"}
    weighed = {**options, "teacher_weights": {"one": 3.0, "other": 1.0}}
    written(**weighed, teacher_model=teachers())
    trainer = stored(**weighed)
    for name, share in (("one", 0.75), ("other", 0.25)):
        assert tiny.logged(trainer, f"loss_share/teacher/{name}") == pytest.approx([share] * 2)
    assert_same(outcome(trainer), outcome(lived(**weighed, teacher_model=teachers())))
    with pytest.raises(ValueError, match=r"weights=.*'third': 1.0.*: the teachers are \['one', 'other'\]"):
        stored(**options, teacher_weights={"one": 3.0, "third": 1.0})


def test_tokens_that_are_not_the_completion_are_refused(lived):
    ids = [WORDS(f"{text}<|im_end|>")["input_ids"] for text in GIVEN]
    assert_same(outcome(lived()), outcome(lived(train_dataset=ROWS.add_column("completion_ids", ids))))
    wrong = ROWS.add_column("completion_ids", [ids[1], *ids[1:]])
    with pytest.raises(ValueError, match=r"row 0 .*the tokens in 'completion_ids' decode to 'the 1th of many '"):
        lived(train_dataset=wrong, shuffle_dataset=False)


def changed(old, new):
    return lambda data: data.replace(old, new, 1)


def flipped(at):
    """Another number there, in a share of the file."""
    return lambda data: data[: (place := int(at * len(data)) - 1)] + bytes([data[place] ^ 64]) + data[place + 1 :]


PART, HEAD = r"part-\w+.arrow is damaged .*: delete it", "teachers.safetensors is not as it was written"
THE = np.array(WORDS("the ")["input_ids"], np.int32).tobytes()
DAMAGES = {
    "number of a target": ("part-*", flipped(0.5), PART),
    "type of a target": ("part-*", changed(b"float32", b"int32"), PART),
    "token of a row": ("part-*", changed(THE, THE[::-1]), PART),
    "cut part": ("part-*", lambda data: data[:-3000], PART),
    "number of a head": (HEADER, flipped(1.0), HEAD),
    "scale of a head": (HEADER, changed(b'scale\\": 1.0', b'scale\\": 2.0'), HEAD),
    "cut header": (HEADER, lambda data: data[:-1], "no teachers.safetensors that can be read"),
}


@pytest.mark.parametrize(("pattern", "damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_damage_is_named(written, stored, pattern, damage, message):
    [path] = written().glob(pattern)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=message):
        stored()
    path.unlink()
    if path.name != HEADER:
        assert len(Store(written()).rows) == 8


def test_rows_of_another_teacher_are_named(written, stored, tmp_path):
    first = written().rename(tmp_path / "first")
    shutil.copy(written(teacher_model=tiny.qwen2(48, seed=5)) / HEADER, first)
    with pytest.raises(ValueError, match=PART):
        stored(teacher_targets=str(first))


def test_folder_with_other_targets_is_not_added_to(written):
    folder = written()
    before = (folder / HEADER).read_bytes()
    for given in ({"top_k": 8}, {"teacher_model": tiny.qwen2(48, seed=5)}, {"processing_class": OTHER}):
        with pytest.raises(ValueError, match="has the targets of another run"):
            written(**given)
    assert (folder / HEADER).read_bytes() == before


def test_images_are_part_of_what_a_row_is_found_by(tmp_path):
    data = vision_language.rows([1, 1, 2, 1])
    data = data.add_column("completion", [[{"role": "assistant", "content": f"a{one}"}] for one in range(4)])

    def trainer(rows=data, **given):
        arguments = vision_language.arguments()
        if "teacher_targets" in given:
            arguments["teacher_model"] = None
        options = {"lmbda": 0.0, "max_completion_length": 8, "max_steps": 2, "logging_steps": 1, **given}
        return OPSDTrainer(**arguments, args=tiny.config(tmp_path / "run", **options), train_dataset=rows)

    assert len(write_targets(trainer(), tmp_path / "targets").rows) == 4
    both = trainer(), trainer(teacher_targets=str(tmp_path / "targets"))
    for one in both:
        one.train()
    assert_same(*map(outcome, both))
    swapped = [{**data[one], "images": data[other]["images"]} for one, other in enumerate((1, 0, 2, 3))]
    with pytest.raises(ValueError, match=r"no targets of 'teacher' for . of . rows"):
        trainer(Dataset.from_list(swapped, data.features), teacher_targets=str(tmp_path / "targets")).train()
