"""Students, teachers and tokenizers that are missing, of the wrong kind, or incompatible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from cases import Case, Lab, MustNotLoad, untouched
from peft import LoraConfig, get_peft_model
from support import tiny
from tokenizers import Tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from trl import DistillationConfig

from trl_opsd import FrozenTeacher
from trl_opsd.teacher.frozen import Resident

ROLES = ("model", "teacher_model")


# ---- Whether it can write text --------------------------------------------------------------------------------------


def encoder_decoder() -> PreTrainedModel:
    sizes = {"vocab_size": tiny.VOCABULARY, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))


def masked_language_model() -> PreTrainedModel:
    sizes = {"vocab_size": tiny.VOCABULARY, "hidden_size": 32, "intermediate_size": 64}
    return transformers.BertForMaskedLM(
        transformers.BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=256)
    )


def not_causal(role: str, kind: str, made: Callable[[], Any]) -> Case:
    """This model is an object, the other one a path."""
    return Case(
        "not causal",
        f"{role}, a {kind}",
        f"`{role}` is a {kind}, which does not generate text",
        lambda lab: lab.make(**{role: made()}),
        before_loading=True,
    )


def not_causal_at_a_path(role: str) -> Case:
    def provoke(lab: Lab) -> None:
        encoder_decoder().save_pretrained(lab.folder / "t5")
        lab.make(**{role: str(lab.folder / "t5")})

    message = f"`{role}` is a T5ForConditionalGeneration"
    return Case("not causal", f"{role}, a path", message, provoke, before_loading=True)


# ---- Whether it goes with the other ---------------------------------------------------------------------------------


def same_object(lab: Lab) -> None:
    both = tiny.qwen2()
    lab.make(model=both, teacher_model=both)


def same_object_among_several(lab: Lab) -> None:
    both = MustNotLoad()
    lab.make(model=both, teacher_model={"other": "teacher", "same": both})


def shared_weights(lab: Lab) -> None:
    student, teacher = tiny.qwen2(32, 0), tiny.qwen2(32, 1)
    teacher.model.embed_tokens.weight = student.model.embed_tokens.weight
    lab.make(model=student, teacher_model=teacher)


def shared_memory(lab: Lab) -> None:
    student, teacher = tiny.qwen2(32, 0), tiny.qwen2(32, 1)
    teacher.model.norm.weight.data = student.model.norm.weight.data
    lab.make(model=student, teacher_model=teacher)


def the_model_under_its_adapter(lab: Lab) -> None:
    base = tiny.qwen2()
    lab.make(model=get_peft_model(base, LoraConfig(target_modules=["q_proj"])), teacher_model=base)


def inside_a_teacher(lab: Lab) -> None:
    student = tiny.qwen2()
    lab.make(model=student, teacher_model=FrozenTeacher(Resident(student, torch.device("cpu"))))


def unlike_its_config(role: str, called: str) -> Case:
    def provoke(lab: Lab) -> None:
        models = {"model": tiny.qwen2(32, 0), "teacher_model": tiny.qwen2(48, 1)}
        models[role].lm_head = torch.nn.Linear(models[role].config.hidden_size, 280, bias=False)
        lab.make(**models)

    message = rf"head of the {called} \(Qwen2ForCausalLM\) has 280 rows, .* vocab_size=259"
    return Case("head rows unlike the config", called, message, provoke)


def lacking(role: str, where: str = "", **options: Any) -> Case:
    """A checkpoint without the second layer's feed-forward part, or with a narrower one of another model."""

    def provoke(lab: Lab) -> None:
        made, narrow = tiny.qwen2(48, 1, tie_word_embeddings=True), where.startswith("of another shape")
        made.save_pretrained(lab.folder / "torn", state_dict={
            name: value[:8] if narrow and "layers.1.mlp.up" in name else value
            for name, value in made.state_dict().items()
            if narrow or not name.startswith("model.layers.1.mlp.")
        })  # fmt: skip
        tiny.tokenizer().save_pretrained(lab.folder / "torn")
        lab.make(**{role: str(lab.folder / "torn"), **options})

    weights = r"model\.layers\.1\.mlp\." + (
        r"up_proj\.weight \[8, 48\] instead of \[96, 48\]\. They"
        if where
        else r"down_proj\.weight, .*gate.*, .*up_proj\.weight\. They"
    )
    return Case(
        "weights missing",
        f"{role} {where} {sorted(options)}",
        rf"`{role}='.*torn'`: the checkpoint lacks .*: {weights}",
        provoke,
    )


def damaged(role: str) -> Case:
    def provoke(lab: Lab) -> object:
        tiny.qwen2().save_pretrained(lab.folder / "cut")
        tiny.tokenizer().save_pretrained(lab.folder / "cut")
        file = lab.folder / "cut" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        return lab.make(**{role: str(lab.folder / "cut")})

    return Case("weights missing", f"{role}, cut off", rf"`{role}='.*cut'`: a file of its weights is damaged", provoke)


def permuted() -> PreTrainedTokenizerFast:
    """The same tokens, with the ids of two exchanged."""
    words = tiny.tokenizer()
    described = words.backend_tokenizer.to_str().replace('"!":3,', '"!":4,').replace('"\\"":4', '"\\"":3')
    words._tokenizer = Tokenizer.from_str(described)
    return words


def extended() -> PreTrainedTokenizerFast:
    words = tiny.tokenizer()
    words.add_tokens(["extra", "more", "and", "another"])
    return words


def permuted_beside_the_teacher(lab: Lab) -> None:
    permuted().save_pretrained(lab.folder / "teacher")
    tiny.qwen2(48, 1).config.save_pretrained(lab.folder / "teacher")
    lab.make(teacher_model=str(lab.folder / "teacher"))


def loaded_from(path: str) -> PreTrainedModel:
    teacher = tiny.qwen2(48, 1)
    teacher.config._name_or_path = path  # as `from_pretrained` leaves it
    return teacher


def permuted_where_the_teacher_was_loaded_from(form: Callable[[PreTrainedModel], Any]) -> Callable[[Lab], None]:
    def provoke(lab: Lab) -> None:
        permuted().save_pretrained(lab.folder / "teacher")
        lab.make(teacher_model=form(loaded_from(str(lab.folder / "teacher"))))

    return provoke


def without(*names: str) -> PreTrainedTokenizerFast:
    """A tokenizer that lacks some of its special tokens."""
    words = tiny.tokenizer()
    for name in names:
        setattr(words, name, None)
    return words


def no_end_token_beside_the_student(lab: Lab) -> None:
    tiny.qwen2().save_pretrained(lab.folder / "student")
    without("eos_token").save_pretrained(lab.folder / "student")
    lab.make(model=str(lab.folder / "student"), processing_class=None)


def no_tokenizer_beside_the_student(made: Callable[[], PreTrainedModel]) -> Callable[[Lab], None]:
    def provoke(lab: Lab) -> None:
        made().save_pretrained(lab.folder / "student")
        lab.make(model=str(lab.folder / "student"), processing_class=None)

    return provoke


NO_TEACHER = r"There is no teacher: .* for self-distillation, `teacher_model_kind='base'`"
NO_END = r"The tokenizer \(.*\) has no end-of-sequence token, .*: save the model's tokenizer in its folder"

MISSING = [
    untouched("teacher missing", "none", NO_TEACHER, teacher_model=None),
    Case(
        "teacher missing",
        "none, and a path for the student",
        NO_TEACHER,
        lambda lab: lab.make(teacher_model=None),
        before_loading=True,
    ),
]

UNFIT = [
    *(
        not_causal(role, kind, made)
        for role in ROLES
        for kind, made in {
            "Qwen2Model": lambda: tiny.qwen2(48, 1).model,
            "T5ForConditionalGeneration": encoder_decoder,
            "BertForMaskedLM": masked_language_model,
        }.items()
    ),
    *(not_causal_at_a_path(role) for role in ROLES),
    Case("same object as the student", "the teacher", "shares parameters with the student", same_object),
    Case(
        "same object as the student",
        "one of several teachers",
        r"`teacher_model\['same'\]` shares parameters with the student",
        same_object_among_several,
        before_loading=True,
    ),
    *(
        Case("same object as the student", name, "`teacher_model` shares parameters with the student", provoke)
        for name, provoke in {
            "a part of it": shared_weights,
            "a part of its memory": shared_memory,
            "the model under its adapter": the_model_under_its_adapter,
            "a teacher made of it": inside_a_teacher,
        }.items()
    ),
    Case(
        "vocabulary mismatch",
        "a smaller head",
        r"The head of the teacher has 200 rows, but the tokenizer has 259 tokens",
        lambda lab: lab.make(teacher_model=tiny.qwen2(48, 1, vocab_size=200)),
    ),
    Case(
        "tokenizer mismatch",
        "two ids exchanged",
        "differ in 2 ids: id 3 is '\"' for the teacher and '!' for the student; id 4 is '!' for the teacher",
        lambda lab: lab.make(teacher_processing_class=permuted()),
        before_loading=True,
    ),
    Case(
        "tokenizer mismatch",
        "the one beside the teacher",
        r"id 3 is .* The loss compares distributions id by id",
        permuted_beside_the_teacher,
        before_loading=True,
    ),
    Case(
        "tokenizer mismatch",
        "tokens the student's lacks",
        "id 259 is 'extra' for the teacher and None for the student",
        lambda lab: lab.make(teacher_processing_class=extended()),
        before_loading=True,
    ),
    *(
        Case(
            "tokenizer mismatch",
            f"the one in the folder of {name}",
            r"id 3 is .* The teacher's was loaded from .*teacher: .* pass it as `teacher_processing_class`",
            permuted_where_the_teacher_was_loaded_from(form),
        )
        for name, form in {
            "a teacher that is an object": lambda teacher: teacher,
            "one with an adapter": lambda teacher: get_peft_model(teacher, LoraConfig(target_modules=["q_proj"])),
            "one in a `FrozenTeacher`": lambda teacher: FrozenTeacher(Resident(teacher, torch.device("cpu"))),
        }.items()
    ),
    *(lacking(role) for role in ROLES),
    *(damaged(role) for role in ROLES),
    lacking("model", peft_config=LoraConfig(target_modules=["q_proj"])),
    lacking("teacher_model", teacher_offload="stream"),
    lacking("model", "of another shape"),
    lacking("teacher_model", "of another shape", teacher_model_init_kwargs={"ignore_mismatched_sizes": True}),
    *(unlike_its_config(role, called) for role, called in zip(ROLES, ("student", "teacher"), strict=True)),
    Case(
        "token ids beyond the embedding",
        "of both models",
        "but the models have 200 ids",
        lambda lab: lab.make(model=tiny.qwen2(vocab_size=200), teacher_model=tiny.qwen2(48, 1, vocab_size=200)),
    ),
]

TOKENIZERS = [
    Case(
        "no eos and no pad",
        "no eos",
        NO_END,
        lambda lab: lab.make(processing_class=without("eos_token")),
        before_loading=True,
    ),
    Case(
        "no eos and no pad",
        "neither",
        NO_END,
        lambda lab: lab.make(processing_class=without("eos_token", "pad_token")),
        before_loading=True,
    ),
    *(
        Case(
            "no tokenizer",
            made.__name__,
            NO_END,
            no_tokenizer_beside_the_student(made),
        )
        for made in (tiny.qwen2, tiny.gemma2, tiny.gpt2)
    ),
    Case("no eos and no pad", "no eos beside the student", NO_END, no_end_token_beside_the_student),
]

OTHERS = [
    untouched(
        "at least",
        "an empty name for a teacher",
        "`teacher_model` has an empty name: expected",
        teacher_model={"one": "teacher", "": "teacher"},
    ),
    untouched(
        "at least",
        "TRL's options",
        "expected a `trl_opsd.OPSDConfig`",
        TypeError,
        args=DistillationConfig("out", use_cpu=True),
    ),
    untouched(
        "at least",
        "a function for a rollout",
        "`rollout` is a function: expected",
        TypeError,
        rollout=lambda prompt_ids: prompt_ids,
    ),
]

CASES: list[Case] = [*MISSING, *UNFIT, *TOKENIZERS, *OTHERS]
