"""Chooses the checkpoint to resume from, and gives a resumed optimizer the rates of this run's schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

from torch.optim.lr_scheduler import LambdaLR

from trl_opsd.checkpoints.atomic_save import (
    MANIFEST,
    has_manifest,
    numbered,
    problems,
    recover,
    written_otherwise,
)

_STATE = "trainer_state.json"
"""The last file that transformers writes into a checkpoint."""
_REMEDY = "Pass the path of a complete checkpoint, or train without `resume_from_checkpoint`."
_SHOWN = 3
"""Maximum number of problems that a message lists for a checkpoint."""


def checkpoint_to_resume(asked: str | bool, run_dir: Path) -> tuple[Path, list[str]]:
    """The requested checkpoint, or for `True` the newest complete one, and messages for the user about it."""
    if asked is True or str(asked).lower() == "true":  # text on a command line
        recover(run_dir)
        newest, torn = newest_complete(run_dir)
        if newest is None:
            raise ValueError(f"There is no complete checkpoint in {run_dir}.{_listed(torn)} {_REMEDY}")
        said = [f"Resuming from {newest}, the newest complete checkpoint.{_listed(torn)}"] if torn else []
        return newest, said + _versions(newest)
    folder = Path(str(asked))
    if not folder.is_dir():
        raise ValueError(f"There is no checkpoint {folder}.{_alternative(folder.parent)} {_REMEDY}")
    if not (folder / _STATE).is_file() and newest_complete(folder)[0] is not None:
        raise ValueError(f"{folder} is not a checkpoint, but contains checkpoints.{_alternative(folder)} {_REMEDY}")
    if _is_foreign(folder):
        states = [*folder.glob("optimizer*"), *folder.glob("global_step*")]
        lacking = "" if states else ", and no optimizer, which begins anew"
        return folder, [
            f"Resuming from {folder}, which has no {MANIFEST}{lacking}, so it cannot be checked for completeness."
        ]
    if wrong := problems(folder):
        raise ValueError(f"{_listed({folder: wrong}).strip()}{_alternative(folder.parent)} {_REMEDY}")
    return folder, _versions(folder)


def _versions(folder: Path) -> list[str]:
    other = written_otherwise(folder)
    return [f"{folder} was written with {other}: numbers may differ from here on."] if other else []


def newest_complete(run_dir: Path) -> tuple[Path | None, dict[Path, list[str]]]:
    """The complete checkpoint of the highest step, and the torn ones of higher steps with the problems of each."""
    torn: dict[Path, list[str]] = {}
    for _, folder in reversed(numbered(run_dir)):
        wrong = problems(folder)
        if not wrong:
            return folder, torn
        torn[folder] = wrong
    return None, torn


def check_launch(folder: Path, deepspeed: bool, fsdp: bool) -> None:
    """Rejects a checkpoint of another kind of launch, whose optimizer would silently start anew."""
    saved = {
        "DeepSpeed": any(folder.glob("global_step*")),  # each launch saves the optimizer in files of other names
        "FSDP": (folder / "optimizer.bin").exists() or (folder / "optimizer_0").exists(),
        "one process or DDP": (folder / "optimizer.pt").exists(),
    }
    now = "DeepSpeed" if deepspeed else "FSDP" if fsdp else "one process or DDP"
    if any(saved.values()) and not saved[now]:
        written = next(name for name, was in saved.items() if was)
        raise ValueError(
            f"{folder} was saved under {written}, but this launch uses {now} and would continue with a new optimizer: "
            "resume with the original launch, or pass the folder as `model` and start a new run."
        )


def remedy(run_dir: Path, step: int) -> str:
    """How to continue after an error at this step; empty in the first step. Reads no files, which may be large."""
    if not step:
        return ""
    saved = [folder for number, folder in numbered(run_dir) if number <= step and has_manifest(folder)]
    if not saved:
        return f"{run_dir} has no checkpoint of this run to resume from: `save_steps` sets how often one is saved."
    return (
        f"To resume from {saved[-1]}, the newest checkpoint, pass `resume_from_checkpoint=True`, or on the command "
        "line `--resume_from_checkpoint true`."
    )


def _listed(torn: dict[Path, list[str]]) -> str:
    def shown(wrong: list[str]) -> str:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        return "; ".join(wrong[:_SHOWN]) + more

    foreign = [folder for folder in torn if _is_foreign(folder)]
    said = "".join(f" {folder} is not complete: {shown(torn[folder])}." for folder in torn if folder not in foreign)
    if foreign:
        said += (
            f" {foreign[0]} has no {MANIFEST}, as checkpoints of TRL and `transformers`, so it cannot be checked for "
            f"completeness: to resume from it, pass its path, `resume_from_checkpoint={str(foreign[0])!r}`."
        )
    return said


def _is_foreign(folder: Path) -> bool:
    """Whether another trainer completed this checkpoint."""
    return not (folder / MANIFEST).exists() and (folder / _STATE).is_file()


def _alternative(run_dir: Path) -> str:
    newest, _ = newest_complete(run_dir)
    return f" The newest complete checkpoint there is {newest}." if newest else ""


# ---- Rates ----------------------------------------------------------------------------------------------------------
#
# transformers loads the optimizer with all its settings, whatever the options say, and takes the first step at the rate
# that the schedule of the earlier run had left.

Settings: TypeAlias = list[dict[str, Any]]
"""What is set of an optimizer, for each of its groups."""


def settings_of(optimizer: Any) -> Settings:
    """The settings of an optimizer that no schedule changes; the rate is the one a schedule multiplies.

    An optimizer that a launcher wraps may have no groups to look at.
    """

    def is_set(name: str, value: Any) -> bool:
        return name not in ("params", "param_names", "lr") and value is not None and not isinstance(value, bool)

    groups = getattr(optimizer, "param_groups", [])
    return [{name: value for name, value in one.items() if is_set(name, value)} for one in groups]


def not_taken(asked: Settings, loaded: Settings) -> str:
    """The settings that a checkpoint has overwritten, with both values; empty if there are none."""
    pairs = {
        f"{'learning_rate' if name == 'initial_lr' else name}={group[name]:g} instead of {value:g}"
        if isinstance(value, float)
        else f"{name}={group[name]} instead of {value}"
        for before, group in zip(asked, loaded, strict=False)
        for name, value in before.items()
        if name in group and group[name] != value
    }
    return ", ".join(sorted(pairs))


def set_rates(scheduler: Any) -> None:
    """Sets the rates to those of this schedule at its step; the loaded ones are of the schedule before.

    Without a change of the schedule they are the same, bit for bit.
    """
    if isinstance(scheduler, LambdaLR):
        scheduler.last_epoch -= 1
        scheduler.step()


def check_rates(scheduler: Any, steps: int) -> None:
    """Refuses a schedule whose rate is 0 in every step, as that of a warmup in a training of one step."""
    if not isinstance(scheduler, LambdaLR) or steps < 1:
        return
    pairs = list(zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True))
    if any(rate * factor(step) != 0 for step in range(steps) for rate, factor in pairs):
        return
    raise ValueError(
        f"The learning rate is 0 in all {steps} steps, so no weight would change: the schedule starts at 0, as a "
        "warmup does, and training ends before it rises, or it multiplies by 0. Set fewer `warmup_steps` or more "
        "steps, or pass another scheduler."
    )
