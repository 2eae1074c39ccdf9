"""Loads the two models of a training, whole or with two small layers, makes rows for them, and reads its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import torch
from accelerate import PartialState
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from trl_opsd._compat.trl import create_model_from_path
from trl_opsd.cli.train.launch import launch_options
from trl_opsd.cli.train.options import OptionParser, RunOptions
from trl_opsd.cli.train.script import set_loading
from trl_opsd.data.tokenization import shared_vocabulary
from trl_opsd.models.checks import adapter_at, language_config, place_of, whole_checkpoint
from trl_opsd.models.probes import Probed
from trl_opsd.models.tokenizers import has_tokenizer, loaded_processing_class, text_tokenizer, tokenizer_at
from trl_opsd.models.weights import without_weights
from trl_opsd.teacher.checks import LOCATION_OPTIONS, location, processor_at
from trl_opsd.types import Rollout

LAYERS = 2
"""Layers of a tiny model."""
_MOST = {
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "num_kv_shared_layers": 0,
    "first_k_dense_replace": 1,
}
"""Maximum values in a tiny model: sizes that neither its head nor its attention depends on."""
TEXTS = (
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
    processing: Any = None
    """The processor, or a tokenizer again, as `AutoProcessor` loads it."""

    @property
    def rows(self) -> int:
        """Rows of the output head."""
        return int(self.model.get_output_embeddings().weight.size(0))

    @property
    def ends(self) -> list[str]:
        """Tokens that end a completion, as the model's generation config has them; the tokenizer's, if it has none."""
        found = self.model.generation_config.eos_token_id
        listed = found if isinstance(found, list) else [] if found is None else [found]
        return [one for one in self.tokenizer.convert_ids_to_tokens(listed or [self.tokenizer.eos_token_id]) if one]


@dataclass(frozen=True)
class Pair:
    """The models to examine."""

    student: Side
    teacher: Side
    tiny: bool = False
    assumes_tokenizer: bool = False
    """Whether the teacher has no tokenizer of its own."""
    cross_tokenizer: str | None = None
    """What a training compares their tokens by, where they differ."""

    @property
    def device(self) -> torch.device:
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
        return tuple(zip(*([self._ids(text) for text in row] for row in TEXTS), strict=True))

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


def load_pair(student: str, teacher: str, tiny: bool = False, settings: RunOptions | None = None) -> Pair:
    """Loads both models in float32, of the classes that a training with these settings loads."""
    disable_progress_bar()
    PartialState()  # which warnings need
    mine, theirs = ({}, {}) if settings is None else loading(settings)
    path, place = tokenizer_at(teacher, theirs)
    base = teacher
    if (adapter := adapter_at(teacher, theirs)) is not None:
        adapter.check("teacher")
        theirs, base = adapter.loading_of_base, adapter.base
    models: list[PreTrainedModel] = []
    trusted: list[dict[str, Any]] = []
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    for role, source, options in (("student", student, mine), ("teacher", base, theirs)):
        language_config(source, role, options)
        trusted.append({"trust_remote_code": bool(options.get("trust_remote_code")), **place_of(options)})
        if tiny:  # random weights, other ones for each, or the divergence would be 0
            torch.manual_seed(len(models))
            config = shrunk(AutoConfig.from_pretrained(source, **trusted[-1]))
            model = without_weights(config, torch.float32)
        else:
            with whole_checkpoint(role):
                given = {"dtype": "float32", "device_map": None, "use_safetensors": True, **options}
                model = create_model_from_path(source, **given)
            if adapter is not None and role == "teacher":
                model = adapter.put_on(model, role)
        models.append(model.to(device).eval())
    processing = loaded_processing_class(student, mine, trusted[0]["trust_remote_code"])
    tokenizer, own, reads = text_tokenizer(processing), None, None
    if has_tokenizer(path, place_of(place)):
        own = AutoTokenizer.from_pretrained(path, **{**trusted[1], **place_of(place)})
        reads = processor_at(base, trusted[1])
    return Pair(
        student=Side(student, models[0], tokenizer, processing),
        teacher=Side(teacher, models[1], own or tokenizer, reads),
        tiny=tiny,
        assumes_tokenizer=own is None,
        cross_tokenizer=None if settings is None else settings.config.cross_tokenizer,
    )


def shrunk(config: PretrainedConfig) -> PretrainedConfig:
    """A config with two layers, narrow feed-forward parts and tied embeddings, in place; of a multimodal one: text."""
    text: Any = config.get_text_config()
    config.tie_word_embeddings = text.tie_word_embeddings = True  # most of such a model is its head
    for name, most in _MOST.items():
        if isinstance(value := getattr(text, name, None), int):
            setattr(text, name, min(value, most))
    if isinstance(kinds := vars(text).get("layer_types"), list):
        each = list(dict.fromkeys(kinds))  # layers of different kinds, where there are several
        text.layer_types = (kinds if len(each) == 1 else each)[:LAYERS]
    text.num_hidden_layers = LAYERS
    return config


# ---- The settings of a training, from its file ----------------------------------------------------------------------


def read_settings(file: str) -> RunOptions:
    """The settings in a file of `trl-opsd train`; a `ValueError` if the parser rejects it."""

    def refuse(message: str) -> NoReturn:
        raise ValueError(message)

    parser = OptionParser(prog="trl-opsd train", launch_options=launch_options())
    parser.error = refuse  # type: ignore[method-assign]
    given = parser.given(["--config", file])
    set_loading(given.extra, given.config, given.model)
    return given


def models_of(settings: RunOptions) -> tuple[str | None, str | None]:
    """Student and teacher, as the settings name them; the student twice in self-distillation."""
    student, config = settings.model.model_name_or_path, settings.config
    return student, config.teacher_model_name_or_path or (config.teacher_model_kind and student)


def loading(settings: RunOptions) -> tuple[dict[str, Any], dict[str, Any]]:
    """How student and teacher are loaded, but for their dtypes: location, trusted code, attention."""
    config = settings.config
    of_student = {"trust_remote_code": config.trust_remote_code, **(config.model_init_kwargs or {})}
    of_teacher = {**(config.teacher_model_init_kwargs or {}), **location(config)}
    return _kept(of_student), _kept(of_teacher if config.teacher_model_kind is None else of_student)


def _kept(loading: Mapping[str, Any]) -> dict[str, Any]:
    is_exact = loading.get("attn_implementation") in ("eager", "sdpa")  # the others do not compute in float32
    names = (*LOCATION_OPTIONS, *["attn_implementation"] * is_exact)
    return {name: loading[name] for name in names if loading.get(name) is not None}
