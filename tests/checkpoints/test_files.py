"""Complete and damaged checkpoints as files: no model, no trainer."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import TrainingArguments

from trl_opsd import checkpoints
from trl_opsd.checkpoints import (
    MANIFEST,
    UNFINISHED,
    begin,
    check_launch,
    checkpoint_to_resume,
    newest_complete,
    problems,
    publish,
    rotate,
    sync_files,
)


def written(run_dir: Path, step: int, text: str = "weights") -> Path:
    """A finished checkpoint that is not yet published."""
    folder = begin(run_dir) / f"checkpoint-{step}"
    (folder / "sub").mkdir(parents=True)
    (folder / "model.safetensors").write_text(f"{text} {step}")
    (folder / "sub" / "optimizer.pt").write_text("moments")
    return folder


def saved(run_dir: Path, step: int, text: str = "weights") -> Path:
    return publish(written(run_dir, step, text), run_dir)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.quick
def test_published_checkpoint_is_complete(tmp_path):
    folder = saved(tmp_path, 3)
    assert folder == tmp_path / "checkpoint-3"
    assert problems(folder) == []
    assert newest_complete(tmp_path) == (folder, [])


def test_files_and_folders_are_synced(tmp_path, monkeypatch):
    synced = []
    folder = written(tmp_path, 3)
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    sync_files(folder)
    expected = [folder, folder / "sub", folder / "model.safetensors", folder / "sub" / "optimizer.pt"]
    assert sorted(synced) == sorted(map(str, expected))


def manifest(text: str) -> Callable[[Path], object]:
    """Replaces the manifest."""
    return lambda folder: (folder / MANIFEST).write_text(text)


TEARS: list[tuple[Callable[[Path], object], str]] = [
    (manifest("[" * 100_000), f"{MANIFEST} cannot be read"),
    (lambda folder: (folder / MANIFEST).write_bytes(b"\xff\xfe\x00"), f"{MANIFEST} cannot be read"),
    (manifest("[]"), f"{MANIFEST} cannot be read"),
    (manifest('{"files": []}'), f"{MANIFEST} cannot be read"),
    (manifest('{"files": {"a": 3}}'), f"{MANIFEST} cannot be read"),
    (manifest('{"files": {"a": {"bytes": NaN}}}'), f"{MANIFEST} cannot be read"),
    (manifest('{"files": {"a\\u0000b": {"bytes": 1}}}'), "a\0b is missing"),
    (lambda folder: os.truncate(folder / MANIFEST, 40), f"{MANIFEST} cannot be read"),
    (lambda folder: (folder / MANIFEST).unlink(), f"{MANIFEST} is missing"),
    (lambda folder: (folder / "sub" / "optimizer.pt").unlink(), "sub/optimizer.pt is missing"),
    (lambda folder: os.truncate(folder / "model.safetensors", 4), "model.safetensors has 4 bytes instead of 10"),
]


@pytest.mark.refusal
@pytest.mark.parametrize(("tear", "problem"), TEARS)
@pytest.mark.quick
def test_damaged_checkpoint_is_detected_and_skipped(tmp_path, tear, problem):
    whole, torn = saved(tmp_path, 3), saved(tmp_path, 10)
    tear(torn)
    newest, passed_over = newest_complete(tmp_path)
    assert newest == whole
    [said] = passed_over
    assert said.startswith(f"{torn} is not complete: {problem}")

    folder, [remark] = checkpoint_to_resume(True, tmp_path)
    assert folder == whole
    assert f"{torn} is not complete: {problem}" in remark
    with pytest.raises(ValueError, match=f"checkpoint-10 is not complete: {problem}"):
        checkpoint_to_resume(str(torn), tmp_path)


@pytest.mark.refusal
def test_transformers_checkpoint_is_accepted_only_by_path(tmp_path):
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    with pytest.raises(ValueError, match=f"{MANIFEST} is missing"):
        checkpoint_to_resume(str(folder), tmp_path)
    (folder / "trainer_state.json").write_text("{}")
    found, [remark] = checkpoint_to_resume(str(folder), tmp_path)
    assert found == folder
    assert "has no opsd_manifest.json: it may be incomplete, and an optimizer that it lacks begins anew" in remark
    missing = f"{re.escape(str(folder))} .*{MANIFEST} is missing.* resumed only by its path"
    with pytest.raises(ValueError, match=f"There is no complete checkpoint in .*{missing}"):
        checkpoint_to_resume(True, tmp_path)
    ours = saved(tmp_path, 2)
    newest, [remark] = checkpoint_to_resume(True, tmp_path)
    assert newest == ours
    assert re.search(missing, remark)


def test_files_outside_the_checkpoint_are_not_read(tmp_path):
    folder = saved(tmp_path, 3)
    outside = tmp_path / "secret"
    outside.write_text("secret")
    text = (folder / MANIFEST).read_text().replace("sub/optimizer.pt", "../secret")
    (folder / MANIFEST).write_text(text)
    assert problems(folder) == ["../secret is missing"]


def test_second_save_of_a_step_replaces_first(tmp_path):
    saved(tmp_path, 3, "old")
    folder = saved(tmp_path, 3, "new")
    rotate(tmp_path, None, keep=[folder])
    assert (folder / "model.safetensors").read_text() == "new 3"
    assert problems(folder) == []
    assert names(tmp_path) == {"checkpoint-3"}


class Killed(BaseException):
    """Stands for the end of the process: nothing after it runs."""


@pytest.mark.parametrize("last", range(1, 5))
@pytest.mark.quick
def test_kill_while_replacing_checkpoint_leaves_old_or_new(tmp_path, monkeypatch, last):
    saved(tmp_path, 3, "old")
    aside = written(tmp_path, 3, "new")
    calls = []

    def count(real):
        def counted(*args, **kwargs):
            calls.append(real)
            if len(calls) == last:
                raise Killed
            return real(*args, **kwargs)

        return counted

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", count(os.rename))
        patched.setattr(shutil, "rmtree", count(shutil.rmtree))
        with contextlib.suppress(Killed):
            publish(aside, tmp_path)
    assert len(calls) == min(last, 3), "two renames and a deletion"
    folder, remarks = checkpoint_to_resume(True, tmp_path)
    assert remarks == []
    assert folder == tmp_path / "checkpoint-3"
    assert (folder / "model.safetensors").read_text() in ("old 3", "new 3")
    begin(tmp_path)  # the next save clears what is left
    assert names(tmp_path) == {"checkpoint-3", UNFINISHED}
    assert names(tmp_path / UNFINISHED) == set()


def test_foreign_folder_with_checkpoint_name_is_moved_aside(tmp_path):
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "notes.txt").write_text("keep me")
    saved(tmp_path, 3)
    (kept,) = tmp_path.glob("replaced-checkpoint-3-*")
    assert (kept / "notes.txt").read_text() == "keep me"


def test_foreign_files_among_unfinished_checkpoints_are_kept(tmp_path):
    unfinished = begin(tmp_path)
    (unfinished / "notes").mkdir()
    for name in ("mine.txt", "notes/mine.txt", "checkpoint-3.bak"):
        (unfinished / name).write_text("keep me")
    (unfinished / "checkpoint-7").mkdir()
    for step in (9, 9, 10):
        assert problems(saved(tmp_path, step)) == []
        rotate(tmp_path, 1, keep=[tmp_path / f"checkpoint-{step}"])
    assert names(unfinished) == {"mine.txt", "notes", "checkpoint-3.bak"}
    assert names(tmp_path) == {"checkpoint-10", UNFINISHED}
    assert (unfinished / "notes" / "mine.txt").read_text() == "keep me"


@pytest.mark.refusal
def test_file_or_link_in_place_of_an_unfinished_checkpoint_stops_the_save_and_is_kept(tmp_path):
    unfinished = begin(tmp_path)
    mine = unfinished / "checkpoint-3"
    for make in (lambda: mine.write_text("keep me"), lambda: mine.symlink_to(tmp_path)):
        make()
        with pytest.raises(OSError, match=r"checkpoint-3|symbolic link"):
            saved(tmp_path, 3)
        assert mine.exists()
        mine.unlink()


def stray(run_dir: Path) -> None:
    """Entries with checkpoint names that a killed run or a user may have left."""
    for name in ("checkpoint-4", "checkpoint-x", "checkpoint-", "checkpoint-6"):
        (run_dir / name).mkdir(parents=True)
    (run_dir / "checkpoint-6" / MANIFEST).mkdir()
    (run_dir / "checkpoint-5").write_text("a file")
    (run_dir / "checkpoint-7").symlink_to(run_dir / "nowhere")


def test_stray_entries_with_checkpoint_names_do_not_stop_a_run(tmp_path):
    stray(tmp_path)
    for step in range(1, 8):
        assert problems(saved(tmp_path, step)) == []
        assert rotate(tmp_path, 2, keep=[tmp_path / f"checkpoint-{step}"]) == []
    assert checkpoint_to_resume(True, tmp_path) == (tmp_path / "checkpoint-7", [])
    assert {re.sub(r"(replaced-.*)-\w{8}", r"\1", name) for name in names(tmp_path)} == {
        "checkpoint-6", "checkpoint-7", "checkpoint-x", "checkpoint-", "replaced-checkpoint-4",
        "replaced-checkpoint-5", "replaced-checkpoint-6", "replaced-checkpoint-7",
    }  # fmt: skip


@pytest.mark.quick
class TestRotation:
    def steps(self, run_dir: Path) -> list[int]:
        return sorted(int(name.partition("-")[2]) for name in names(run_dir) if name.startswith("checkpoint-"))

    def at(self, folder: Path, seconds: int) -> Path:
        os.utime(folder / MANIFEST, (seconds, seconds))
        return folder

    def test_as_many_checkpoints_as_the_limit_stay(self, tmp_path):
        folders = [self.at(saved(tmp_path, step), 1000 + step) for step in (1, 2, 3, 10)]
        rotate(tmp_path, 2, keep=[folders[-1]])
        assert self.steps(tmp_path) == [3, 10]

    @pytest.mark.parametrize("limit", [None, 0])
    def test_without_a_limit_nothing_is_deleted(self, tmp_path, limit):
        folders = [saved(tmp_path, step) for step in (1, 2, 3)]
        rotate(tmp_path, limit, keep=[folders[-1]])
        assert self.steps(tmp_path) == [1, 2, 3]

    def test_best_checkpoint_is_kept(self, tmp_path):
        folders = [self.at(saved(tmp_path, step), 1000 + step) for step in (1, 2, 3, 4)]
        rotate(tmp_path, 2, keep=[folders[3], folders[0]])
        assert self.steps(tmp_path) == [1, 4]
        rotate(tmp_path, 1, keep=[folders[3], folders[0]])
        assert self.steps(tmp_path) == [1, 4]

    def test_new_run_in_old_folder_keeps_its_own_checkpoints(self, tmp_path):
        self.at(saved(tmp_path, 100), 1000)
        new = [self.at(saved(tmp_path, step), 2000 + step) for step in (1, 2)]
        rotate(tmp_path, 2, keep=[new[-1]])
        assert self.steps(tmp_path) == [1, 2]

    def test_folder_without_manifest_is_neither_deleted_nor_counted(self, tmp_path):
        (tmp_path / "checkpoint-0").mkdir()
        (tmp_path / "checkpoint-0" / "model.safetensors").write_text("somebody else's")
        folders = [self.at(saved(tmp_path, step), 1000 + step) for step in (1, 2)]
        rotate(tmp_path, 2, keep=[folders[-1]])
        assert self.steps(tmp_path) == [0, 1, 2]

    def test_undeletable_checkpoint_is_reported(self, tmp_path, monkeypatch):
        folders = [self.at(saved(tmp_path, step), 1000 + step) for step in (1, 2, 3)]

        def refused(real):
            def rename(old, new):
                if Path(old) == folders[0]:
                    raise PermissionError(errno.EACCES, "Permission denied")
                real(old, new)

            return rename

        with monkeypatch.context() as patched:
            patched.setattr(os, "rename", refused(os.rename))
            [remark] = rotate(tmp_path, 1, keep=[folders[-1]])
        assert f"{folders[0]} cannot be deleted to meet `save_total_limit=1`: [Errno 13]" in remark
        assert self.steps(tmp_path) == [1, 3]

    def test_symlinks_are_not_followed(self, tmp_path):
        elsewhere, run_dir = tmp_path / "elsewhere", tmp_path / "out"
        far = self.at(saved(elsewhere, 1), 1000)
        run_dir.mkdir()
        (run_dir / "checkpoint-1").symlink_to(far)
        inside = saved(run_dir, 2)
        (inside / "link").symlink_to(elsewhere)
        self.at(inside, 1001)
        rotate(run_dir, 1, keep=[saved(run_dir, 3)])
        assert problems(far) == []
        assert self.steps(run_dir) == [1, 3]

    @pytest.mark.refusal
    def test_kill_during_rotation_leaves_no_partial_checkpoint(self, tmp_path, monkeypatch):
        old, new = self.at(saved(tmp_path, 1), 1000), saved(tmp_path, 2)

        def half(folder):
            (folder / "model.safetensors").unlink()
            raise Killed

        with monkeypatch.context() as patched:
            patched.setattr(shutil, "rmtree", half)
            with pytest.raises(Killed):
                rotate(tmp_path, 1, keep=[new])
        assert not old.exists()
        assert checkpoint_to_resume(True, tmp_path) == (new, [])


def test_symlink_with_name_of_new_checkpoint_is_moved_aside(tmp_path):
    elsewhere, run_dir = tmp_path / "elsewhere", tmp_path / "out"
    elsewhere.mkdir()
    run_dir.mkdir()
    (run_dir / "checkpoint-3").symlink_to(elsewhere)
    assert problems(saved(run_dir, 3)) == []
    assert names(elsewhere) == set()
    (kept,) = run_dir.glob("replaced-checkpoint-3-*")
    assert kept.is_symlink()


@pytest.mark.parametrize("written", ["global_step4", "optimizer_0", "optimizer.pt"])
@pytest.mark.parametrize(("deepspeed", "fsdp"), [(False, False), (True, False), (False, True)])
def test_checkpoint_of_another_kind_of_launch_is_refused(tmp_path, written, deepspeed, fsdp):
    (tmp_path / written).mkdir()
    fits = {"global_step4": deepspeed, "optimizer_0": fsdp, "optimizer.pt": not (deepspeed or fsdp)}[written]
    with contextlib.nullcontext() if fits else pytest.raises(ValueError, match="resume with the original launch"):
        check_launch(tmp_path, deepspeed, fsdp)


@pytest.mark.parametrize(
    ("on_each_node", "sees", "saves", "said"),
    [
        (False, (True, True), (True, False), None),
        (True, (True, False), (True, True), None),
        (False, (True, False), (True, False), "do not share .* set it to True"),
        (True, (True, True), (True, True), "Processes share .* set it to False"),
        (True, (True, True), (True, False), None),
    ],
    ids=["one disk", "a disk each", "a disk each, not said", "one disk, said to be two", "one machine"],
)
def test_save_on_each_node_must_match_disks_of_machines(tmp_path, monkeypatch, on_each_node, sees, saves, said):
    """`tests/distributed/test_machines.py` has real disks."""
    found = list(zip(sees, saves, strict=True))
    own = []
    monkeypatch.setattr(checkpoints, "gather_object", lambda mine: own.extend(mine) or found)
    args = TrainingArguments(str(tmp_path / "out"), save_on_each_node=on_each_node, use_cpu=True, report_to="none")
    with pytest.raises(ValueError, match=said) if said else contextlib.nullcontext():
        checkpoints.check_disk(args)
    assert own == [(True, True)], "this process sees the mark"
    assert os.listdir(tmp_path / "out") == [], "and it is gone"
