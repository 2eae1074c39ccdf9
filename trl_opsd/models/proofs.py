"""Probes a student before its first rollout: its output head, its gradients, and which rows may share a pass."""

from __future__ import annotations

from accelerate import Accelerator
from transformers import TrainingArguments

from trl_opsd._compat.peft import CausalLM
from trl_opsd.models.backbone import Run
from trl_opsd.models.head import prove_head
from trl_opsd.models.padding import Reading
from trl_opsd.models.reading_proof import prove_packing, prove_padding
from trl_opsd.models.training_proof import prove_training, set_find_unused_parameters
from trl_opsd.run.precision import autocast
from trl_opsd.run.rng import preserved_rng


def prove_student(
    student: CausalLM, run: Run, args: TrainingArguments, accelerator: Accelerator, padding_free: bool = False
) -> Reading:
    """Probes a student in the launch's precision, and returns which of its rows may share a pass."""
    with autocast(accelerator):
        prove_head(student, "student", run)
        with preserved_rng(accelerator.device):
            unreached = prove_training(student, run)
        set_find_unused_parameters(unreached, args, accelerator)
        # After the training probe: a layer that caches states must not keep any with an autograd graph.
        reading = prove_padding(student, "student", run)
        if padding_free:
            prove_packing(student, "student", reading, run)
        return reading
