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


def reading_outside(folder: Path) -> None:
    (folder.parent / "secret").write_text("secret")
    manifest('{"files": {"../secret": {"bytes": 6}}}')(folder)


TEARS: list[tuple[Callable[[Path], object], str]] = [
    (manifest("[" * 100_000), f"{MANIFEST} cannot be read"),
    (lambda folder: (folder / MANIFEST).write_bytes(b"\xff\xfe\x00"), f"{MANIFEST} cannot be read"),
    (manifest("[]"), f"{MANIFEST} cannot be read"),
    (manifest('{"files": []}'), f"{MANIFEST} cannot be read"),
    (manifest('{"files": {"a": 3}}'), f"{MANIFEST} cannot be read"),
    (lambda folder: os.truncate(folder / MANIFEST, 40), f"{MANIFEST} cannot be read"),
    (lambda folder: (folder / MANIFEST).unlink(), f"{MANIFEST} is missing"),
    (reading_outside, "../secret is missing"),
    (lambda folder: (folder / "sub" / "optimizer.pt").unlink(), "sub/optimizer.pt is missing"),
    (lambda folder: os.truncate(folder / "model.safetensors", 4), "model.safetensors has 4 bytes instead of 10"),
]


@pytest.mark.refusal
@pytest.mark.parametrize(("tear", "problem"), TEARS)
@pytest.mark.quick
def test_damaged_checkpoint_is_detected_and_skipped(tmp_path, tear, problem):
    whole, torn = saved(tmp_path, 3), saved(tmp_path, 10)
    tear(torn)
    folder, [remark] = checkpoint_to_resume(True, tmp_path)
    assert folder == whole
    assert f"{torn} is not complete: {problem}" in remark
    with pytest.raises(ValueError, match=f"checkpoint-10 is not complete: {problem}"):
        checkpoint_to_resume(str(torn), tmp_path)


class Killed(BaseException):
    """Stands for the end of the process: nothing after it runs."""


@pytest.mark.parametrize("last", range(1, 5))
@pytest.mark.quick
def test_kill_while_replacing_checkpoint_leaves_the_new_one(tmp_path, monkeypatch, last):
    saved(tmp_path, 3, "old")
    aside = written(tmp_path, 3, "new")
    calls = []

    def dying(real):
        def counted(*args):
            calls.append(real)
            if len(calls) == last:
                raise Killed
            return real(*args)

        return counted

    with monkeypatch.context() as patched, contextlib.suppress(Killed):
        patched.setattr(os, "rename", dying(os.rename))
        patched.setattr(shutil, "rmtree", dying(shutil.rmtree))
        publish(aside, tmp_path)
    assert len(calls) == min(last, 3), "two renames and a deletion"
    assert checkpoint_to_resume(True, tmp_path) == (tmp_path / "checkpoint-3", [])
    assert (tmp_path / "checkpoint-3" / "model.safetensors").read_text() == "new 3", "it was complete"
    begin(tmp_path)  # the next save clears what is left
    assert names(tmp_path) == {"checkpoint-3", UNFINISHED}
    assert names(tmp_path / UNFINISHED) == set()


def test_entries_that_are_not_ours_are_kept(tmp_path):
    """Those with names of checkpoints, which a killed run or a user may have left, are moved aside."""
    elsewhere, run_dir = saved(tmp_path / "elsewhere", 1), tmp_path / "out"
    unfinished = begin(run_dir)
    for folder in (run_dir / "checkpoint-4", unfinished / "checkpoint-7", unfinished / "notes"):
        folder.mkdir()
    (run_dir / "checkpoint-6" / MANIFEST).mkdir(parents=True)
    (run_dir / "checkpoint-7").symlink_to(elsewhere)
    for file in (run_dir / "checkpoint-5", run_dir / "checkpoint-4" / "mine", unfinished / "checkpoint-3.bak"):
        file.write_text("keep me")
    (unfinished / "notes" / "mine").write_text("keep me")
    for step in (1, 2, 3, 4, 5, 6, 7, 7):
        assert problems(saved(run_dir, step)) == []
        assert rotate(run_dir, 2, keep=[run_dir / f"checkpoint-{step}"]) == []
    assert checkpoint_to_resume(True, run_dir) == (run_dir / "checkpoint-7", [])
    assert {re.sub(r"(replaced-.*)-\w{8}", r"\1", name) for name in names(run_dir)} == {
        "checkpoint-6", "checkpoint-7", *(f"replaced-checkpoint-{step}" for step in (4, 5, 6, 7)),
        UNFINISHED,
    }  # fmt: skip
    assert names(unfinished) == {"notes", "checkpoint-3.bak"}
    assert len([*run_dir.rglob("mine")]) == 2
    assert problems(elsewhere) == []


@pytest.mark.quick
class TestRotation:
    def steps(self, run_dir: Path) -> list[int]:
        return sorted(int(name.partition("-")[2]) for name in names(run_dir) if name.startswith("checkpoint-"))

    def at(self, folder: Path, seconds: int) -> Path:
        os.utime(folder / MANIFEST, (seconds, seconds))
        return folder

    @pytest.mark.parametrize(
        ("steps", "limit", "best", "left"),
        [
            ((1, 2, 3, 10), 2, 10, [3, 10]),
            ((1, 2, 3), None, 3, [1, 2, 3]),
            ((1, 2, 3), 0, 3, [1, 2, 3]),
            ((1, 2, 3, 4), 2, 1, [1, 4]),
            ((1, 2, 3, 4), 1, 1, [1, 4]),
            ((100, 1, 2), 2, 2, [1, 2]),  # a new run in an old folder
        ],
    )
    def test_latest_and_best_checkpoints_stay(self, tmp_path, steps, limit, best, left):
        """A folder without a manifest is neither deleted nor counted."""
        (tmp_path / "checkpoint-0").mkdir()
        folders = [self.at(saved(tmp_path, step), 1000 + number) for number, step in enumerate(steps)]
        rotate(tmp_path, limit, keep=[folders[-1], tmp_path / f"checkpoint-{best}"])
        assert self.steps(tmp_path) == [0, *left]

    def test_undeletable_checkpoint_is_reported(self, tmp_path, monkeypatch):
        folders = [self.at(saved(tmp_path, step), 1000 + step) for step in (1, 2, 3)]
        rename = os.rename

        def refusing(old, new):
            if Path(old) == folders[0]:
                raise PermissionError(errno.EACCES, "Permission denied")
            rename(old, new)

        monkeypatch.setattr(os, "rename", refusing)
        [remark] = rotate(tmp_path, 1, keep=[folders[-1]])
        assert f"{folders[0]} cannot be deleted to meet `save_total_limit=1`: [Errno 13]" in remark
        assert self.steps(tmp_path) == [1, 3]

    @pytest.mark.refusal
    def test_kill_during_rotation_leaves_no_partial_checkpoint(self, tmp_path, monkeypatch):
        old, new = self.at(saved(tmp_path, 1), 1000), saved(tmp_path, 2)

        def half(folder):
            (folder / "model.safetensors").unlink()
            raise Killed

        monkeypatch.setattr(shutil, "rmtree", half)
        with pytest.raises(Killed):
            rotate(tmp_path, 1, keep=[new])
        assert not old.exists()
        assert checkpoint_to_resume(True, tmp_path) == (new, [])


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
