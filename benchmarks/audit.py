"""Holds `trl-opsd audit` against trainings whose outcome is known: which of its verdicts are right.

    python benchmarks/audit.py --half A            # audits the cases, a table and `out/audit/audit.json`
    python benchmarks/audit.py --train --seeds 0 1 # trains them instead: held-out rewards before and after

The cases are in `audit_cases.py`; the thresholds of the verdict were looked at with half A alone.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from audit_cases import CASES, WORDS, Case, servers
from transformers import PrinterCallback, ProgressCallback

from trl_opsd import OPSDTrainer
from trl_opsd.cli.audit import audit, document, screen, verdict
from trl_opsd.errors import OPSDError
from trl_opsd.report.describe import Banner

COLUMNS = (
    *("case", "outcome", "verdict", "score", "student", "teacher", "teacher after", "student after"),
    *("forward KL", "floor", "correlation", "seconds"),
)
"""Of the table: rewards of the student and of the teacher, from the prompt and after a mistake of the student."""


def built(case: Case, folder: Path, seed: int = 0, **options: Any) -> OPSDTrainer:
    """The trainer, which prints nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    trainer = case.build(str(folder), seed, **case.options, **options)
    for callback in (PrinterCallback, ProgressCallback, Banner):
        trainer.remove_callback(callback)
    return trainer


def trained(case: Case, folder: Path, seed: int, **options: Any) -> dict[str, float]:
    """The held-out reward before and after, with seconds."""

    def reward() -> float:
        figures = trainer.evaluate()
        return next(value for name, value in figures.items() if name.startswith("eval_rewards/") and "/mean" in name)

    trainer, start = built(case, folder, seed, **options), time.perf_counter()
    before = reward()
    trainer.train()
    return {"before": before, "after": reward(), "seconds": time.perf_counter() - start}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What the audit said of a case."""

    name: str
    verdict: str
    seconds: float
    why: str
    audit: dict[str, Any] | None = None
    """As `trl-opsd audit --json` writes it; `None` where the trainer was refused."""

    @property
    def case(self) -> Case:
        return CASES[self.name]

    @property
    def is_decided(self) -> bool:
        """Whether it rightly advises to train on-policy, or not to; where off-policy is as good, either is right."""
        says, outcome = self.verdict == "helps", self.case.outcome
        return self.verdict != "unknown" and (outcome == "off-policy as good" or says == (outcome == "helps"))

    @property
    def is_explained(self) -> bool:
        """Whether the reason is right, too."""
        return self.verdict in WORDS[self.case.outcome]

    @property
    def line(self) -> str:
        """Of the table."""
        score = "right" if self.is_explained else "other reason" if self.is_decided else "wrong"
        cells = [self.name, self.case.outcome, self.verdict, score, *self._numbers(), f"{self.seconds:.0f}"]
        return f"| {' | '.join(cells)} |"

    def _numbers(self) -> list[str]:
        if self.audit is None:
            return [""] * 7
        one = self.audit
        after = one["after"] or [None, None]
        rewards = ["" if mean is None else f"{mean['value']:.2f}" for mean in (one["student"], one["own"], *after)]
        return [*rewards, f"{one['forward']:.3g}", f"{one['floor']:.1g}", f"{one['correlation']['value']:+.2f}"]


def called(name: str, folder: Path, rows: int) -> Call:
    """Audits a case."""
    try:
        trainer = built(CASES[name], folder)
    except (ValueError, OPSDError) as error:
        return Call(name=name, verdict="broken", why=str(error), seconds=0.0)
    start = time.perf_counter()  # without the models that it trained
    try:
        found = audit(trainer, rows)
    except (ValueError, OPSDError) as error:
        return Call(name=name, verdict="unknown", why=str(error), seconds=0.0)
    seconds = time.perf_counter() - start
    said = verdict(found)
    print(screen(found), flush=True)
    return Call(name=name, verdict=said.word, why=said.why, seconds=seconds, audit=json.loads(document(found)))


def table(calls: Sequence[Call]) -> str:
    """All cases, and how many are right in each half."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *(call.line for call in calls)]
    for half in sorted({call.case.half for call in calls}):
        here = [call for call in calls if call.case.half == half]
        decided, explained = sum(call.is_decided for call in here), sum(call.is_explained for call in here)
        lines.append(f"Half {half}: to train or not right in {decided} of {len(here)}, the reason too in {explained}.")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--half", choices=["A", "B"], help="by default both")
    parser.add_argument("--rows", type=int, default=32, help="of an audit")
    parser.add_argument("--train", action="store_true", help="train the cases instead, to measure their outcome")
    parser.add_argument("--off-policy", action="store_true", help="train on completions of the teacher instead")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="of trainings")
    parser.add_argument("--output", type=Path, default=Path("out/audit"))
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    chosen = [name for name in asked.cases if asked.half in (None, CASES[name].half)]
    with servers:
        if asked.train:
            options = {"lmbda": 0.0, "seq_kd": True} if asked.off_policy else {}
            for name, seed in product(chosen, asked.seeds):
                print(name, seed, trained(CASES[name], asked.output / name / str(seed), seed, **options), flush=True)
            return
        calls = [called(name, asked.output / name / "audit", asked.rows) for name in chosen]
    (asked.output / "audit.json").write_text(json.dumps([asdict(call) for call in calls], indent=2) + "\n")
    print(table(calls))


if __name__ == "__main__":
    main()
