"""Looks at the arguments of a trainer together, before a model is loaded; single options are `config.py`'s business."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from torch import nn
from transformers import AutoProcessor, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.integrations import is_fsdp_enabled
from transformers.utils import CONFIG_NAME, cached_file

from trl_opsd._compat.peft import is_peft, without_peft
from trl_opsd._compat.trl import get_config_model_id
from trl_opsd.config import OPSDConfig
from trl_opsd.data.admission import look_ahead
from trl_opsd.data.datasets import AnyDataset, columns_of, describe_rows
from trl_opsd.data.intake import Intake
from trl_opsd.data.prompts import IMAGE_COLUMNS, PromptLimits, check_columns, check_no_images
from trl_opsd.data.shares import check_alike
from trl_opsd.data.teacher_prompts import TeacherPrompts
from trl_opsd.models.backbone import context_of
from trl_opsd.models.head import model_shape
from trl_opsd.models.special_tokens import rows_said, settle_special_tokens
from trl_opsd.teacher.build import check_teachers, check_tokenizers

_PLACE = ("revision", "token", "cache_dir", "subfolder")
"""Options for loading a model that say where it is."""


def checked_args(args: Any, model: Any) -> OPSDConfig:
    """The options, or the defaults with an output folder named after the student.

    Raises:
        TypeError: They are of another class.
    """
    if args is None:
        name = model if isinstance(model, str) else get_config_model_id(model.config)
        return OPSDConfig(f"{name.split('/')[-1]}-OPSD")
    if not isinstance(args, OPSDConfig):
        raise TypeError(
            f"`args` is a {type(args).__name__}: expected a `trl_opsd.OPSDConfig`, which has every field of TRL's "
            "`DistillationConfig`; change the class name."
        )
    return args


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What a trainer was given, checked together; no model is loaded yet."""

    models: dict[str, Any]
    """What each teacher is made of, by name; `None` is the student itself."""
    intake: Intake
    """Reads rows, with the names of these teachers."""
    processing_class: Any
    """A tokenizer, or a processor around one."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Makes token ids of text."""
        return text_tokenizer(self.processing_class)

    @property
    def processor(self) -> ProcessorMixin | None:
        """What is saved beside the student, if it is more than the tokenizer."""
        return self.processing_class if isinstance(self.processing_class, ProcessorMixin) else None


def prepared(
    model: Any,
    teacher_model: Any,
    args: OPSDConfig,
    datasets: Mapping[str, AnyDataset | None],
    processing_class: Any,
    teacher_processing_class: Any,
    teacher_prompt_fn: Callable[[dict[str, Any], str], Any] | None,
    row_columns: Collection[str],
) -> Prepared:
    """Checks everything that can be known before a model is loaded; the arguments are the trainer's.

    Raises:
        ValueError: They do not go together; the message says what to change.
        TypeError: One is of a type that cannot be used here.
    """
    teacher_model = args.teacher_model_name_or_path if teacher_model is None else teacher_model
    check_teachers(teacher_model, model, args)
    models = dict(teacher_model) if isinstance(teacher_model, Mapping) else {"teacher": teacher_model}
    if processing_class is not None:
        check_processing_class(processing_class)
    if teacher_prompt_fn is not None and args.remove_unused_columns:
        raise ValueError("`remove_unused_columns=True` would hide columns from `teacher_prompt_fn`: leave it at False.")
    tells_more = teacher_prompt_fn is not None or bool(args.teacher_template_kwargs)
    several = tuple(models) if len(models) > 1 else ()
    check_datasets(datasets, args, several, needs_privilege=_teaches_itself(model, args) and not tells_more)
    check_models(model, models, args)
    prompts = TeacherPrompts(template=args.teacher_prompt_template, prompt_fn=teacher_prompt_fn)
    intake = Intake(teachers=tuple(models), prompts=prompts)
    for name, dataset in datasets.items():
        if dataset is not None:
            look_ahead(dataset, name, intake)
    if args.world_size > 1:
        check_alike(gather_object([{name: describe_rows(one, row_columns) for name, one in datasets.items()}]))
    if processing_class is None:
        processing_class = loaded_processing_class(model, args)
        check_processing_class(processing_class)
    found = Prepared(models=models, intake=intake, processing_class=processing_class)
    settle_special_tokens(found.tokenizer, rows_said(model, args.model_init_kwargs or {}))
    check_tokenizers(found.tokenizer, models, teacher_processing_class, args)
    return found


def _teaches_itself(student: Any, args: OPSDConfig) -> bool:
    """Whether teacher and student start as one; without the adapter it came with, a student is somebody else."""
    kind = args.teacher_model_kind
    return kind is not None and not (kind == "base" and not isinstance(student, str) and is_peft(student))


def check_models(student: Any, teachers: Mapping[str, Any], args: OPSDConfig) -> None:
    """Refuses models that are not there, or that do not write text token by token, before one is loaded.

    Args:
        student (`Any`):
            A path, a model id or a model.
        teachers (`Mapping[str, Any]`):
            The same by name; `None` for the student itself, and teachers of the user's own are left to themselves.
        args ([`OPSDConfig`]):
            Says how to load them.

    Raises:
        ValueError: A model cannot be found, or is not a causal language model, or the student has a loss of its own, or
            is not in memory.
    """
    config = _check_causal(student, "model", args.model_init_kwargs or {})
    _check_own_loss({**config, **(args.model_init_kwargs or {})})
    check_in_memory(student)
    place = {"revision": args.teacher_model_revision, **(args.teacher_model_init_kwargs or {})}
    for name, teacher in teachers.items():
        _check_causal(teacher, "teacher_model" if len(teachers) == 1 else f"teacher_model[{name!r}]", place)


def check_in_memory(student: Any) -> None:
    """Refuses a student of which a part is on disk or nowhere: what it learns there would be lost.

    Args:
        student (`Any`):
            A model; a path is not loaded yet.

    Raises:
        ValueError: A weight has no values in memory, because of its device map or because none were loaded.
    """
    if not isinstance(student, nn.Module) or is_fsdp_enabled():  # there only the main process may have read it
        return
    for name, parameter in student.named_parameters():
        if parameter.is_meta:
            raise ValueError(
                f"{name!r} of the student is not in memory (its device is 'meta'), so it could not learn: load the "
                "student with `from_pretrained` and without parts on disk or in host memory (`device_map`)."
            )


def _check_own_loss(config: Mapping[str, Any]) -> None:
    """What a model adds to the loss in its own forward, which is not called."""
    weight_of_routers = config.get("router_aux_loss_coef", config.get("aux_loss_coef", 1.0))
    if config.get("output_router_logits") and weight_of_routers != 0:
        option, loss, off = "output_router_logits", "a loss that balances its experts", "False"
    elif config.get("z_loss_coefficient"):
        option, loss, off = "z_loss_coefficient", "a loss of its log-normalisers", "0.0"
    else:
        return
    raise ValueError(
        f"`{option}={config[option]}` asks the student to add {loss} in its own forward, which distillation does not "
        f"call: it would have no effect. Set `{option}` to {off} in the student's config, or in `model_init_kwargs`."
    )


def check_trainable(student: nn.Module) -> None:
    """Refuses a student that bitsandbytes could not train after the first rollout.

    Raises:
        ValueError: It is quantised to 4 bits on a CPU with AVX512-BF16, where the first forward in eval mode stores the
            weights in an order that gradients do not pass.
    """
    on_cpu = next(student.parameters()).device.type == "cpu"
    if on_cpu and any(getattr(layer, "support_avx512bf16_for_cpu", False) for layer in student.modules()):
        raise ValueError(
            "The student is quantised to 4 bits by bitsandbytes and is on a CPU, where it is packed for inference as "
            "soon as it writes, and no gradient passes it afterwards: train it on a GPU, or load it without "
            "`quantization_config`."
        )


def _check_causal(model: Any, called: str, loading: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the config of the language model, as far as it says something; empty for what is no model."""
    if isinstance(model, str):
        place = {name: loading[name] for name in _PLACE if loading.get(name) is not None}
        found, why = None, "There is none."
        try:
            found = cached_file(model, CONFIG_NAME, **place)
        except OSError as error:
            why = str(error).splitlines()[0]
        if found is None:
            raise ValueError(
                f"`{called}={model!r}` is neither a folder with a `{CONFIG_NAME}` nor a model that the Hub hands out: "
                f"correct it, or log in. {why}"
            )
        config = json.loads(Path(found).read_text(encoding="utf-8"))
        causal, kind = not config.get("is_encoder_decoder", False), (config.get("architectures") or ["model"])[0]
    elif isinstance(model, PreTrainedModel) or (isinstance(model, nn.Module) and is_peft(model)):
        inner = without_peft(model)
        causal, kind = inner.can_generate() and not inner.config.is_encoder_decoder, type(inner).__name__
        config = inner.config.to_dict()
    else:
        return {}
    if not causal:
        raise ValueError(
            f"`{called}` is a {kind}, which does not continue a text token by token: pass a causal language model, for "
            "instance one loaded with `AutoModelForCausalLM`."
        )
    return {**config, **(config.get("text_config") or {})}


def loaded_processing_class(student: Any, args: OPSDConfig) -> Any:
    """The tokenizer, or the processor of more than text, from where the student comes from, as TRL loads it."""
    return AutoProcessor.from_pretrained(
        student if isinstance(student, str) else get_config_model_id(student.config),
        revision=(args.model_init_kwargs or {}).get("revision") if isinstance(student, str) else None,
        truncation_side="left",
        padding_side="left",
        trust_remote_code=args.trust_remote_code,
    )


def text_tokenizer(processing_class: Any) -> Any:
    """The tokenizer of a processor of more than text, with the chat template of the processor if it has none.

    Args:
        processing_class (`Any`):
            A [`~transformers.ProcessorMixin`]; anything else is returned as it is.
    """
    if not isinstance(processing_class, ProcessorMixin):
        return processing_class
    tokenizer = getattr(processing_class, "tokenizer", None)
    if isinstance(tokenizer, PreTrainedTokenizerBase) and tokenizer.chat_template is None:
        tokenizer.chat_template = getattr(processing_class, "chat_template", None)
    return tokenizer


def check_processing_class(processing_class: Any) -> None:
    """Refuses what cannot tokenize text for a student.

    Raises:
        TypeError: It is nothing that tokenizes, or a processor without a tokenizer.
        ValueError: It has no end-of-sequence token.
    """
    processing_class, given = text_tokenizer(processing_class), processing_class
    name = type(given).__name__
    if not isinstance(processing_class, PreTrainedTokenizerBase):
        raise TypeError(f"`processing_class` is a {name}: expected a tokenizer, or a processor that has one.")
    if processing_class.eos_token_id is None:
        raise ValueError(
            "The tokenizer has no end-of-sequence token, so no completion could end: set `tokenizer.eos_token`."
        )


def check_datasets(
    datasets: Mapping[str, AnyDataset | None],
    args: OPSDConfig,
    teachers: Collection[str] = (),
    needs_privilege: bool = False,
) -> None:
    """Checks types, columns and sizes; the rows are read later, when there is a tokenizer.

    Args:
        datasets (`Mapping`):
            By the name a message gives them.
        args ([`OPSDConfig`]):
            Says how many rows make a batch.
        teachers (`Collection[str]`, *optional*):
            Names of the teachers, when there are several.
        needs_privilege (`bool`, *optional*, defaults to `False`):
            Whether the columns have to tell the teacher more than the student.

    Raises:
        ValueError: There is nothing to train or evaluate on, or not enough, or a column is missing.
        TypeError: Something is not a dataset.
    """
    if datasets.keys() == {"train_dataset", "eval_dataset"} and not any(one is not None for one in datasets.values()):
        raise ValueError("`train_dataset` is None: pass a dataset with a column 'prompt'.")
    for where, dataset in datasets.items():
        if dataset is None:
            continue
        if not isinstance(dataset, Dataset | IterableDataset):
            raise TypeError(
                f"`{where}` is a {type(dataset).__name__}: expected a `datasets.Dataset` or `IterableDataset`, for "
                "instance `Dataset.from_list(rows)`."
            )
        columns = columns_of(dataset)
        check_columns(columns, where, teachers)
        _check_stored_images(dataset, where)
        if needs_privilege and columns is not None and not {"teacher_prompt", "privileged_context"} & set(columns):
            raise ValueError(
                f"The student teaches itself (`teacher_model_kind={args.teacher_model_kind!r}`), but {where} tells the "
                f"teacher nothing that the student does not see; it has only {columns}. Add a column "
                "'privileged_context' or 'teacher_prompt', or pass `teacher_prompt_fn`."
            )
        if where == "train_dataset":
            check_train_size(dataset, args)
        elif isinstance(dataset, Dataset) and len(dataset) == 0:
            raise ValueError(f"`{where}` has no rows: add some, or leave it out.")


def _check_stored_images(dataset: AnyDataset, where: str) -> None:
    """A stream cannot be read ahead: its rows are looked at when they are used."""
    if isinstance(dataset, IterableDataset):
        return
    stored = dataset.with_format("arrow")  # nothing is decoded
    for name in IMAGE_COLUMNS:
        if name in stored.column_names:
            for table in stored.select_columns([name]).iter(batch_size=100):
                check_no_images({name: table.column(name).to_pylist()}, where)


def check_train_size(dataset: AnyDataset, args: OPSDConfig) -> None:
    """Checks that a dataset fills one generation batch; a stream is as long as it is, and has to be told when to end.

    Raises:
        ValueError: It does not, so that training would end after 0 steps; or nobody says when a stream ends.
    """
    if isinstance(dataset, IterableDataset) and args.max_steps <= 0:
        raise ValueError(
            f"`max_steps={args.max_steps}`: `train_dataset` is a stream, whose length is not known: set `max_steps` to "
            "the number of optimizer steps."
        )
    rows, processes, steps = args.per_device_train_batch_size, args.world_size, args.gradient_accumulation_steps
    needed = rows * processes * steps
    if isinstance(dataset, Dataset) and len(dataset) < needed:
        raise ValueError(
            f"train_dataset has {len(dataset)} rows, but one generation batch takes {needed} = {rows} per device x "
            f"{processes} processes x {steps} accumulation steps, and rows that do not fill one are dropped, so there "
            "would be 0 steps: add rows, or lower one of those numbers."
        )


def student_limits(student: Any, args: OPSDConfig) -> PromptLimits:
    """What the student's prompts and completions keep to.

    Raises:
        ValueError: Its context has no room for a completion.
    """
    context = context_of(student)
    if args.use_vllm and args.vllm_max_model_length is not None:
        context = min(args.vllm_max_model_length, context or args.vllm_max_model_length)
    limits = PromptLimits(vocabulary=model_shape(student)[0], context=context, completion=args.max_completion_length)
    limits.check_room("the student")
    return limits
