"""Trainings whose result must not depend on the number of processes."""

from __future__ import annotations

import atexit
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from datasets import IterableDataset
from iw_opd import WeighedAhead
from peft import LoraConfig, get_peft_model
from support import fsdp_on_cpu, tiny, vision_language
from support.byte_languages import byte_pairs
from support.failing_server import Pretended, Scoring, pretended
from support.rollouts import Apart
from support.vision_language import answer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, TrOCRConfig
from visits import SkipNear

from trl_opsd import OPSDTrainer, RolloutBackend
from trl_opsd._compat.deepspeed import loading
from trl_opsd._compat.sharding import trained_parameters, whole
from trl_opsd.rollout.host import Host

Trainer = TypeVar("Trainer", bound=OPSDTrainer)

LORA = {"r": 4, "target_modules": "all-linear"}
LAYERS = {"r": 4, "target_modules": r".*language_model.*(q_proj|up_proj)"}
IMAGES = (1, 0, 1, 2, 0, 1, 0, 1)
"""Images of each row: of two processes, one may have some in a pass and the other none; each step of four rows has
some, as AdamW leaves weights without a gradient alone, but moves on where it is zero."""
REMEDIES = {"contrast_weight": 0.5, "contrast_clip": 10.0, "extrapolation": 1.25, "anchor_weight": 0.3}
REMEDIES |= {"methods": [WeighedAhead]}
SKIPPED = {"methods": [partial(SkipNear, 2.3)], "max_steps": 6}
"""Of eight prompts, some; two steps are an epoch."""
EXPERTS = ("math", "code")
"""Names of several teachers."""
HEAD_TOO = {**LORA, "modules_to_save": ["lm_head"]}

ALONE: dict[str, dict[str, Any]] = {
    "full": {},
    "full, tied head": {"family": "gemma2"},
    "full, read unpadded": {"family": "trocr", "rows": 4},
    "full, teacher in bfloat16": {"teacher_model_init_kwargs": {"dtype": "bfloat16"}},
    "full, own base": {"teacher_model_kind": "base"},
    "full, own live": {"teacher_model_kind": "live"},
    "full, own ema": {"teacher_model_kind": "ema"},
    "full, tied head, own ema": {"family": "gemma2", "teacher_model_kind": "ema"},
    "full, least certain tokens": {"token_selection": "student_entropy", "token_fraction": 0.5},
    "lora": {"lora": LORA},
    "lora, random tokens": {"lora": LORA, "token_selection": "random", "token_fraction": 0.5},
    "lora, read unpadded": {"family": "trocr", "rows": 4, "lora": LORA},
    "lora, own base": {"lora": LORA, "teacher_model_kind": "base"},
    "lora, own live": {"lora": LORA, "teacher_model_kind": "live"},
    "lora, own ema": {"lora": LORA, "teacher_model_kind": "ema"},
    "lora and head": {"lora": HEAD_TOO},
    "lora and head, own base": {"lora": HEAD_TOO, "teacher_model_kind": "base"},
    "full, remedies": REMEDIES,
    "lora, remedies": {"lora": LORA, **REMEDIES},
    "lora, remedies, own base": {"lora": LORA, "teacher_model_kind": "base", **REMEDIES},
    "full, bytes": {"family": "bytes", "cross_tokenizer": "bytes"},
    "lora, bytes": {"family": "bytes", "cross_tokenizer": "bytes", "lora": LORA},
    "full, skipped": SKIPPED,
    "lora, skipped": {"lora": LORA, **SKIPPED},
    "full, experts": {"family": "experts", "merged": True},
    "lora, experts": {"family": "experts", "merged": True, "lora": LORA},
    "full, images": {"family": "qwen2_5_vl"},
    "full, images of a stream": {"family": "qwen2_5_vl", "streams": True, "shuffle_dataset": False},
    "full, some tokens": {"tells": "both_top_k"},
    "lora, some tokens": {"lora": LORA, "tells": "student_top_k"},
    "full, several": {"several": True},
    "lora, several": {"several": True, "lora": LORA},
    "lora, images, own base": {"family": "qwen2_5_vl", "lora": LAYERS, "teacher_model_kind": "base"},
    "full, some by the teacher": {"lmbda": 0.5, "seq_kd": True, "top_k": 1},
}
"""Variants trained in one process, as the reference for all others."""

EXACT = {"full, teacher in bfloat16": "full"}
"""Variants that compute in half precision, and their float32 counterparts."""

COMPILED = {"torch_compile": True, "torch_compile_backend": "eager", "gradient_checkpointing": True}
BUDGET = {"rows": 4, "max_tokens_per_microbatch": 12}
AS_ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "full, packed": ("full", {"rows": 4, "padding_free": True}),
    "full, budget": ("full", BUDGET),
    "lora, packed to a budget": ("lora", {**BUDGET, "lora": LORA, "padding_free": True}),
    "full, own ema, overlap": ("full, own ema", {"teacher_model_kind": "ema", "overlap": "step"}),
    "lora, overlap, budget": ("lora", {**BUDGET, "lora": LORA, "overlap": "step"}),
    "full, ahead": ("full", {"overlap": "ahead"}),
    # adapters of the student's base, for the same merged into it
    "full, adapters": ("full, experts", {"family": "experts"}),
    "lora, adapters": ("lora, experts", {"family": "experts", "lora": LORA}),
    "lora, adapters, stream": ("lora, experts", {"family": "experts", "lora": LORA, "teacher_offload": "stream"}),
    "full, compiled": ("full", {**COMPILED, "teacher_offload": "stream"}),
    "lora, compiled": ("lora, own base", {**COMPILED, "lora": LORA, "teacher_model_kind": "base"}),
    "full, served": ("full", {"served": True}),
    "lora, served": ("lora", {"lora": LORA, "served": True}),
}
"""Variants whose rows are read in other groups or beside others, or whose teacher is elsewhere: which of `ALONE` each
must equal, and its options."""

IN_ZERO3 = (
    *("full", "full, tied head", "full, read unpadded", "full, teacher in bfloat16", "full, own base"),
    *("full, images", "full, bytes", "full, several", "lora, several", "lora", "lora, remedies", "full, skipped"),
)
"""Those of `ALONE` whose teacher is also sharded by ZeRO-3."""

_SERVERS = ExitStack()
"""Servers in this process, closed at its exit: later, each would wait for a thread that is gone."""
atexit.register(_SERVERS.close)


SHORT = {
    "ddp": (
        "full",
        "full, tied head, own ema",
        "full, read unpadded",
        "full, least certain tokens",
        "lora, own base",
        "lora, own ema",
        "lora and head",
        "lora, packed to a budget",
        "lora, compiled",
        "lora, overlap, budget",
        "full, ahead",
        "lora, served",
        "full, stream",
        "lora, bytes",
        "lora, images, own base",
        "lora, remedies, own base",
        "full, skipped",
    ),
    "zero3": (
        "full",
        "full, tied head, own ema",
        "lora, own ema",
        "full, zero3",
        "full, zero3, overlap",
        "full, teacher in bfloat16, zero3",
        "full, images, zero3",
        "full, bytes, zero3",
        "lora, remedies, zero3",
        "full, skipped, zero3",
    ),
}
"""Variants of the short run: every option of all of them, though not every pair of two."""


def of(strategy: str, every: bool = True) -> dict[str, tuple[str, dict[str, Any]]]:
    """The variants of a strategy, all or those of the short run: which of `ALONE` each must equal, and its options."""
    placed = {f"{name}, {where}": (name, where) for where in ("cpu", "stream") for name in ("full", "lora")}
    variants = {name: (name, made_of) for name, made_of in ALONE.items()} | AS_ALONE
    if strategy == "zero3":
        variants = {name: one for name, one in variants.items() if "torch_compile" not in one[1]}  # it refuses them
        placed |= {f"{name}, zero3": (name, "zero3") for name in IN_ZERO3}
        for name in ("full", "full, several"):
            made_of = {**ALONE[name], "teacher_offload": "zero3", "overlap": "step"}
            variants[f"{name}, zero3, overlap"] = (name, made_of)
    variants |= {name: (same, {**ALONE[same], "teacher_offload": where}) for name, (same, where) in placed.items()}
    return variants if every else {name: variants[name] for name in SHORT[strategy]}


def half(strategy: str) -> tuple[str, ...]:
    """The variants that are also trained with `bf16=True`."""
    return ("full", "lora", "lora, own ema", *(("full, zero3",) if strategy == "zero3" else ()))


def save_models(folder: Path) -> None:
    """Saves students and teachers, which every process loads as users do."""
    models = {
        "qwen2": (tiny.qwen2(32, seed=0), tiny.qwen2(48, seed=1)),
        "bytes": (tiny.qwen2(32, seed=0), tiny.qwen2(48, seed=1, vocab_size=len(pairs := byte_pairs(60)))),
        "gemma2": (tiny.gemma2(32), tiny.gemma2(48, 1)),
        "trocr": (trocr(32), trocr(48, 1)),
        "qwen2_5_vl": [vision_language.model("qwen2_5_vl", 32, seed, sees=True) for seed in (0, 1)],
    }
    for name, (student, teacher) in models.items():
        student.save_pretrained(folder / name / "student")
        teacher.save_pretrained(folder / name / "teacher")
    pairs.save_pretrained(folder / "bytes" / "teacher")
    _save_experts(folder / "experts")


def _save_experts(folder: Path) -> None:
    """Two adapters of a student, one with a head of its own, and what they make of it."""
    tiny.qwen2(32, seed=0).save_pretrained(folder / "student")
    for seed, name in enumerate(EXPERTS):
        base = AutoModelForCausalLM.from_pretrained(folder / "student")
        expert = get_peft_model(base, LoraConfig(**(HEAD_TOO if seed else LORA)))
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in expert.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter) * parameter.requires_grad)
        expert.save_pretrained(folder / name)
        expert.merge_and_unload().save_pretrained(folder / f"{name}-merged")


def trocr(width: int, seed: int = 0) -> nn.Module:
    """Counts padding as positions, so that only rows of one length share a forward pass."""
    config = TrOCRConfig(
        vocab_size=tiny.VOCABULARY,
        d_model=width,
        decoder_layers=2,
        decoder_attention_heads=2,
        decoder_ffn_dim=2 * width,
        max_position_embeddings=256,
        dropout=0.0,
        cross_attention_hidden_size=width,
        tie_word_embeddings=False,
    )
    return tiny.model(config, seed)


class Recorded(Apart):
    """Replays one completion of each length, the first of them empty, in an order of its own in each process; counts
    the empty ones.
    """

    def __init__(self) -> None:
        words = tiny.tokenizer()
        answers = tiny.recorded(words)
        super().__init__({**answers, next(iter(answers)): []})
        self.empty = 0

    def bind(self, trainer: Host) -> None:
        self.order = trainer.accelerator.process_index

    def complete(self, prompt_ids: list[list[int]], step: int) -> list[list[int]]:
        others = [[] if sum(ids) % 4 == 0 else answer(ids) for ids in prompt_ids]  # of prompts with images
        completions = [
            list(self._completions.get(tuple(ids), one)) for ids, one in zip(prompt_ids, others, strict=True)
        ]
        self.empty += sum(not ids for ids in completions)
        return completions


def build(
    folder: Path,
    made_of: dict[str, Any],
    processes: int,
    rollout: RolloutBackend | None = None,
    trainer_class: type[Trainer] = OPSDTrainer,
    **options: Any,
) -> Trainer:
    """A trainer of one variant: four rows per optimizer step, two or `rows` at once, for any number of processes."""
    options = {"teacher_update_rate": 0.5, **made_of, **options}
    family, lora = options.pop("family", "qwen2"), options.pop("lora", None)
    models, sees = folder / family, family in vision_language.SEEING
    together = options.pop("rows", 2)
    options.setdefault("gradient_accumulation_steps", 4 // together)
    if options.pop("served", False):
        options["teacher_server_url"] = _server(models / "teacher")
    if told := options.pop("tells", None):
        url = _server(models / "teacher", Scoring)
        options |= {"teacher_server_url": url, "teacher_server_targets": told, "teacher_server_top_k": 8}
    teacher: Any = str(models / "teacher")
    own, rows = "teacher_model_kind" in options, vision_language.rows(IMAGES) if sees else tiny.rows()
    rows = rows.select(options.pop("rows_read", range(len(rows))))
    if options.pop("streams", False):  # whose features do not tell which rows have images
        rows = IterableDataset.from_generator(partial(iter, rows), features=rows.features)
    are_merged = options.pop("merged", False)
    if family == "experts":
        teacher = {name: str(models / (f"{name}-merged" if are_merged else name)) for name in EXPERTS}
        rows = rows.add_column("teacher", [*EXPERTS, *reversed(EXPERTS)] * 2)
    if "contrast_weight" in options:
        rows = rows.add_column("contrast_context", [f"another {number}" for number in range(len(rows))])
    if own:
        rows = rows.add_column("privileged_context", [f"hint {number}" for number in range(len(rows))])
    if options.pop("several", False):  # of which a process may have no row
        rows = rows.add_column("teacher", ["a", "a", "a", "b"] * 2)
        teacher = {"a": teacher, "b": str(folder / "gemma2" / "teacher")}
    methods = [method() for method in options.pop("methods", ())]
    args = tiny.config(folder / "out", per_device_train_batch_size=together // processes, **options)
    fsdp_on_cpu.allow()
    return trainer_class(
        model=str(models / "student"),
        teacher_model=None if own else teacher,
        args=args,
        methods=methods,
        train_dataset=rows,
        processing_class=vision_language.processor(family) if sees else tiny.tokenizer(),
        peft_config=None if lora is None else LoraConfig(**lora),
        rollout=rollout or Recorded(),
    )


@cache
def _server(teacher: Path, kind: type[Pretended] = Pretended) -> str:
    """The address of a server of this teacher, for this process alone."""
    with loading(None):  # whole, though the launch splits what is loaded
        model = AutoModelForCausalLM.from_pretrained(teacher)
    return _SERVERS.enter_context(pretended(model, kind=kind)).url


def weights(trainer: OPSDTrainer) -> dict[str, Tensor]:
    """Every parameter of the student, gathered in every process; frozen ones too."""
    parameters = trained_parameters(trainer.accelerator.unwrap_model(trainer.model))
    return {name: whole(parameter).clone() for name, parameter in parameters.items()}


def arrays(trainer: OPSDTrainer) -> dict[str, Any]:
    """The same for other processes."""
    return {name: tensor.numpy() for name, tensor in weights(trainer).items()}


def largest_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference over all parameters; both must have the same names."""
    assert set(one) == set(other)
    return max(float(abs(one[name] - other[name]).max()) for name in one)
