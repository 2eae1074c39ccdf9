"""Proves what a student has to fulfil before its first rollout: its head, that it learns, and how it reads."""

from __future__ import annotations

from accelerate import Accelerator
from transformers import TrainingArguments

from trl_opsd._compat.peft import CausalLM
from trl_opsd.models.backbone import Run
from trl_opsd.models.head import prove_head
from trl_opsd.models.padding import Reading
from trl_opsd.models.reading_proof import prove_padding
from trl_opsd.models.training_proof import heed_unreached, prove_training
from trl_opsd.run.precision import autocast
from trl_opsd.run.rng import preserved_rng


def prove_student(student: CausalLM, run: Run, args: TrainingArguments, accelerator: Accelerator) -> Reading:
    """Which rows it reads in one batch, as far as everything else about it is right.

    Args:
        student ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The student.
        run (`Callable`):
            `run(function, *args)` equals `function(student, *args)`, also when it is split.
        args ([`~transformers.TrainingArguments`]):
            As [`heed_unreached`] takes them.
        accelerator ([`~accelerate.Accelerator`]):
            Of the launch, in whose precision all of it is computed.

    Raises:
        ValueError: One of the proofs fails; the message has the measured difference.
    """
    with autocast(accelerator):
        prove_head(student, "student", run)
        with preserved_rng(accelerator.device):
            unreached = prove_training(student, run)
        heed_unreached(unreached, args, accelerator)
        # After it: a layer that keeps states must not keep those that hold a graph.
        return prove_padding(student, "student", run)
