"""Trains with a teacher behind a vLLM server and with the same checkpoint in the process, and compares the students.

    python benchmarks/served_teacher.py [family ...]

Prints, for toy teachers of each family, head tied or not: the largest difference of a weight after
four steps of each divergence, beside how far the steps moved one; and, for a teacher in bfloat16, the mean KL of what
its states say to what the same weights say in float32, served and in the process. It is about exactness, not speed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from support import serving, tiny
from transformers import AutoConfig, AutoModelForCausalLM, PrinterCallback

from trl_opsd import FixedRollout, OPSDTrainer
from trl_opsd.describe import Banner
from trl_opsd.teacher import FrozenTeacher, Resident
from trl_opsd.teacher.served import ServedTeacher, answers_of
from trl_opsd.teacher.servers import TeacherServer
from trl_opsd.types import Rollout

CPU = torch.device("cpu")
FAMILIES = ("qwen2", "llama", "qwen3", "gemma2")
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")
STEPS = 4


def teacher_path(folder: Path, family: str, tied: bool, dtype: torch.dtype = torch.float32) -> str:
    """A random teacher with random norms, 64 wide: vLLM's attention on the CPU takes heads of at least 32."""

    def make(width: int) -> Any:
        config = AutoConfig.for_model(family, **{**tiny._sizes(width), "head_dim": 32, "tie_word_embeddings": tied})
        return tiny.model(config, seed=1)

    return serving.save_teacher(folder / f"{family}-{tied}", make, dtype)


def trained(folder: Path, path: str, divergence: str, **options: Any) -> tuple[dict[str, torch.Tensor], float]:
    """The student's weights after the steps, and how far one of them has moved."""
    words = tiny.tokenizer()
    trainer = OPSDTrainer(
        model=tiny.qwen2(32),
        teacher_model=path,
        args=tiny.config(folder / "out", divergence=divergence, max_steps=STEPS, learning_rate=1e-3, **options),
        train_dataset=tiny.rows(),
        processing_class=words,
        rollout=FixedRollout(tiny.recorded(words)),
    )
    for callback in (PrinterCallback, Banner):
        trainer.remove_callback(callback)
    before = {name: one.detach().clone() for name, one in trainer.model.named_parameters()}
    trainer.train()
    after = {name: one.detach() for name, one in trainer.model.named_parameters()}
    return after, max(float((after[name] - one).abs().max()) for name, one in before.items())


def compare(folder: Path, family: str, tied: bool) -> None:
    path = teacher_path(folder, family, tied)
    with serving.pooling(path, folder / f"log-{family}-{tied}", "--dtype", "float32") as url:
        for divergence in DIVERGENCES:
            here, moved = trained(folder, path, divergence)
            there, _ = trained(folder, path, divergence, teacher_server_url=url)
            found = max(float((here[name] - one).abs().max()) for name, one in there.items())
            print(
                f"| {family}, {'tied' if tied else 'untied'} | {divergence} | {found:.1e} | {moved:.1e} |", flush=True
            )


def rollout() -> Rollout:
    ids = torch.randint(3, tiny.VOCABULARY, (16, 120), generator=torch.Generator().manual_seed(0))
    return tiny.rollout(ids[:, :20], ids[:, 20:], torch.ones_like(ids[:, 20:]))


def log_probs(teacher: Any) -> torch.Tensor:
    """[N, V], float64, of the tokens of the rollout."""
    states = torch.cat([row.hidden for row in teacher.targets(rollout()).rows])
    head = teacher.head
    logits = states.double() @ head.weight.double().T * head.scale
    capped = logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)
    return capped.log_softmax(-1)


def half(folder: Path) -> None:
    path = teacher_path(folder / "half", "qwen2", tied=False, dtype=torch.bfloat16)
    here = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    truth = log_probs(FrozenTeacher(Resident(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), CPU)))

    def kl(teacher: Any) -> float:
        return float((truth.exp() * (truth - log_probs(teacher))).sum(-1).mean())

    with serving.pooling(path, folder / "half" / "log", "--dtype", "bfloat16") as url:
        server = TeacherServer(url, 60.0, 0.0)
        served = ServedTeacher(path, server, answers_of(server, "states", path, {}, CPU, tiny.VOCABULARY))
        print(f"\n{served}")
        print(
            f"mean KL to float32: {kl(served):.2e} served, {kl(FrozenTeacher(Resident(here, CPU))):.2e} in the process"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=FAMILIES)
    families = parser.parse_args().families
    print("| teacher | divergence | served | a weight moved by |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "half").mkdir()
        for family in families:
            for tied in (False, True)[family == "gemma2" :]:  # untied, it does not start in vLLM
                compare(Path(name), family, tied)
        half(Path(name))


if __name__ == "__main__":
    main()
