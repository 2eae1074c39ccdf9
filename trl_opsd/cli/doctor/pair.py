"""Loads the two models of a training, whole or with two small layers, makes rows for them, and reads its settings."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate import PartialState
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from trl_opsd._compat.trl import create_model_from_path
from trl_opsd.cli.train.launch import launch_options
from trl_opsd.cli.train.options import OptionParser, RunOptions
from trl_opsd.cli.train.script import check_options, set_loading
from trl_opsd.data.tokenization import shared_vocabulary
from trl_opsd.models.adapters import adapter_at
from trl_opsd.models.backbone import model_shape
from trl_opsd.models.checks import language_config, place_of, whole_checkpoint
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
    def sees(self) -> bool:
        """Whether it reads images."""
        return getattr(self.processing, "image_processor", None) is not None

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
    by_bytes: bool = False
    """Whether a training compares them by bytes."""

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


def load_pair(
    student: str,
    teacher: str,
    tiny: bool = False,
    loading: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {}),
    by_bytes: bool = False,
) -> Pair:
    """Loads both models in float32, of the classes that a training loads; `loading` goes to `from_pretrained`."""
    disable_progress_bar()
    PartialState()  # which warnings need
    path, place = tokenizer_at(teacher, loading[1])
    named, configs, models = teacher, [], []
    if (adapter := adapter_at(teacher, loading[1])) is not None:
        adapter.check("teacher")
        loading, teacher = (loading[0], adapter.loading_of_base), adapter.base
    places = [{"trust_remote_code": bool(one.get("trust_remote_code")), **place_of(one)} for one in loading]
    for role, source, options in zip(("student", "teacher"), (student, teacher), loading, strict=True):
        language_config(source, role, options)
    if tiny:  # random weights; vocabulary, hidden size and head stay as they are
        configs = [
            shrunk(AutoConfig.from_pretrained(student, **places[0])),
            shrunk(AutoConfig.from_pretrained(teacher, **places[1])),
        ]
        needed, free = tiny_bytes(*configs), free_bytes()
        says = f"`--tiny` needs about {needed / 1e9:.1f} GB of memory for these heads; {free / 1e9:.1f} GB are free"
        if needed > free:
            raise ValueError(f"{says}: free some, use a larger machine, or examine a smaller model of each family.")
        print(f"{says}.", file=sys.stderr, flush=True)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    for number, (role, source) in enumerate({"student": student, "teacher": teacher}.items()):
        if tiny:
            torch.manual_seed(number)  # different weights, or the divergence would be 0
            model: PreTrainedModel = without_weights(configs[number], torch.float32)
        else:
            options = {"dtype": "float32", "device_map": None, "use_safetensors": True, **loading[number]}
            with whole_checkpoint(role):
                model = create_model_from_path(source, **options)
            if adapter is not None and role == "teacher":
                model = adapter.put_on(model, role)
        models.append(model.to(device).eval())
    processing = loaded_processing_class(student, loading[0], places[0]["trust_remote_code"])
    tokenizer, theirs, reads = text_tokenizer(processing), None, None
    if has_tokenizer(path, place_of(place)):
        theirs = AutoTokenizer.from_pretrained(path, **{**places[1], **place_of(place)})
        reads = processor_at(teacher, places[1])
    return Pair(
        student=Side(student, models[0], tokenizer, processing),
        teacher=Side(named, models[1], theirs or tokenizer, reads),
        tiny=tiny,
        assumes_tokenizer=theirs is None,
        by_bytes=by_bytes,
    )


_LIBRARIES = 1_500_000_000
"""Bytes of a process that has imported all that the checks need."""
_LOGITS = 512
"""Numbers in float64 for each token of the vocabulary, that the reference of the loss needs."""


def tiny_bytes(*configs: PretrainedConfig) -> int:
    """Bytes that the checks of a student and a teacher need at most, in float32."""
    with torch.device("meta"):
        models = [without_weights(config, torch.float32) for config in configs]
    (mine, yours) = (4 * sum(one.numel() for one in model.parameters()) for model in models)
    (head, its_head) = (4 * model_shape(model)[0] * model_shape(model)[1] for model in models)
    rows = max(model_shape(model)[0] for model in models)
    # Weights; then the student's gradients, with that of its head while it is added, or both heads in bfloat16, or the
    # teacher's embeddings until they are tied.
    return mine + yours + max(mine + 2 * head, (head + its_head) // 2, its_head) + 8 * _LOGITS * rows + _LIBRARIES


def free_bytes() -> int:
    """Free bytes of the device that models are loaded on."""
    if torch.accelerator.is_available():
        return int(torch.accelerator.get_memory_info()[0])
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


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


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings in a file."""

    given: RunOptions
    warnings: tuple[str, ...]
    """Warnings of this package when they are read."""

    @property
    def models(self) -> tuple[str | None, str | None]:
        """Student and teacher, as the file names them; the student twice in self-distillation."""
        student, config = self.given.model.model_name_or_path, self.given.config
        return student, config.teacher_model_name_or_path or (config.teacher_model_kind and student)

    @property
    def loading(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """How student and teacher are loaded, but for their dtypes: location, trusted code, attention."""
        config = self.given.config
        of_student = {"trust_remote_code": config.trust_remote_code, **(config.model_init_kwargs or {})}
        of_teacher = {**(config.teacher_model_init_kwargs or {}), **location(config)}
        return _kept(of_student), _kept(of_teacher if config.teacher_model_kind is None else of_student)


def _kept(loading: Mapping[str, Any]) -> dict[str, Any]:
    is_exact = loading.get("attn_implementation") in ("eager", "sdpa")  # the others do not compute in float32
    names = (*LOCATION_OPTIONS, *["attn_implementation"] * is_exact)
    return {name: loading[name] for name in names if loading.get(name) is not None}


def read_settings(file: str) -> Settings:
    """The settings in a file of `trl-opsd train`; a `ValueError` if the parser rejects it."""

    def refuse(message: str) -> NoReturn:
        raise ValueError(message)

    parser = OptionParser(prog="trl-opsd train", launch_options=launch_options())
    parser.error = refuse  # type: ignore[method-assign]
    with collected() as warned:
        given = parser.given(["--config", file])
        check_options(given)
        set_loading(given.extra, given.config, given.model)
    return Settings(given, tuple(warned))


@contextmanager
def collected() -> Iterator[list[str]]:
    """Collects the warnings of this package instead of printing them."""
    found: list[str] = []
    logger, handler = logging.getLogger("trl_opsd"), logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    propagates, logger.propagate = logger.propagate, False  # else handlers of the root logger would print them
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates
