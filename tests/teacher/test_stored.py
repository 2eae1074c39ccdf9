"""Targets on disk: training from them is the run with the teacher, bit for bit; nothing that differs is accepted."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from dataclasses import replace

import pyarrow as pa
import pytest
import torch
from datasets import Dataset, load_from_disk
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import save_file
from support import tiny, vision_language
from support.failing_server import Scoring, pretended

from trl_opsd import FrozenTeacher, OPSDTrainer, Teacher
from trl_opsd.cli.targets import write_completions, write_targets
from trl_opsd.losses.streamed import streamed_known
from trl_opsd.teacher import Resident
from trl_opsd.teacher import stored as on_disk
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
OBJECTIVES = ["reverse_kl", "forward_kl", "jsd", "adaptive_kl", "skewed_forward_kl"]
TWO = {"train_dataset": ROWS.add_column("teacher", ["one", "other"] * 4)}


def teachers():
    return {"one": tiny.qwen2(48, seed=1), "other": tiny.llama(24, seed=2)}


@pytest.fixture
def written(make_trainer, tmp_path):
    """Writes targets, and returns their folder."""

    def written(format="states", top_k=8, **given):
        trainer = make_trainer(**{**OPTIONS, **given})
        write_targets(trainer, tmp_path / "targets", format, top_k)
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
    folder = written("topk", top_k=3)
    kept = {"teacher_model": None, "teacher_targets": str(folder)}
    losses, _ = outcome(trained(**OPTIONS, **kept, divergence="forward_kl"))
    everything = outcome(trained(**OPTIONS, divergence="forward_kl"))[0]
    assert 0 < losses[0] < everything[0]
    shutil.rmtree(folder)
    folder = written("topk", top_k=tiny.VOCABULARY)
    losses, _ = outcome(trained(**OPTIONS, **kept, divergence="forward_kl"))
    assert losses[0] == pytest.approx(everything[0], rel=1e-5)


def test_only_tokens_that_count_are_looked_up(make_trainer, tmp_path):
    teacher = make_trainer(**OPTIONS).teacher
    rollout = Rollout.of([[5, 6], [7]], [[8, 9, 10], [11, 12]], torch.device("cpu"))
    whole = teacher.targets(rollout).rows
    said = {"is": "x", "context": None, "head": {}}
    write_header(tmp_path, {"teachers": {"teacher": said}}, {"teacher": teacher.head})
    store = Store(tmp_path)
    store.add("teacher", keys_of(rollout)[0], [5, 6], [8, 9, 10], whole[0].hidden)
    store.flush()
    [stored] = (StoredTeacher(store, name, head) for name, head in store.heads(torch.device("cpu")).items())
    some = replace(rollout, weights=torch.tensor([[1.0, 0, 1], [0, 0, 0]]))
    first, second = stored.targets(some).rows
    assert torch.equal(first.hidden, whole[0].hidden[[0, 2]])
    assert len(second.hidden) == 0
    others = replace(rollout, weights=torch.tensor([[0.0, 1, 0], [0, 1, 0]]))
    with pytest.raises(ValueError, match=r"no targets of 'teacher' for 1 of 2 rows, .*'\[7\]' before .* '\[11, 12\]'"):
        stored.targets(others)


def test_datasets_loads_what_was_written(written, make_trainer):
    teacher, folder = make_trainer(**OPTIONS).teacher, written()
    rows = load_from_disk(str(folder))
    assert len(rows) == 8
    read = {WORDS.decode(one, skip_special_tokens=True) for one in rows["completion_ids"]}
    assert read == {WORDS.decode(WORDS(text)["input_ids"][:24]) for text in GIVEN}
    row = rows[0]
    states = torch.frombuffer(bytearray(row["targets"]), dtype=getattr(torch, row["dtype"]))
    [read] = teacher.targets(Rollout.of([row["prompt_ids"]], [row["completion_ids"]], torch.device("cpu"))).rows
    torch.testing.assert_close(states.view(len(row["completion_ids"]), -1), read.hidden)


# ---- A kill, and what else may happen to files -----------------------------------------------------------------------


class Killed(BaseException):
    """Ends a run at once."""


@pytest.mark.parametrize("at", range(5), ids=["header", "first part", "second part", "list of parts", "nothing"])
def test_killed_run_goes_on_where_it_ended(make_trainer, written, tmp_path, monkeypatch, at):
    monkeypatch.setattr("trl_opsd.cli.targets.PART_BYTES", 1)  # a part for each batch
    whole = written()
    expected = load_from_disk(str(whole)).sort("key")[:]
    shutil.rmtree(whole)
    rename, calls = on_disk.os.replace, []

    def killed(source, to):
        calls.append(to)
        if len(calls) > at:
            raise Killed
        rename(source, to)

    monkeypatch.setattr(on_disk.os, "replace", killed)
    with pytest.raises(Killed) if at < 4 else nullcontext():
        written()
    monkeypatch.setattr(on_disk.os, "replace", rename)
    reads = []
    trainer = make_trainer(**OPTIONS)
    scored = trainer.teacher.targets
    trainer.teacher.targets = lambda rollout: reads.append(len(rollout.weights)) or scored(rollout)
    write_targets(trainer, whole)
    assert reads == [4, 4][max(0, at - 1) :]  # whole batches, as rows that are read together are rounded alike
    assert load_from_disk(str(whole)).sort("key")[:] == expected


def test_completions_are_generated_once_for_each_row(make_trainer, tmp_path):
    trainer = make_trainer(**OPTIONS | {"lmbda": 1.0, "num_generations": 2, "per_device_train_batch_size": 3})
    rows = write_completions(trainer, tmp_path)
    assert rows["prompt"] == [prompt for prompt in ROWS["prompt"] for _ in range(2)]
    assert rows["completion"] == WORDS.batch_decode([*rows["completion_ids"]], skip_special_tokens=True)
    parts = sorted(tmp_path.iterdir())
    assert len(parts) == 3
    parts[1].unlink()
    lengths = []
    generate = trainer._generation.write
    trainer._generation.write = lambda rows, ids: lengths.append(len(rows)) or generate(rows, ids)
    assert len(write_completions(trainer, tmp_path)) == 16
    assert lengths == [6]


def test_full_disk_keeps_what_was_written(written, monkeypatch):
    monkeypatch.setattr("trl_opsd.cli.targets.PART_BYTES", 1)
    write, parts = on_disk._write, []

    def full(table, path):
        parts.append(path)
        if len(parts) == 2:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        write(table, path)

    monkeypatch.setattr(on_disk, "_write", full)
    with pytest.raises(OSError, match="No space left"):
        written()
    assert len(Store(parts[0].parent).rows) == 4
    assert len(Store(written()).rows) == 8


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
            "no targets of 'teacher' for . of 4 rows",
        ),
        ({"train_dataset": ROWS.map(lambda row: {"prompt": "new"})}, "for 4 of 4 rows, .* 'new' before the"),
        ({"max_completion_length": 4}, "no targets .* is the prompt, the completion or `max_completion_length`"),
        ({"lmbda": 0.5}, "set `lmbda=0`"),
        ({"eval_dataset": ROWS}, "or an `eval_dataset`"),
        ({"teacher_model": tiny.qwen2(48, seed=1)}, "^`teacher_targets=.* with `teacher_model`: .* remove one of them"),
        ({"teacher_model": teachers(), **TWO}, "with `teacher_model`: the targets of all rows are read"),
        ({"teacher_model_kind": "base"}, "with `teacher_model_kind='base'`: .* no teacher is loaded"),
        ({"teacher_model_name_or_path": "there"}, "with `teacher_model_name_or_path='there'`: .* no teacher is loaded"),
        ({"cross_tokenizer": "bytes"}, "compared by their bytes"),
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


def rewritten(change):
    """Changes rows of a part, and writes it again."""

    def damage(path):
        table = pa.ipc.open_stream(path.read_bytes()).read_all()
        on_disk._write(pa.Table.from_pylist([row | change(row) for row in table.to_pylist()], table.schema), path)

    return damage


def reheaded(path):
    with safe_open(path, "pt") as file:
        tensors, said = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    tensors["teacher.weight"][3, 3] += 1
    save_file(tensors, path, said)


def replaced(old, new):
    return lambda path: path.write_bytes(path.read_bytes().replace(old, new))


PART = r"part-\w+.arrow is damaged .*: delete it"
DAMAGES = {
    "cut part": ("part-*", lambda path: path.write_bytes(path.read_bytes()[:-3000]), PART),
    "no part": ("part-*", lambda path: path.write_bytes(b"no"), PART),
    "number of a row": ("part-*", rewritten(lambda row: {"targets": row["targets"][:-1] + b"\0"}), PART),
    "type of a row": ("part-*", rewritten(lambda row: {"dtype": "int32"}), PART),
    "tokens of a row": ("part-*", rewritten(lambda row: {"completion_ids": row["completion_ids"][::-1]}), PART),
    "key of a row": (
        "part-*",
        rewritten(lambda row: {"key": row["key"][::-1]}),
        "no targets of 'teacher' for 4 of 4 rows",
    ),
    "part that is gone": ("part-*", lambda path: path.unlink(), "no targets of 'teacher' for 4 of 4 rows"),
    "number of a head": (HEADER, reheaded, "teachers.safetensors is not as it was written"),
    "scale of a head": (HEADER, replaced(b'scale\\": 1.0', b'scale\\": 2.0'), "is not as it was written"),
    "header that is gone": (
        HEADER,
        lambda path: path.unlink(),
        "expected a folder that `trl-opsd targets` has written",
    ),
    "cut header": (
        HEADER,
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        "no teachers.safetensors that can be",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named(trained, written, name):
    pattern, damage, message = DAMAGES[name]
    folder = written()
    [path] = folder.glob(pattern)
    damage(path)
    with pytest.raises(ValueError, match=message):
        trained(**{**OPTIONS, "teacher_model": None, "teacher_targets": str(folder)})
    path.unlink(missing_ok=True)
    if path.name != HEADER:
        assert len(Store(written()).rows) == 8


def test_part_of_another_teacher_is_named(trained, written, tmp_path):
    written().rename(tmp_path / "first")
    [theirs] = (tmp_path / "first").glob("part-*")
    folder = written(teacher_model=tiny.qwen2(48, seed=5))
    [ours] = folder.glob("part-*")
    shutil.copy(theirs, ours)
    with pytest.raises(ValueError, match=PART):
        trained(**{**OPTIONS, "teacher_model": None, "teacher_targets": str(folder)})


def test_folder_with_other_targets_is_not_added_to(written):
    folder = written()
    before = (folder / HEADER).read_bytes()
    for given in ({"format": "topk"}, {"teacher_model": tiny.qwen2(48, seed=5)}, {"processing_class": OTHER}):
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


@pytest.mark.parametrize("format", ["states", "topk"])
def test_targets_of_a_teacher_of_ones_own_are_written(written, format):
    class Mine(Teacher):
        reader = FrozenTeacher(Resident(tiny.qwen2(48, 1), torch.device("cpu")))
        head, context = reader.head, None

        def targets(self, rollout):
            return TeacherTargets(hidden=self.reader.targets(rollout).hidden)

    assert len(Store(written(format, teacher_model=Mine())).rows) == 8


def test_server_of_tokens_is_kept_as_it_told(trained, tmp_path):
    teacher = tiny.qwen2(48, seed=1)
    for one in (teacher, WORDS):
        one.save_pretrained(tmp_path / "teacher")
    with pretended(teacher, kind=Scoring, words=WORDS) as server:
        asked = {"teacher_server_targets": "teacher_top_k", "teacher_server_top_k": 8}
        options = {**OPTIONS, "teacher_model": str(tmp_path / "teacher"), "teacher_server_url": server.url, **asked}
        trainer = OPSDTrainer(
            model=tiny.qwen2(32),
            teacher_model=str(tmp_path / "teacher"),
            args=tiny.config(tmp_path / "run", lmbda=0.0, teacher_server_url=server.url, **asked),
            train_dataset=ROWS,
            processing_class=WORDS,
        )
        write_targets(trainer, tmp_path / "targets")
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
