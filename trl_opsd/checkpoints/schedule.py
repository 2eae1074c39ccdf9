"""The rates of an optimizer: whether a schedule leaves any, and those of a resumed run, whose base is the checkpoint's.

transformers loads the optimizer with all its settings, whatever the options say, and takes the first step at the rate
that the schedule of the earlier run had left.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from torch.optim.lr_scheduler import LambdaLR

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
        f"The learning rate is 0 in each of the {steps} steps, so no weight would change: the schedule begins at 0, as "
        "a warmup does, and the training ends before it rises, or it multiplies by 0. Set fewer `warmup_steps` or more "
        "steps, or pass another scheduler."
    )
