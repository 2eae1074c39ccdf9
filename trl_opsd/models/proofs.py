"""Checks a student before its first rollout: its output head, its gradients, and which rows it can batch."""

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
    """Checks a student, and returns which rows it can read in one batch.

    Args:
        student ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The student.
        run (`Callable`):
            `run(function, *args)` equals `function(student, *args)`, also for a sharded student.
        args ([`~transformers.TrainingArguments`]):
            As [`set_find_unused_parameters`] takes them.
        accelerator ([`~accelerate.Accelerator`]):
            The launch's accelerator; the checks run in its mixed precision.
        padding_free (`bool`, *optional*, defaults to `False`):
            Whether it will read rows as one, which is checked too.

    Raises:
        ValueError: A check fails; the message has the measured difference.
    """
    with autocast(accelerator):
        prove_head(student, "student", run)
        with preserved_rng(accelerator.device):
            unreached = prove_training(student, run)
        set_find_unused_parameters(unreached, args, accelerator)
        # Last: a layer that caches states must not keep any with a graph.
        reading = prove_padding(student, "student", run)
        if padding_free:
            prove_packing(student, "student", reading, run)
        return reading
