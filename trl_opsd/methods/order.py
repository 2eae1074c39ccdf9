"""Calls each hook of a trainer's methods, in their order, and decides once what all of them have in common.

B rows · C completion tokens
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import torch
from numpy import ndarray
from torch import Tensor

from trl_opsd._compat.sharding import launched
from trl_opsd._compat.values import fitting
from trl_opsd.data.prompts import Prompt
from trl_opsd.environments import Environments
from trl_opsd.losses.objective import Objective
from trl_opsd.methods.base import Generated, Method, Part
from trl_opsd.methods.rewards import Rewards
from trl_opsd.methods.rows import BatchRow, Complete
from trl_opsd.options.rules import refuse, shown
from trl_opsd.options.table import LARGEST_WEIGHT
from trl_opsd.types import Rollout, TeacherTargets

M = TypeVar("M", bound=Method)


def check(args: Any, methods: Sequence[Method], environments: Environments | None, is_training: bool) -> None:
    """Checks the settings of methods, and what each needs against options, environments and rewards."""
    for one in methods:
        _check_settings(one)
        if isinstance(one, Rewards):
            one.find(environments)
        if one.has("state") and not one.has("restore"):
            raise TypeError(f"`{type(one).__name__}.state` without `restore`: a resume would begin without it.")
    lacks_rewards = is_training and not any(one.given for one in methods if isinstance(one, Rewards))
    tells = environments is not None and environments.tells
    is_divided = launched(args).sp_enabled
    replacing = [one for one in methods if _is_ours(one) and one.has("teacher_prompt")]
    writing = [one for one in methods if one.writes]
    for one in methods:
        name, replaces = type(one).__name__, one in replacing
        refuse(
            (is_met, f"{beside} with `{name}`, which {why}", "change one of them")
            for is_met, beside, why in (
                (one.whole_rows and is_divided, "`sp_size`", "reads whole rows"),
                (
                    one.whole_batch and args.overlap == "step",
                    "`overlap='step'`",
                    "needs all completions of a step at once",
                ),
                (one.skips and args.overlap, shown(args, "overlap"), "skips prompts by results of the last step"),
                (one.skips and environments is not None, "`environment_factory`", "skips prompts"),
                (replaces and tells, "`environment_factory`", "sets teachers' prompts, as these environments do"),
                (replaces and len(replacing) > 1, "`teacher_prompt_fn`", "sets teachers' prompts too"),
                (
                    one.in_groups and args.num_generations == 1,
                    "`num_generations=1`",
                    "compares completions of a prompt",
                ),
                (one.needs_rewards and not args.lmbda, "`lmbda=0`", "needs rewards of the student's completions"),
                (one.writes and not args.lmbda, "`lmbda=0`", "writes completions with the student"),
                (one.writes and args.overlap, shown(args, "overlap"), "writes a batch as a whole"),
                (
                    one.writes and any(other.has("teacher_prompt") for other in methods),
                    "a teacher's prompt made of the completion",
                    "calls the teacher while generating",
                ),
                (one.writes and one is not writing[0], "a second such method", "writes completions"),
            )
        )
        why = "pass `methods=[Rewards([...])]` with functions"
        unknown = {*one.reads} - {"contrast", "origin"}
        refuse(
            [
                (one.needs_rewards and lacks_rewards, f"`{name}` without rewards", why),
                (bool(unknown), f"`{name}.reads` has {sorted(unknown)}", "expected 'contrast', 'origin', both or none"),
            ]
        )


def _check_settings(method: Method) -> None:
    """Checks the fields of a dataclass by their types and `Annotated` bounds, and converts text."""
    if not is_dataclass(method):
        return
    hints = get_type_hints(type(method), include_extras=True)
    for one in fields(method):
        value = getattr(method, one.name)
        try:
            setattr(method, one.name, fitting(hints[one.name], value))
        except ValueError as error:
            raise ValueError(f"`{type(method).__name__}({one.name}={value!r})`: expected {error}") from None


class Methods:
    """The methods of a trainer.

    What does not count is decided here: nothing is generated for a row whose prompt has the weight 0, and it is in no
    metric; the weight of each token is multiplied by those of its prompt and by the gate of its row.
    """

    def __init__(self, host: Any, methods: Sequence[Method] = ()) -> None:
        self._host, self._methods = host, methods
        self._having: dict[str, list[Method]] = {}
        self.any = cache(lambda trait: any(getattr(one, trait) for one in methods))
        """Whether one has a trait: an attribute of [`Method`] that is true or false, and stays so."""
        for one in methods:
            one.bind(host)

    def __iter__(self) -> Iterator[Method]:
        return iter(self._methods)

    def get(self, kind: type[M]) -> M | None:
        """The method of a kind; `None` where the trainer has none."""
        return next((one for one in self if isinstance(one, kind)), None)

    def _of(self, hook: str, in_training: bool = False) -> list[Method]:
        """Those that have a hook; in an evaluation, none for a hook of training alone."""
        if in_training and not self._host.model.training:
            return []
        if hook not in self._having:
            self._having[hook] = [one for one in self if one.has(hook)]
        return self._having[hook]

    # ---- What they say of themselves --------------------------------------------------------------------------------

    @cached_property
    def of_user(self) -> list[Method]:
        """Those that a user has passed."""
        return [one for one in self if not _is_ours(one)]

    @cached_property
    def reads(self) -> set[str]:
        """What targets are made of beside the teacher."""
        return {name for one in self for name in one.reads}

    # ---- The hooks --------------------------------------------------------------------------------------------------

    def build(self) -> None:
        """Builds each, and has it begin: evaluations ask hooks before any training."""
        for one in self:
            one.build()
            one.begin()

    def begin(self) -> None:
        for one in self._of("begin"):
            one.begin()

    def before(self, rows: Sequence[BatchRow]) -> None:
        for one in self._of("before", in_training=True):
            one.before(rows)
            self._check_columns(one, rows)

    def complete(self, rows: Sequence[BatchRow], prompt_ids: list[list[int]], alone: Complete) -> list[list[int]]:
        (one,) = self._of("complete")
        return one.complete(rows, prompt_ids, alone)

    def generated(self, batch: Generated) -> None:
        for one in self._of("generated"):
            one.generated(batch)
            self._check_columns(one, batch.rows)

    def _check_columns(self, method: Method, rows: Sequence[BatchRow]) -> None:
        """Raises `ValueError` for a column whose value would spoil the loss, or would not be read."""
        for row in () if _is_ours(method) else rows:
            fits = all(0 <= one <= LARGEST_WEIGHT for one in (row.prompt_weight, row.gate)) and math.isfinite(
                row.nll_weight
            )
            if not (fits and (row.prompt_weight or self.any("skips")) and (not row.nll_weight or self.any("adds_nll"))):
                raise ValueError(
                    f"`{type(method).__name__}` set {row.prompt_weight=}, {row.gate=}, {row.nll_weight=} in "
                    f"{row.request.where}: expected weights from 0 to {LARGEST_WEIGHT:g} and a finite `nll_weight`. A "
                    "weight of 0 needs `skips = True` in the class, an `nll_weight` needs `adds_nll = True`."
                )

    def teacher_prompt(self, row: BatchRow, completion_text: str, prompt: Prompt) -> Prompt | None:
        found: Any = prompt
        for one in self._of("teacher_prompt"):
            if found is None:
                return None
            found = one.teacher_prompt(row, completion_text, found)
            if found is not None and not isinstance(found, Prompt):
                where = f"The teacher's prompt in {row.request.where}"
                found = self._host.teaching.readers.intake.prompt_of(row.request, found, where)
        return found

    def references(self, rollout: Rollout, rows: Sequence[BatchRow]) -> dict[str, Rollout]:
        """What is read of the completions beside the teacher's prompts, by what it is for."""
        found = {"origin": rollout} if "origin" in self.reads else {}
        if "contrast" in self.reads:
            found = {"contrast": self._host.teaching.prompts.contrasts(rollout, rows), **found}
        return found

    def select(self, weights_BC: Tensor, rollout: Rollout, rows: Sequence[BatchRow]) -> Tensor:
        for one in self._of("select", in_training=True):
            weights_BC = _checked(one.select(_given(weights_BC, one), rollout, rows), weights_BC, one, "select")
        return weights_BC

    def token_weights(self, rollout: Rollout, rows: Sequence[BatchRow], targets: TeacherTargets) -> Tensor:
        weights_BC = rollout.weights
        for one in self._of("token_weights", in_training=True):
            weights_BC = _checked(
                one.token_weights(_given(weights_BC, one), rollout, rows, targets), weights_BC, one, "token_weights"
            )
        return weights_BC

    def final_weights(self, weights_BC: Tensor, rollout: Rollout, rows: Sequence[BatchRow]) -> Tensor:
        for column in ("prompt_weight", "gate"):
            values_B = [getattr(row, column) for row in rows]
            if any(one != 1 for one in values_B):
                weights_BC = weights_BC * weights_BC.new_tensor(values_B).unsqueeze(1)
        self._record_gates(rows)
        for one in self._of("final_weights"):
            weights_BC = _checked(one.final_weights(_given(weights_BC, one), rows), weights_BC, one, "final_weights")
        return weights_BC

    def _record_gates(self, rows: Sequence[BatchRow]) -> None:
        """Logs the mean gate of all rows that were generated, where rewards or environments may set it. Collective."""
        intake, rewards = self._host.teaching.readers.intake, self.get(Rewards)
        of_rewards = rewards is not None and rewards.gate is not None and self._host.model.training
        if of_rewards or self.any("reads_outcomes") or (intake.needs_context and intake.is_told):
            gates = [row.gate for row in rows if row.prompt_weight and not row.is_padding]
            sums = torch.tensor([sum(gates), len(gates)], dtype=torch.float32, device=self._host.accelerator.device)
            total, count = self._host.accelerator.reduce(sums, "sum").tolist()
            if count:
                self._host.record("gate/mean", total / count, count)

    def objective(self, objective: Objective) -> Objective:
        for one in self._of("objective"):
            objective = one.objective(objective)
        return objective

    def tally(self, part: Part) -> list[Tensor | None]:
        return [one.tally(part) for one in self._of("tally")]

    def stepped(self, sums: Mapping[str, float], tallies: Sequence[ndarray | None]) -> None:
        # There are none where processes share rows.
        known = dict(zip(map(id, self._of("tally")), tallies, strict=False))
        for one in self._of("stepped"):
            one.stepped(sums, known.get(id(one)))

    def limit(self, tokens: int) -> int:
        for one in self._of("limit", in_training=True):
            found = one.limit(tokens)
            if not (isinstance(found, int) and 1 <= found <= tokens):
                raise ValueError(
                    f"`{type(one).__name__}.limit` returned {found!r}: expected an integer from 1 to {tokens}."
                )
            tokens = found
        return tokens

    def evaluated(self, sums: MutableMapping[str, Any]) -> None:
        for one in self._of("evaluated"):
            one.evaluated(sums)

    @contextmanager
    def evaluation(self, prefix: str) -> Iterator[None]:
        with ExitStack() as stack:
            for one in self._of("evaluation"):
                stack.enter_context(one.evaluation(prefix))
            yield

    # ---- Checkpoints ------------------------------------------------------------------------------------------------

    def saved(self, folder: Path, in_checkpoint: bool) -> None:
        for one in self._of("saved"):
            one.saved(folder, in_checkpoint)

    def save(self, folder: str) -> None:
        """Writes what each keeps into a checkpoint; called by one process."""
        for one in self:
            if (state := one.state()) is not None:
                _file(folder, one).write_text(json.dumps(state, allow_nan=False), encoding="utf-8")

    def load(self, folder: str) -> None:
        """Has each go on with what a checkpoint has kept of it, if it has."""
        for one in self:
            if (path := _file(folder, one)).exists():
                one.restore(json.loads(path.read_text(encoding="utf-8")))


def _file(folder: str, method: Method) -> Path:
    # Other files of a checkpoint begin with "opsd_", too.
    kind = "opsd" if _is_ours(method) else "opsd_method"
    return Path(folder) / f"{kind}_{method.name or type(method).__name__}.json"


def _is_ours(method: Method) -> bool:
    return type(method).__module__.startswith("trl_opsd.")


def _given(weights_BC: Tensor, method: Method) -> Tensor:
    """A copy for a user's method, which may change it in place."""
    return weights_BC if _is_ours(method) else weights_BC.clone()


def _checked(found: Any, weights_BC: Tensor, method: Method, hook: str) -> Tensor:
    """What a hook returned for these weights, validated if it is a user's: that waits for the device."""
    if _is_ours(method):
        return found
    return checked_weights(found, weights_BC, f"{type(method).__name__}.{hook}")


def checked_weights(found: Any, weights_BC: Tensor, where: str) -> Tensor:
    """The weights that a function returned for these, validated, on their device and as float32."""
    if not isinstance(found, Tensor) or found.is_complex():
        raise TypeError(f"`{where}` returned a {type(found).__name__}: expected a tensor of floats, [B, C].")
    expected = weights_BC.shape
    if found.shape != expected:
        raise ValueError(f"`{where}` returned weights of shape {tuple(found.shape)}: expected {tuple(expected)}.")
    # A user may have computed them with a model; the loss has no gradient through them.
    found = found.detach().to(weights_BC.device, torch.float32)
    if not (found.isfinite() & (found >= 0) & (found <= LARGEST_WEIGHT)).all():
        raise ValueError(
            f"`{where}` returned weights from {found.min():g} to {found.max():g}: expected finite weights from 0 to "
            f"{LARGEST_WEIGHT:g}. The loss is divided by their sum, so only their ratios matter."
        )
    if (outside := (found != 0) & (weights_BC == 0)).any():
        row, place = outside.nonzero()[0].tolist()
        raise ValueError(
            f"`{where}` returned {found[row, place]:g} for token {place} of row {row}, which is padding, was not "
            "generated by the student, or is excluded by `token_selection`: multiply your weights by `rollout.weights`."
        )
    return found
