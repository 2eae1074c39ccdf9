"""Loads the two models and tokenizers of a training, whole or with two small layers, and makes rows for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from accelerate import PartialState
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from trl_opsd._compat.trl import create_model_from_path
from trl_opsd.data.tokenization import shared_vocabulary
from trl_opsd.models.checks import language_config, place_of, whole_checkpoint
from trl_opsd.models.probes import Probed
from trl_opsd.models.tokenizers import has_tokenizer, loaded_processing_class, text_tokenizer
from trl_opsd.models.weights import without_weights
from trl_opsd.types import Rollout

LAYERS = 2
"""Layers of a tiny model."""
_MOST = {
    **{"intermediate_size": 256, "moe_intermediate_size": 64, "num_experts": 4, "num_local_experts": 4},
    **{"num_experts_per_tok": 2, "num_experts_per_token": 2, "num_kv_shared_layers": 0, "first_k_dense_replace": 1},
}
"""Maximum values in a tiny model: sizes that neither its head nor its attention depends on."""
_TEXTS = (
    ("Name a colour.", " Blue is one, and so is green."),
    ("What does a teacher do with the answers that a student has written?", " It reads them."),
    ("Why?", " Because each token of an answer is compared, one after another, with what the teacher expects."),
)
"""Prompts and completions of different lengths."""


@dataclass(frozen=True, slots=True)
class Side:
    """A model with its tokenizer."""

    source: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def rows(self) -> int:
        """Rows of the output head."""
        return int(self.model.get_output_embeddings().weight.size(0))


@dataclass(frozen=True)
class Pair:
    """The models to examine."""

    student: Side
    teacher: Side
    tiny: bool = False
    assumes_tokenizer: bool = False
    """Whether the teacher has no tokenizer of its own."""

    @property
    def device(self) -> torch.device:
        """The device of both models."""
        return self.student.model.device

    @cached_property
    def probed(self) -> dict[str, Probed]:
        """Both models by role, with what their probes have found."""
        return {role: Probed(getattr(self, role).model, role) for role in ("student", "teacher")}

    @property
    def vocabulary(self) -> int | None:
        """The number of ids that both heads share; `None` if they have the same size."""
        return shared_vocabulary(self.student.rows, {"teacher": self.teacher.rows}, self.student.tokenizer)

    @cached_property
    def texts(self) -> tuple[tuple[list[int], ...], ...]:
        """Token ids of prompts, and of completions."""
        return tuple(zip(*([self._ids(text) for text in row] for row in _TEXTS), strict=True))

    def _ids(self, text: str) -> list[int]:
        tokenizer = self.student.tokenizer
        read: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        if 2 * len(set(read)) > len(text.split()):
            return read
        # Fewer distinct tokens, so most words were unknown: other tokens in their place.
        ordinary = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
        return [ordinary[ord(letter) % len(ordinary)] for letter in text]

    def read_by(self, role: str) -> Rollout:
        """Three rows; for the teacher with longer prompts if it is the student, as the divergence would be 0."""
        prompts, completions = self.texts
        longer = role == "teacher" and self.student.source == self.teacher.source
        return Rollout.of([prompt * (1 + longer) for prompt in prompts], completions, self.device)


def load_pair(
    student: str, teacher: str, tiny: bool = False, loading: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {})
) -> Pair:
    """Loads both models in float32, of the classes that a training loads; `loading` goes to `from_pretrained`."""
    logging.disable_progress_bar()
    PartialState()  # which warnings need
    of_student = _model(student, "student", tiny, loading[0])
    tokenizer = text_tokenizer(loaded_processing_class(student, loading[0], _is_trusted(loading[0])))
    of_teacher = _model(teacher, "teacher", tiny, loading[1])
    theirs = None
    if has_tokenizer(teacher, place_of(loading[1])):
        theirs = AutoTokenizer.from_pretrained(
            teacher, trust_remote_code=_is_trusted(loading[1]), **place_of(loading[1])
        )
    return Pair(
        student=Side(student, of_student, tokenizer),
        teacher=Side(teacher, of_teacher, tokenizer if theirs is None else theirs),
        tiny=tiny,
        assumes_tokenizer=theirs is None,
    )


def _model(source: str, role: str, tiny: bool, loading: Mapping[str, Any]) -> PreTrainedModel:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    trust = "trust_remote_code" if role == "student" else "teacher_trust_remote_code"
    language_config(source, role, loading, trust)
    if tiny:  # random weights; vocabulary, hidden size and head stay as they are
        torch.manual_seed(("student", "teacher").index(role))  # different weights, or the divergence would be 0
        config = AutoConfig.from_pretrained(source, trust_remote_code=_is_trusted(loading), **place_of(loading))
        model = without_weights(shrunk(config), torch.float32)
    else:
        with whole_checkpoint(role):
            model = create_model_from_path(source, dtype="float32", device_map=None, use_safetensors=True, **loading)
    return model.to(device).eval()


def _is_trusted(loading: Mapping[str, Any]) -> bool:
    return bool(loading.get("trust_remote_code"))


def shrunk(config: PretrainedConfig) -> PretrainedConfig:
    """A config with two layers and narrow feed-forward parts, in place; of a multimodal one, the text part."""
    text: Any = config.get_text_config()
    for name, most in _MOST.items():
        if isinstance(value := getattr(text, name, None), int):
            setattr(text, name, min(value, most))
    if isinstance(kinds := vars(text).get("layer_types"), list):
        text.layer_types = kinds[:LAYERS] if len(set(kinds)) == 1 else _one_of_each(kinds)
    text.num_hidden_layers = LAYERS
    return config


def _one_of_each(kinds: list[str]) -> list[str]:
    """Two layers of different kinds, in the order in which they first occur."""
    return list(dict.fromkeys(kinds))[:LAYERS]
