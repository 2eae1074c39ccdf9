"""Students, teachers, tokenizers and optimizers that are missing, of the wrong kind, or incompatible."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from support import tiny
from support.byte_languages import byte_pairs
from tokenizers import Tokenizer, normalizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import DistillationConfig

from trl_opsd import FrozenTeacher, OPSDConfig, OPSDTrainer
from trl_opsd.teacher.frozen import Resident

pytestmark = pytest.mark.refusal
ROLES = ("model", "teacher_model")


class MustNotLoad(torch.nn.Module):
    """Fails on any use, which would mean a model was loaded too early."""

    def __init__(self) -> None:
        """Has no parts."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the model was touched ({name}) before the arguments were checked")


UNTOUCHED: list[tuple[str, dict[str, Any], type[Exception]]] = [
    ("`model` is a type", {"model": AutoModelForCausalLM}, TypeError),
    ("`model` is a NoneType", {"model": None, "args": OPSDConfig("out", use_cpu=True)}, TypeError),
    ("`model` is a PosixPath", {"model": Path("student")}, TypeError),
    ("`args` is a type", {"args": OPSDConfig}, TypeError),
    ("`args` is a Dataset", {"args": tiny.rows()}, TypeError),
    ("OPSDConfig", {"args": DistillationConfig("out", use_cpu=True)}, TypeError),
    ("output_dir", {"args": OPSDConfig(f"{__file__}/out")}, ValueError),
    ("output_dir", {"args": OPSDConfig("/proc/out")}, ValueError),
    ("teacher_model_name_or_path", {"teacher_model_name_or_path": "other"}, ValueError),
    ("no teacher", {"teacher_model": None}, ValueError),
    ("`teacher_model` has an empty name", {"teacher_model": {"one": "teacher", "": "teacher"}}, ValueError),
    ("one generation batch needs 2", {"train_dataset": tiny.rows(1)}, ValueError),
]


@pytest.mark.quick
@pytest.mark.before_loading
@pytest.mark.parametrize(("named", "given", "error"), UNTOUCHED)
def test_arguments_are_refused_before_a_model_is_touched(refuses, named, given, error):
    refuses(named, {"model": MustNotLoad(), "teacher_model": "teacher", **given}, error)


# ---- Whether it can write text --------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.before_loading
@pytest.mark.parametrize("role", ROLES)
def test_a_model_that_is_not_causal_is_refused(refuses, tmp_path, role):
    sizes = {"vocab_size": tiny.VOCABULARY, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
    sizes = {"vocab_size": tiny.VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
    for made in (tiny.qwen2(48, 1).model, t5, bert):
        refuses(f"`{role}` is a {type(made).__name__}", {role: made})
    t5.save_pretrained(tmp_path / "t5")
    refuses(f"`{role}` is a T5", {role: str(tmp_path / "t5")})


# ---- Whether it goes with the other ---------------------------------------------------------------------------------


def sharing(way: str) -> dict[str, Any]:
    """A student and a teacher that share weights."""
    student, teacher = tiny.qwen2(32, 0), tiny.qwen2(32, 1)
    if way == "a part":
        teacher.model.embed_tokens.weight = student.model.embed_tokens.weight
    elif way == "memory":
        teacher.model.norm.weight.data = student.model.norm.weight.data
    elif way == "an adapter":
        student, teacher = get_peft_model(teacher, LoraConfig(target_modules=["q_proj"])), teacher
    else:
        ways = {"the object": student, "one of several": {"other": tiny.qwen2(48, 1), "same": student}}
        teacher = ways[way] if way in ways else FrozenTeacher(Resident(student, torch.device("cpu")))
    return {"model": student, "teacher_model": teacher}


def of_another_head(role: str) -> dict[str, Any]:
    models = {"model": tiny.qwen2(32, 0), "teacher_model": tiny.qwen2(48, 1)}
    models[role].lm_head = torch.nn.Linear(models[role].config.hidden_size, 280, bias=False)
    return models


def of_few_tokens(student: int) -> dict[str, Any]:
    return {"model": tiny.qwen2(vocab_size=student), "teacher_model": tiny.qwen2(48, 1, vocab_size=200)}


@pytest.mark.parametrize(
    ("named", "make", "given"),
    [
        *(("shares parameters", sharing, way) for way in ("the object", "a part", "memory", "an adapter", "a teacher")),
        (r"`teacher_model\['same'\]`", sharing, "one of several"),
        *(("280 rows", of_another_head, role) for role in ROLES),
        *(("200 (rows|ids)", of_few_tokens, student) for student in (tiny.VOCABULARY, 200)),
    ],
)
def test_models_that_do_not_go_together_are_refused(refuses, named, make, given):
    refuses(named, make(given))


def torn(folder: Path, narrow: bool) -> str:
    """A checkpoint without the second layer's feed-forward part, or with a narrower one of another model."""
    made = tiny.qwen2(48, 1, tie_word_embeddings=True)
    made.save_pretrained(folder / "torn", state_dict={
        name: value[:8] if narrow and "layers.1.mlp.up" in name else value
        for name, value in made.state_dict().items()
        if narrow or not name.startswith("model.layers.1.mlp.")
    })  # fmt: skip
    tiny.tokenizer().save_pretrained(folder / "torn")
    return str(folder / "torn")


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(
    ("role", "options"),
    [
        ("model", {}),
        ("model", {"peft_config": LoraConfig(target_modules=["q_proj"])}),
        ("teacher_model", {}),
        ("teacher_model", {"teacher_offload": "stream"}),
        ("teacher_model", {"teacher_model_init_kwargs": {"ignore_mismatched_sizes": True}}),
    ],
)
def test_a_checkpoint_that_lacks_weights_is_refused(refuses, tmp_path, role, options, narrow):
    named = r"up_proj\.weight \[8, 48\] instead of \[96, 48\]" if narrow else r"down_proj\.weight, .*up_proj\.weight"
    refuses(rf"`{role}=.*{named}", {role: torn(tmp_path, narrow), **options})


@pytest.mark.parametrize("role", ROLES)
def test_a_checkpoint_that_is_cut_off_is_refused(refuses, tmp_path, role):
    tiny.save_pair(tmp_path)
    file = tmp_path / "student" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refuses(f"`{role}=", {role: str(tmp_path / "student")})


# ---- Tokenizers ------------------------------------------------------------------------------------------------------


def permuted() -> PreTrainedTokenizerFast:
    """The same tokens, with the ids of two exchanged."""
    words = tiny.tokenizer()
    described = words.backend_tokenizer.to_str().replace('"!":3,', '"!":4,').replace('"\\"":4', '"\\"":3')
    words._tokenizer = Tokenizer.from_str(described)
    return words


def extended() -> PreTrainedTokenizerFast:
    words = tiny.tokenizer()
    words.add_tokens(["extra"])
    return words


def lowercasing() -> Any:
    words = byte_pairs(40)
    words.backend_tokenizer.normalizer = normalizers.Lowercase()
    return words


def without(*names: str) -> PreTrainedTokenizerFast:
    """A tokenizer that lacks some of its special tokens."""
    words = tiny.tokenizer()
    for name in names:
        setattr(words, name, None)
    return words


@pytest.mark.quick
@pytest.mark.before_loading
@pytest.mark.parametrize(
    ("named", "given"),
    [
        ("id 3 is", {"teacher_processing_class": permuted()}),
        ("id 259 is", {"teacher_processing_class": extended()}),
        ("docs/tokenizers.md", {"teacher_processing_class": byte_pairs(40)}),
        ("hello, world", {"teacher_processing_class": lowercasing(), "cross_tokenizer": "bytes"}),
        ("teacher_processing_class", {"cross_tokenizer": "bytes"}),
        ("end-of-sequence", {"processing_class": without("eos_token")}),
        ("end-of-sequence", {"processing_class": without("eos_token", "pad_token")}),
    ],
)
def test_a_tokenizer_is_refused_before_loading(refuses, named, given):
    refuses(named, given)


@pytest.mark.parametrize(
    "form",
    [
        lambda teacher: teacher.config._name_or_path,
        lambda teacher: teacher,
        lambda teacher: get_peft_model(teacher, LoraConfig(target_modules=["q_proj"])),
        lambda teacher: FrozenTeacher(Resident(teacher, torch.device("cpu"))),
    ],
    ids=["a path", "an object", "with an adapter", "a teacher"],
)
def test_the_tokenizer_where_a_teacher_comes_from_is_compared(refuses, tmp_path, form):
    permuted().save_pretrained(tmp_path / "teacher")
    teacher = tiny.qwen2(48, 1)
    teacher.save_pretrained(tmp_path / "teacher")
    teacher.config._name_or_path = str(tmp_path / "teacher")  # as `from_pretrained` leaves it
    refuses("id 3 is", {"teacher_model": form(teacher)})


@pytest.mark.parametrize("has_one", [False, True])
def test_a_folder_without_an_end_token_is_refused(refuses, tmp_path, has_one):
    tiny.gemma2().save_pretrained(tmp_path / "student")
    if has_one:
        without("eos_token").save_pretrained(tmp_path / "student")
    refuses("end-of-sequence", {"model": str(tmp_path / "student"), "processing_class": None})


# ---- Optimizers ------------------------------------------------------------------------------------------------------


def optimizer_of(*parameters: torch.nn.Parameter, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters or [torch.nn.Parameter(torch.zeros(1))], **options)


class StepsAnother(OPSDTrainer):
    """Makes its optimizer from another model's weights."""

    def create_optimizer(self, model=None):
        self.optimizer = optimizer_of()
        return self.optimizer


def scheduled(rate: Callable[[int], float], of_another: bool = False) -> dict[str, Any]:
    student = tiny.qwen2()
    optimizer = optimizer_of(*student.parameters())
    owner = optimizer_of(*student.parameters()) if of_another else optimizer
    return {"model": student, "optimizers": (optimizer, torch.optim.lr_scheduler.LambdaLR(owner, rate))}


WITH_BIASES = LoraConfig(r=4, bias="all", target_modules="all-linear")


def before_its_adapter() -> dict[str, Any]:
    optimizers = optimizer_of(*(student := tiny.qwen2()).parameters()), None
    return {"model": student, "optimizers": optimizers, "peft_config": LoraConfig(target_modules=["q_proj"])}


@pytest.mark.parametrize(
    ("named", "given"),
    [
        ("rate is 0", lambda: scheduled(lambda step: 0.0)),
        ("warmup_steps", lambda: {"max_steps": 1, "warmup_steps": 1, "lr_scheduler_type": "linear"}),
        ("no trainable parameter", lambda: {"optimizers": (optimizer_of(*tiny.qwen2(48, 1).parameters()), None)}),
        ("no trainable parameter", lambda: {"cls": StepsAnother}),
        ("another optimizer", lambda: scheduled(lambda step: 1.0, of_another=True)),
        ("adapter", before_its_adapter),
        ("Anchor.*adapter", lambda: {"anchor_weight": 0.1, "peft_config": WITH_BIASES}),
    ],
)
def test_a_training_in_which_nothing_would_be_learned_is_refused(refuses, named, given):
    refuses(named, given())


# ---- Models with code of their own -----------------------------------------------------------------------------------

MODULE = """
from transformers import Qwen2Config, Qwen2ForCausalLM


class MineConfig(Qwen2Config):
    model_type = "mine"


class MineForCausalLM(Qwen2ForCausalLM):
    config_class = MineConfig
"""


@pytest.mark.parametrize(("role", "prefix"), [("model", ""), ("teacher_model", "teacher_")])
def test_a_model_with_code_is_loaded_with_its_option(make_trainer, tmp_path, role, prefix):
    tiny.qwen2(32).save_pretrained(tmp_path / "mine")
    classes = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.MineForCausalLM"}
    said = json.loads((tmp_path / "mine/config.json").read_text())
    said |= {"model_type": "mine", "architectures": ["MineForCausalLM"], "auto_map": classes}
    (tmp_path / "mine/config.json").write_text(json.dumps(said))
    (tmp_path / "mine/mine.py").write_text(MODULE)
    for given in ({"trust_remote_code": True}, {"model_init_kwargs": {"trust_remote_code": True}}):
        options = {f"{prefix}{name}": value for name, value in given.items()}
        trainer = make_trainer(**{role: str(tmp_path / "mine")}, **options)
        assert type(getattr(trainer, role)).__name__ == "MineForCausalLM"
