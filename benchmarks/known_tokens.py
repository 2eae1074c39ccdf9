"""What a server that tells K tokens per position leaves out: values, gradients and trainings.

    python benchmarks/known_tokens.py out/smollm2 --output out/known   # examples/real_model/convert.py makes the model

The student is the model without five of its layers, as in `pruned.py`, before and after a training; the teacher is the
whole one. Known tokens are told by the model in this process, as a server would: `tests/` compare the two.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parent))

import pruned
import torch
from support.scores import known_teacher
from torch import Tensor
from transformers import AutoModelForCausalLM

from trl_opsd import OPSDTrainer
from trl_opsd.losses import DIVERGENCES, LazyLogits, OutputHead, streamed_divergence
from trl_opsd.types.known import KnownTokens, TokenHead

NAMES = ("reverse_kl", "forward_kl", "jsd", "skewed_reverse_kl", "total_variation")
KS = (8, 20, 64, 128)
BY = ("student_top_k", "teacher_top_k", "both_top_k")
WAYS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "states": {},
    **{f"student_top_k {k}": {"targets": "student_top_k", "top_k": k} for k in (64, 20, 8)},
    **{f"{by} 64": {"targets": by, "top_k": 64} for by in ("teacher_top_k", "both_top_k")},
    "sampled token": {"divergence": "sampled_reverse_kl"},
}


def known(log_student_NV: Tensor, log_teacher_NV: Tensor, by: str, k: int) -> LazyLogits:
    """The teacher as a server tells it."""
    tops = {"student_top_k": [log_student_NV], "teacher_top_k": [log_teacher_NV]}
    logs = tops.get(by, [log_student_NV, log_teacher_NV])
    each = zip(*(one.topk(k).indices.tolist() for one in logs), strict=True)
    ids = [list(dict.fromkeys(chain.from_iterable(row))) for row in each]
    width = max(map(len, ids))
    ids_NM = torch.tensor([[*row, *[-1] * (width - len(row))] for row in ids])
    logs_NM = log_teacher_NV.gather(1, ids_NM.clamp(min=0)).masked_fill(ids_NM < 0, -torch.inf)
    told = KnownTokens.of(ids_NM, logs_NM, width)
    return LazyLogits(told.packed(), TokenHead.sized(log_teacher_NV.size(1), width, torch.device("cpu")))


def distances(student: Any, teacher: Any, rows: list[tuple[list[int], list[int]]]) -> Iterator[dict[str, Any]]:
    """Mean values in nats, and gradients of the student's states, of each divergence and K."""
    states: list[list[Tensor]] = [[], []]
    with torch.no_grad():
        for prompt, completion in rows:
            ids = torch.tensor([[*prompt, *completion]])
            for kept, model in zip(states, (student, teacher), strict=True):
                kept.append(model.model(ids).last_hidden_state[0, len(prompt) - 1 : -1])
    both = zip(states, (student, teacher), strict=True)
    pair = [LazyLogits(torch.cat(kept), OutputHead.of(model)) for kept, model in both]
    logs = [(one.hidden @ one.head.weight.T).float().log_softmax(-1).detach() for one in pair]

    def of(name: str, target: LazyLogits) -> tuple[float, Tensor]:
        hidden_NH = pair[0].hidden.clone().requires_grad_()
        head = OutputHead(pair[0].head.weight.detach())
        found = streamed_divergence(LazyLogits(hidden_NH, head), target, DIVERGENCES[name]())
        found.divergence.sum().backward()
        return float(found.divergence.detach().mean()), hidden_NH.grad

    for name in NAMES:
        value, gradient = of(name, pair[1])
        yield {"divergence": name, "k": "all", "value": value}
        for by in BY:
            for k in KS:
                less, other = of(name, known(*logs, by, k))
                gap = float((other - gradient).norm() / gradient.norm())
                yield {"divergence": name, "by": by, "k": k, "value": less, "gradient_gap": gap, "share": less / value}


def trained(asked: argparse.Namespace, way: str, student: str, rows: Any) -> OPSDTrainer:
    options = dict(WAYS[way])
    targets = {name: options.pop(name) for name in ("targets", "top_k") if name in options}
    given = {"divergence": "reverse_kl", **options}
    if way == "nothing":
        return pruned.trainer(asked, student, rows, 0, **given)
    if not targets:
        one = pruned.trainer(asked, student, rows, 0, **given)
    else:
        teacher = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32)
        one = pruned.trainer(asked, student, rows, 0, teacher_model=known_teacher(teacher, **targets), **given)
    one.train()
    curve = [row["divergence/mean"] for row in one.state.log_history if "divergence/mean" in row]
    print(json.dumps({"way": way, "curve": [round(value, 4) for value in curve]}), flush=True)
    exact = pruned.trainer(asked, student, rows, 0, divergence="reverse_kl")
    exact.model.load_state_dict(one.model.state_dict())
    return exact


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--output", type=Path, default=Path("out/known"))
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    asked = parser.parse_args()
    asked.task, asked.seeds = "rules", [0]
    for name, value in pruned.DEFAULTS["rules"].items():
        setattr(asked, name, getattr(asked, name, None) or value)
    asked.output.mkdir(parents=True, exist_ok=True)
    rows, held_out = pruned.rows_of(asked, 0)
    student = pruned.student_of(asked, "states", rows, 0)
    teacher = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32).eval()
    for way in asked.ways:
        one = trained(asked, way, student, rows)
        if way in ("nothing", "states"):
            few = held_out.select(range(16))
            ids = one.predict(few).predictions.tolist()
            prompts = one.processing_class.apply_chat_template(
                list(few["prompt"]), add_generation_prompt=True, return_dict=True
            )["input_ids"]
            said = [(prompt, [each for each in row if each >= 0]) for prompt, row in zip(prompts, ids, strict=True)]
            for found in distances(one.model.eval(), teacher, said):
                print(json.dumps({"student": "before" if way == "nothing" else "after", **found}), flush=True)
        print(json.dumps({"way": way, **pruned.measured(asked, one, held_out)}), flush=True)


if __name__ == "__main__":
    main()
