"""Methods: parts of a training that can be left out, each whole in a file, in the order in which a step asks them.

To add one, write its file, and add its class and its options here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any

from trl_opsd._compat.sharding import launched
from trl_opsd.methods.aggregation import Aggregation, AggregationOptions
from trl_opsd.methods.base import Method
from trl_opsd.methods.certificate import Certificate, CertificateOptions
from trl_opsd.methods.collapse import CollapseGuard, CollapseOptions
from trl_opsd.methods.context import ContextOptions, GroupSuccess, PromptFunction
from trl_opsd.methods.contrast import Contrast, ContrastOptions
from trl_opsd.methods.control import ControlOptions, TeacherControl
from trl_opsd.methods.gates import GateOptions, Gates
from trl_opsd.methods.groups import Groups
from trl_opsd.methods.off_policy import OffPolicy, OffPolicyOptions
from trl_opsd.methods.origin import Origin, OriginOptions
from trl_opsd.methods.quantization import QuantizationOptions, StudentQuantization
from trl_opsd.methods.rewards import BatchRewards, RewardOptions
from trl_opsd.methods.selection import SelectionOptions, TokenSelection
from trl_opsd.methods.shares import ShareOptions, Shares
from trl_opsd.methods.turns import EqualTurns, TurnOptions
from trl_opsd.methods.visits import VisitOptions, Visits
from trl_opsd.monitor.metrics import OF_TRAINER, Metric
from trl_opsd.options.normalize import with_help
from trl_opsd.options.rules import Rule, Stage
from trl_opsd.options.table import shown


@with_help
@dataclass
class MethodOptions(
    QuantizationOptions,
    ShareOptions,
    VisitOptions,
    OffPolicyOptions,
    RewardOptions,
    GateOptions,
    ContextOptions,
    ControlOptions,
    ContrastOptions,
    OriginOptions,
    SelectionOptions,
    TurnOptions,
    AggregationOptions,
    CollapseOptions,
    CertificateOptions,
):
    """The options of all methods, which are fields of [`OPSDConfig`]."""


METHODS: tuple[type[Method], ...] = (
    StudentQuantization,
    Shares,
    OffPolicy,
    BatchRewards,
    Gates,
    Visits,
    PromptFunction,
    GroupSuccess,
    TeacherControl,
    Contrast,
    Origin,
    TokenSelection,
    EqualTurns,
    Aggregation,
    Groups,
    CollapseGuard,
    Certificate,
)
"""Those of the package: what comes later sees what earlier ones have set."""

METRICS: Mapping[str, Metric] = MappingProxyType(
    {**OF_TRAINER, **{name: metric for one in METHODS for name, metric in one.metrics.items()}}
)
"""All metrics by their names in the training log."""


def rules(stage: Stage) -> list[Rule]:
    """The rules of all methods that are checked at a stage."""
    return [one for one in chain.from_iterable(method.rules for method in METHODS) if one.at is stage]


def built(now: Any, given: Sequence[Method]) -> tuple[Method, ...]:
    """The methods of a trainer in a [`Situation`], and then those of the user."""
    found = [one for method in METHODS if (one := method.of(now)) is not None]
    for one in given:
        if not isinstance(one, Method):
            what = f"the class {one.__name__}" if isinstance(one, type) else f"a {type(one).__name__}"
            raise TypeError(f"`methods` contains {what}: expected instances of subclasses of `trl_opsd.Method`.")
        name = type(one).__name__
        if now.overlap == "step" and (one.has("generated") or one.needs_rewards or one.reads_outcomes):
            what = f"`{name}.generated`" if one.has("generated") else f"the rewards that `{name}` reads"
            raise ValueError(
                f"`overlap='step'` with {what}, which needs all completions of a step, but rows are trained on before "
                "the last is generated: remove `overlap`, or set `overlap='ahead'`."
            )
        if one.skips and (now.overlap is not None or now.environments is not None):
            other = shown("overlap", now.overlap) if now.environments is None else "`environment_factory`"
            raise ValueError(
                f"{other} with `{name}`, which skips prompts: the other needs all completions: remove one of them."
            )
        if one.has("state") and not one.has("restore"):
            raise TypeError(f"`{name}.state` without `restore`: a resume would begin without it: define both.")
        if launched(now.args).sp_enabled:
            raise ValueError(
                "`parallelism_config`: `sp_size` with `methods`, which read whole rows: remove one of them."
            )
        found.append(one)
    names = [one.name or type(one).__name__ for one in found]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(
            f"`methods` contains two of the name {repeated!r}, whose states would be one file: set the `name` of one."
        )
    return tuple(found)
