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
from support.failing_server import Scoring, pretended

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
OBJECTIVES = ["reverse_kl", "forward_kl", "jsd", "total_variation", "skewed_forward_kl"]
TWO = {"train_dataset": ROWS.add_column("teacher", ["one", "other"] * 4)}


def teachers():
    return {"one": tiny.qwen2(48, seed=1), "other": tiny.llama(24, seed=2)}


@pytest.fixture
def written(make_trainer, tmp_path):
    """Writes targets, and returns their folder."""

    def written(top_k=None, **given):
        trainer = make_trainer(**{**OPTIONS, **given})
        write_targets(trainer, tmp_path / "targets", top_k)
        return tmp_path / "targets"

    return written


def outcome(trainer):
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return losses, {name: one.clone() for name, one in trainer.model.state_dict().items()}


def assert_same(one, other):
    assert one[0] == other[0]
    assert len(one[0]) == 2
    assert all(torch.equal(weight, other[1][name]) for name, weight in one[1].items())


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_states_train_bit_for_bit_as_the_teacher(trained, written, objective):
    folder = written()
    lived = trained(**OPTIONS, divergence=objective)
    stored = trained(**OPTIONS, divergence=objective, teacher_model=None, teacher_targets=str(folder))
    assert_same(outcome(lived), outcome(stored))
    assert not [one for one in vars(stored.teacher).values() if hasattr(one, "parameters")]


@pytest.mark.parametrize(
    "given", [TWO, {"teacher_prompt_template": "{privileged_context}: {prompt}"}], ids=["two", "told"]
)
def test_stored_teachers_read_what_each_would(trained, written, given):
    models = {"teacher_model": teachers()} if given is TWO else {}
    if not models:
        given = {**given, "train_dataset": ROWS.add_column("privileged_context", [f"hint {one}" for one in range(8)])}
    folder = written(**given, **models)
    lived = trained(**{**OPTIONS, **given, **models})
    stored = trained(**{**OPTIONS, **given}, teacher_model=None, teacher_targets=str(folder))
    assert_same(outcome(lived), outcome(stored))


def test_resumed_run_goes_on_from_stored_targets(trained, written, tmp_path):
    folder = str(written())
    options = {**OPTIONS, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    whole = trained(**options, output_dir=str(tmp_path / "whole"))
    stored = {"teacher_model": None, "teacher_targets": folder}
    resumed = trained(
        **options, **stored, output_dir=str(tmp_path / "resumed"), resume=str(tmp_path / "whole/checkpoint-1")
    )
    assert_same(outcome(whole), outcome(resumed))


def test_every_row_is_written_also_those_no_whole_batch_has(trained, written):
    rows = Dataset.from_list([*ROWS, *[{**row, "completion": f"{row['completion']}!"} for row in ROWS]]).select(
        range(11)
    )
    folder = written(train_dataset=rows)
    assert len(Store(folder).rows) == 11
    stored = {"teacher_model": None, "teacher_targets": str(folder), "train_dataset": rows}
    trained(**{**OPTIONS, "max_steps": 9, "shuffle_dataset": True, **stored})  # several epochs, in other orders


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


def test_top_k_targets_train_like_buckets_of_the_teacher(trained, written):
    folder = written(top_k=3)
    kept = {"teacher_model": None, "teacher_targets": str(folder)}
    losses, _ = outcome(trained(**OPTIONS, **kept, divergence="forward_kl"))
    everything = outcome(trained(**OPTIONS, divergence="forward_kl"))[0]
    assert 0 < losses[0] < everything[0]
    shutil.rmtree(folder)
    written(top_k=tiny.VOCABULARY)
    losses, _ = outcome(trained(**OPTIONS, **kept, divergence="forward_kl"))
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
    stored = StoredTeacher(store, "teacher", store.heads(torch.device("cpu"))["teacher"])
    found = stored.targets(replace(rollout, weights=torch.tensor([[1.0, 0, 1], [0, 0, 0]]))).rows
    assert torch.equal(found[0].hidden, first.hidden[[0, 2]])
    assert len(found[1].hidden) == 0
    with pytest.raises(ValueError, match=r"no targets of 'teacher' for 1 of 2 rows, .*'\[7\]' before .* '\[11, 12\]'"):
        stored.targets(rollout)


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
        ({"max_completion_length": 4}, "no targets .* is the prompt, the completion or `max_completion_length`"),
        ({"lmbda": 0.5}, "set `lmbda=0`"),
        ({"eval_dataset": ROWS}, "or an `eval_dataset`"),
        ({"teacher_model": tiny.qwen2(48, seed=1)}, "^`teacher_targets=.* with `teacher_model`: .* remove one of them"),
        ({"teacher_model": teachers(), **TWO}, "with `teacher_model`: the targets of all rows are read"),
        ({"teacher_model_kind": "base"}, "with `teacher_model_kind='base'`: .* no teacher is loaded"),
        ({"teacher_model_name_or_path": "there"}, "with `teacher_model_name_or_path='there'`: .* no teacher is loaded"),
        ({"cross_tokenizer": "bytes"}, "other tokens than the student"),
        ({"teacher_targets": "nowhere"}, "expected a folder that `trl-opsd targets` has written"),
    ],
)
def test_targets_of_another_run_are_refused(trained, written, given, message):
    folder = written()
    with pytest.raises(ValueError, match=f"(?s){message}"):
        trained(**{**OPTIONS, "teacher_model": None, "teacher_targets": str(folder), **given})


WEIGHED = {"loss_aggregation": "teachers", "teacher_weights": {"one": 3.0, "other": 1.0}}


def test_teachers_on_disk_weigh_as_asked(make_trainer, trained, tmp_path):
    """Though the first has a quarter of the rows."""
    rows = ROWS.add_column("teacher", ["one", *["other"] * 3] * 2)
    options = {**OPTIONS, "train_dataset": rows, "shuffle_dataset": False, **WEIGHED}
    write_targets(make_trainer(**options, teacher_model=teachers()), tmp_path / "targets")
    given = {"teacher_model": None, "teacher_targets": str(tmp_path / "targets")}
    trainer = trained(**options, **given)
    for name, share in (("one", 0.75), ("other", 0.25)):
        assert tiny.logged(trainer, f"loss_share/teacher/{name}") == pytest.approx([share] * 2)
    assert_same(outcome(trainer), outcome(trained(**options, teacher_model=teachers())))
    wrong = {**options, **given, "teacher_weights": {"one": 3.0, "third": 1.0}}
    with pytest.raises(ValueError, match=r"weights=.*'third': 1.0.*: the teachers are \['one', 'other'\]"):
        trained(**wrong)


def test_tokens_that_are_not_the_completion_are_refused(trained):
    ids = [WORDS(f"{text}<|im_end|>")["input_ids"] for text in GIVEN]
    assert_same(
        outcome(trained(**OPTIONS)),
        outcome(trained(**{**OPTIONS, "train_dataset": ROWS.add_column("completion_ids", ids)})),
    )
    wrong = ROWS.add_column("completion_ids", [ids[1], *ids[1:]])
    with pytest.raises(ValueError, match=r"row 0 .*the tokens in 'completion_ids' are 'the 1th of many '"):
        trained(**{**OPTIONS, "train_dataset": wrong, "shuffle_dataset": False})


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
def test_damage_is_named(trained, written, pattern, damage, message):
    [path] = (folder := written()).glob(pattern)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=message):
        trained(**{**OPTIONS, "teacher_model": None, "teacher_targets": str(folder)})
    path.unlink()
    if path.name != HEADER:
        assert len(Store(written()).rows) == 8


def test_rows_of_another_teacher_are_named(trained, written, tmp_path):
    first = written().rename(tmp_path / "first")
    shutil.copy(written(teacher_model=tiny.qwen2(48, seed=5)) / HEADER, first)
    with pytest.raises(ValueError, match=PART):
        trained(**{**OPTIONS, "teacher_model": None, "teacher_targets": str(first)})


def test_folder_with_other_targets_is_not_added_to(written):
    folder = written()
    before = (folder / HEADER).read_bytes()
    for given in ({"top_k": 8}, {"teacher_model": tiny.qwen2(48, seed=5)}, {"processing_class": OTHER}):
        with pytest.raises(ValueError, match="has the targets of another run"):
            written(**given)
    assert (folder / HEADER).read_bytes() == before


def test_base_of_a_student_need_not_be_kept(make_trainer, trained, tmp_path):
    data = ROWS.add_column("privileged_context", [f"hint {one}" for one in range(8)])
    own = {"teacher_model": None, "teacher_model_kind": "base", "train_dataset": data}

    def options():
        return {**OPTIONS, **own, "model": tiny.qwen2(32), "peft_config": LoraConfig(r=4)}

    write_targets(make_trainer(**options()), tmp_path / "targets")
    stored = trained(**options() | {"teacher_model_kind": None, "teacher_targets": str(tmp_path / "targets")})
    assert_same(outcome(trained(**options())), outcome(stored))


@pytest.mark.parametrize("top_k", [None, 8])
def test_targets_of_a_teacher_of_ones_own_are_written(written, top_k):
    class Mine(Teacher):
        reader = FrozenTeacher(Resident(tiny.qwen2(48, 1), torch.device("cpu")))
        head, context = reader.head, None

        def targets(self, rollout):
            return TeacherTargets(hidden=self.reader.targets(rollout).hidden)

    assert len(Store(written(top_k, teacher_model=Mine())).rows) == 8


def test_server_of_tokens_is_kept_as_it_told(make_trainer, trained, tmp_path):
    teacher = tiny.qwen2(48, seed=1)
    for one in (teacher, WORDS):
        one.save_pretrained(tmp_path / "teacher")
    with pretended(teacher, kind=Scoring, words=WORDS) as server:
        asked = {"teacher_server_targets": "teacher_top_k", "teacher_server_top_k": 8}
        options = {**OPTIONS, "teacher_model": str(tmp_path / "teacher"), "teacher_server_url": server.url, **asked}
        write_targets(make_trainer(**options), tmp_path / "targets")
        lived = trained(**options)
    stored = trained(**OPTIONS | {"teacher_model": None, "teacher_targets": str(tmp_path / "targets")})
    assert_same(outcome(lived), outcome(stored))


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
    lived, stored = trainer(), trainer(teacher_targets=str(tmp_path / "targets"))
    for one in (lived, stored):
        one.train()
    assert_same(outcome(lived), outcome(stored))
    swapped = [{**data[one], "images": data[other]["images"]} for one, other in enumerate((1, 0, 2, 3))]
    with pytest.raises(ValueError, match=r"no targets of 'teacher' for . of . rows"):
        trainer(Dataset.from_list(swapped, data.features), teacher_targets=str(tmp_path / "targets")).train()
