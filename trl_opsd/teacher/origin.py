"""Checks that a student without its adapter still is the model that was passed in, while it teaches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from torch import Tensor

from trl_opsd._compat.peft import CausalLM, rewrites_base, without_adapter
from trl_opsd.models.samples import first_change, sampled

_ANOTHER_COPY = "or pass a second copy of it, for instance its path, as `teacher_model`"


@final
class Origin:
    """The student as it was passed in; refuses an adapter that changes the weights under it, at once or by training."""

    def __init__(self, student: CausalLM, handed_in: Mapping[str, Tensor]) -> None:
        self._student = student
        self._handed_in = handed_in  # samples of the base weights, from before an adapter is added here
        # Some initialisations (PiSSA) move part of the base weights into the adapter.
        kinds = {name: config for name, config in student.peft_config.items() if rewrites_base(config)}
        changed = first_change(handed_in, sampled(student))
        if kinds or changed is not None:
            said = [f"init_lora_weights={config.init_lora_weights!r}" for config in kinds.values()]
            raise ValueError(
                f"`teacher_model_kind='base'` is the student without its adapter, but the adapter "
                f"({', '.join(said) or 'as it was added'}) has changed the weights under it"
                f"{'' if changed is None else f', first {changed}'}: what is left is another model. Initialise the "
                f"adapter so that it leaves them alone (`init_lora_weights=True`), {_ANOTHER_COPY}."
            )
        self._check_frozen()

    def check(self) -> None:
        """Raises `ValueError` if a weight under the adapter has changed. Collective."""
        changed = first_change(self._handed_in, sampled(self._student))
        if changed is not None:
            raise ValueError(
                f"{changed} has changed since the student was passed in, so `teacher_model_kind='base'` is another "
                f"teacher now: do not change the weights under the adapter (in a callback, by `merge_adapter`), "
                f"{_ANOTHER_COPY}."
            )

    def _check_frozen(self) -> None:
        learns = {name for name, parameter in self._student.named_parameters() if parameter.requires_grad}
        # With the adapter disabled, peft before 0.19 also makes the originals of `modules_to_save` trainable.
        with without_adapter(self._student):
            without = [name for name, parameter in self._student.named_parameters() if parameter.requires_grad]
        trained = [name for name in without if name in learns]
        if trained:
            raise ValueError(
                f"`teacher_model_kind='base'` is the student without its adapter, but {trained[0]!r} is trained and "
                f"belongs to both (in all {len(trained)} such parameters), so the teacher would learn with the "
                f"student: set `bias='none'` in the `peft_config`, freeze it, {_ANOTHER_COPY}."
            )
