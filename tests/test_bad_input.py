"""What a user can get wrong, and the sentence each mistake is answered with, before anything expensive starts."""

from __future__ import annotations

import warnings
from dataclasses import fields
from typing import Any

import pytest
import tiny
import transformers
from datasets import Dataset, IterableDataset
from tokenizers import normalizers
from trl import DistillationConfig

import trl_opsd.teacher.build
from trl_opsd import OPSDConfig
from trl_opsd.prompts import check_prompts

BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"divergence": "kl"}, r"`divergence='kl'`: expected one of None, 'forward_kl', 'reverse_kl', 'jsd'"),
    ({"divergence": "reverse-kl"}, "Did you mean 'reverse_kl'"),
    ({"beta": float("nan")}, r"`beta=nan`: expected a number in \[0, 1\]"),
    ({"beta": 1.5}, r"`beta=1.5`: expected a number in \[0, 1\]"),
    ({"beta": None}, "`beta=None`"),
    ({"temperature": None}, "`temperature=None`"),
    ({"temperature": "hot"}, "`temperature='hot'`"),
    ({"top_p": True}, "`top_p=True`"),
    ({"generation_kwargs": {"n": 2}, "use_vllm": True}, "would change what a rollout returns"),
    ({"generation_kwargs": {"disable_compile": True}}, "TRL always sets it"),
    ({"temperature": 0.0}, "`temperature=0.0`: expected a finite number above 0"),
    ({"temperature": float("nan")}, "`temperature=nan`"),
    ({"temperature": float("inf")}, "`temperature=inf`"),
    ({"max_completion_length": None}, "`max_completion_length=None`: expected an integer of at least 1"),
    ({"max_completion_length": 0}, "`max_completion_length=0`"),
    ({"top_p": 0.0}, r"`top_p=0.0`: expected a number in \(0, 1\]"),
    ({"top_p": 1.5}, "`top_p=1.5`"),
    ({"top_p": float("nan")}, "`top_p=nan`"),
    ({"top_k": -1}, "`top_k=-1`: expected an integer of at least 0"),
    ({"top_k": 2.5}, "`top_k=2.5`"),
    ({"min_p": -0.1}, r"`min_p=-0.1`: expected a number in \[0, 1\]"),
    ({"repetition_penalty": 0.0}, "`repetition_penalty=0.0`: expected a finite number above 0"),
    ({"pad_to_multiple_of": 0}, "`pad_to_multiple_of=0`: expected an integer of at least 1"),
    ({"loss_chunk_tokens": 0}, "`loss_chunk_tokens=0`: expected an integer of at least 1"),
    ({"overlong_prompts": "truncate"}, "`overlong_prompts='truncate'`: expected one of 'error', 'drop'"),
    ({"cache_implementation": "statc"}, "Did you mean 'static'"),
    ({"vllm_mode": "colocated"}, "Did you mean 'colocate'"),
    ({"generation_kwargs": {"num_return_sequences": 2}}, "one completion of token ids for each prompt"),
    ({"generation_kwargs": {"return_dict_in_generate": True}}, "would change what a rollout returns"),
    ({"generation_kwargs": {"eos_token_id": 5}}, "would change what a rollout returns"),
    ({"generation_kwargs": {"temperature": 0.5}}, "would override `temperature`"),
    ({"generation_kwargs": {"max_new_tokens": 5}}, "set `max_completion_length` itself"),
    ({"generation_kwargs": {"supress_tokens": [1]}}, "did you mean 'suppress_tokens'"),
    ({"generation_kwargs": {"stop_strings": ["\n"]}}, "it looks for text, and a rollout is token ids"),
    ({"generation_kwargs": {"prompt_lookup_num_tokens": 3}}, "it decodes one row at a time, and a rollout is a batch"),
    ({"generation_kwargs": {"assistant_early_exit": 1}}, "it decodes one row at a time"),
    ({"nonfinite": "ignore"}, "`nonfinite='ignore'`: expected one of 'raise', 'skip'"),
    ({"nonfinite_skip_limit": 0}, "`nonfinite_skip_limit=0`: expected an integer of at least 1"),
    ({"phase_timeout": 0.0}, "`phase_timeout=0.0`: expected a finite number above 0"),
    ({"phase_timeout": float("inf")}, "`phase_timeout=inf`"),
    ({"auto_find_batch_size": True}, "set `per_device_train_batch_size`"),
    ({"label_smoothing_factor": 0.1}, "there are no labels"),
    ({"train_sampling_strategy": "group_by_length"}, "no length before they are written"),
    ({"resume_with_changes": "temperature"}, "`resume_with_changes='temperature'`: expected a list of names"),
]


@pytest.mark.refusal
@pytest.mark.before_loading
@pytest.mark.parametrize(("option", "message"), BAD_OPTIONS, ids=lambda value: str(value)[:60])
def test_an_option_out_of_range_is_refused_by_the_config(tmp_path, option, message):
    with pytest.raises(ValueError, match=message):
        tiny.config(tmp_path, **option)


@pytest.mark.parametrize(
    "option",
    [
        {"top_k": None},
        {"top_p": None},
        {"repetition_penalty": None},
        {"top_k": 0},
        {"min_p": 0.0},
        {"top_p": 1.0},
        {"beta": 0},
        {"generation_kwargs": {"do_sample": False}},
    ],
)
def test_the_ends_of_the_ranges_are_allowed(tmp_path, option):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiny.config(tmp_path, **option)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"beta": 0.02}, "`beta=0.02` is close to an end"),
        ({"beta": 0.97}, "generalised JSD itself vanishes"),
        ({"divergence": "forward_kl", "beta": 0.5}, "`beta=0.5` is ignored"),
    ],
)
def test_an_option_that_will_surprise_is_warned_about(tmp_path, option, message):
    with pytest.warns(UserWarning, match=message):
        tiny.config(tmp_path, **option)


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ({}, "ReverseKL()"),
        ({"beta": 0.0}, "ForwardKL()"),
        ({"beta": 0.3}, "GeneralizedJSD(beta=0.3)"),
        ({"divergence": "jsd"}, "GeneralizedJSD(beta=0.5)"),
        ({"divergence": "jsd", "beta": 0.2}, "GeneralizedJSD(beta=0.2)"),
        ({"divergence": "forward_kl"}, "ForwardKL()"),
        ({"divergence": "reverse_kl"}, "ReverseKL()"),
    ],
)
def test_the_objective_is_the_named_one_else_what_beta_says(tmp_path, option, expected):
    assert repr(tiny.config(tmp_path, **option).build_divergence()) == expected


def test_the_defaults_that_differ_from_trls_are_the_two_for_safety(tmp_path):
    ours, trls = tiny.config(tmp_path), DistillationConfig(**tiny.options(tmp_path))
    differing = {name for name in vars(trls) if getattr(ours, name) != getattr(trls, name)} - {"distributed_state"}
    assert differing == {"vllm_server_host"}
    assert ours.vllm_server_host == "127.0.0.1"
    assert ours.teacher_trust_remote_code is False


# ---- The dataset ----------------------------------------------------------------------------------------------------


def prompts(*values: Any) -> Dataset:
    return Dataset.from_list([{"prompt": value} for value in values])


GOOD = [{"role": "user", "content": "hi"}]

BAD_DATASETS: list[tuple[Any, type[Exception], str]] = [
    (None, ValueError, "`train_dataset` is None"),
    ([{"prompt": "a"}], TypeError, "`train_dataset` is a list: expected a `datasets.Dataset`"),
    (Dataset.from_dict({"prompt": []}), ValueError, "has 0 rows, but one generation batch takes 2"),
    (
        prompts("a"),
        ValueError,
        r"1 rows, but one generation batch takes 2 = 2 per device x 1 processes x 1 accumulation",
    ),
    (Dataset.from_dict({"question": ["a", "b"]}), ValueError, r"no column 'prompt', only \['question'\]"),
    (Dataset.from_dict({"prompt": ["a", "b"], "image": ["", ""]}), ValueError, "has a column 'image'"),
]

BAD_ROWS: list[tuple[Any, type[Exception], str]] = [
    (prompts("a", ""), ValueError, "The prompt in row 1 of train_dataset is empty"),
    (prompts("a", None), TypeError, "The prompt in row 1 of train_dataset is None"),
    (prompts(1, 2), TypeError, "The prompt in row 0 of train_dataset is of type int: expected a string"),
    (prompts(GOOD, []), ValueError, "row 1 of train_dataset is a list without messages"),
    (prompts([{"content": "a"}], GOOD), ValueError, "prompt in row 0 of train_dataset: message 0"),
    (prompts([{"role": "user"}], [{"role": "user"}]), ValueError, "expected a dict with 'role' and 'content'"),
    (prompts(["hi"], ["ho"]), ValueError, "row 0 of train_dataset: message 0 is of type str: expected"),
    (
        prompts(*[[{"role": "user", "content": [{"type": "image", "text": "x"}]}]] * 2),
        ValueError,
        "only text is supported yet",
    ),
    (prompts("a", "long " * 100), ValueError, "row 1 of train_dataset has 500 tokens; with a completion of 24"),
]


@pytest.mark.refusal
@pytest.mark.before_loading
@pytest.mark.parametrize(("dataset", "error", "message"), BAD_DATASETS, ids=lambda value: str(value)[:50])
def test_a_dataset_that_cannot_be_trained_on_is_refused_before_a_model_is_loaded(make_trainer, dataset, error, message):
    with pytest.raises(error, match=message):
        make_trainer(train_dataset=dataset)


@pytest.mark.refusal
@pytest.mark.parametrize(("dataset", "error", "message"), BAD_ROWS, ids=lambda value: str(value)[:50])
def test_a_row_that_cannot_be_trained_on_is_refused_at_construction(make_trainer, dataset, error, message):
    with pytest.raises(error, match=message):
        make_trainer(train_dataset=dataset)


@pytest.mark.refusal
def test_the_last_row_of_a_large_dataset_is_read_too(make_trainer):
    with pytest.raises(TypeError, match="row 2499 of train_dataset is None"):
        make_trainer(train_dataset=prompts(*["a"] * 2499, None))


@pytest.mark.refusal
def test_text_and_messages_may_not_be_mixed():
    with pytest.raises(ValueError, match="The second is messages, those before it are text"):
        check_prompts([("a", "The first"), (GOOD, "The second")])


@pytest.mark.refusal
def test_messages_need_a_chat_template(make_trainer):
    words = tiny.tokenizer()
    words.chat_template = None
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        make_trainer(train_dataset=prompts(GOOD, GOOD), processing_class=words)


@pytest.mark.refusal
def test_an_evaluation_dataset_is_checked_as_well(make_trainer):
    with pytest.raises(TypeError, match=r"row 1 of eval_dataset\['hard'\] is None"):
        make_trainer(eval_dataset={"easy": tiny.rows(), "hard": prompts("a", None)})
    with pytest.raises(ValueError, match="`eval_dataset` has no rows"):
        make_trainer(eval_dataset=Dataset.from_dict({"prompt": []}))


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("row", "error", "message"),
    [
        ({"prompt": None}, TypeError, "row 0 of this batch is None"),
        ({"question": "a"}, ValueError, "row 0 of this batch has no column 'prompt'"),
        ({"prompt": "long " * 100}, ValueError, "row 0 of this batch has 500 tokens"),
    ],
)
def test_a_row_of_a_stream_is_checked_when_it_is_read(make_trainer, row, error, message):
    stream = IterableDataset.from_generator(lambda: iter([row] * 8))
    trainer = make_trainer(train_dataset=stream)
    with pytest.raises(error, match=message):
        trainer.train()


@pytest.mark.refusal
def test_a_prompt_without_tokens_is_refused(make_trainer):
    words = tiny.tokenizer()
    words.backend_tokenizer.normalizer = normalizers.Strip()
    with pytest.raises(ValueError, match="row 1 of train_dataset has no tokens after tokenization"):
        make_trainer(train_dataset=prompts("a", "   "), processing_class=words)


@pytest.mark.refusal
def test_a_token_beyond_the_embedding_is_refused(make_trainer):
    small = tiny.qwen2(vocab_size=200)
    with pytest.raises(ValueError, match="but the models know 200 ids"):
        make_trainer(model=small, teacher_model=tiny.qwen2(48, 1, vocab_size=200))


@pytest.mark.refusal
def test_a_context_without_room_for_a_prompt_is_refused(make_trainer):
    with pytest.raises(ValueError, match="`max_completion_length=256` leaves no room for a prompt"):
        make_trainer(max_completion_length=256)


# ---- The models -----------------------------------------------------------------------------------------------------


class _MustNotLoad:
    """Any use of it is a model that was loaded too early."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the model was touched ({name}) before the arguments were checked")


@pytest.mark.refusal
@pytest.mark.before_loading
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"teacher_model": None}, ValueError, "There is no teacher"),
        ({"teacher_model": 3}, TypeError, "`teacher_model` is a int: expected a path"),
        ({"args": DistillationConfig("out", use_cpu=True)}, TypeError, "expected a `trl_opsd.OPSDConfig`"),
        ({"rollout": lambda prompt_ids: prompt_ids}, TypeError, "`rollout` is a function: expected"),
        ({"processing_class": "gpt2"}, TypeError, "`processing_class` is a str: expected a tokenizer"),
        ({"train_dataset": prompts("a")}, ValueError, "1 rows, but one generation batch takes 2"),
    ],
)
def test_a_wrong_argument_is_refused_before_a_model_is_touched(make_trainer, arguments, error, message):
    with pytest.raises(error, match=message):
        make_trainer(**{"model": _MustNotLoad(), "teacher_model": "teacher", **arguments})


@pytest.mark.refusal
@pytest.mark.before_loading
def test_a_processor_of_images_is_refused(make_trainer):
    class Processor(transformers.ProcessorMixin):
        def __init__(self) -> None:
            """Has no parts."""

    with pytest.raises(TypeError, match="a processor for more than text"):
        make_trainer(processing_class=Processor())


@pytest.mark.refusal
@pytest.mark.before_loading
def test_a_tokenizer_without_an_end_token_is_refused(make_trainer):
    words = tiny.tokenizer()
    words.eos_token = None
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        make_trainer(processing_class=words)


@pytest.mark.refusal
def test_one_object_cannot_be_student_and_teacher(make_trainer):
    both = tiny.qwen2()
    with pytest.raises(ValueError, match="are the same object"):
        make_trainer(model=both, teacher_model=both)


@pytest.mark.refusal
def test_a_teacher_that_shares_weights_with_the_student_is_refused(make_trainer):
    student, teacher = tiny.qwen2(32, 0), tiny.qwen2(32, 1)
    teacher.model.embed_tokens.weight = student.model.embed_tokens.weight
    with pytest.raises(ValueError, match="shares parameters with the student"):
        make_trainer(model=student, teacher_model=teacher)


@pytest.mark.refusal
def test_a_teacher_of_another_vocabulary_is_refused(make_trainer):
    with pytest.raises(ValueError, match=r"The head of the teacher has 200 rows, but the tokenizer has 259 tokens"):
        make_trainer(teacher_model=tiny.qwen2(48, 1, vocab_size=200))


def encoder_decoder() -> transformers.PreTrainedModel:
    sizes = {"vocab_size": tiny.VOCABULARY, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))


def gap_filler() -> transformers.PreTrainedModel:
    sizes = {"vocab_size": tiny.VOCABULARY, "hidden_size": 32, "intermediate_size": 64}
    return transformers.BertForMaskedLM(
        transformers.BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=256)
    )


@pytest.mark.refusal
@pytest.mark.parametrize("role", ["model", "teacher_model"])
@pytest.mark.parametrize(
    ("make_model", "kind"),
    [
        (lambda: tiny.qwen2(48, 1).model, "Qwen2Model"),
        (encoder_decoder, "T5ForConditionalGeneration"),
        (gap_filler, "BertForMaskedLM"),
    ],
)
def test_a_model_that_does_not_continue_text_is_refused(make_trainer, role, make_model, kind):
    with pytest.raises(ValueError, match=f"`{role}` is a {kind}, which does not continue a text"):
        make_trainer(**{role: make_model()})


@pytest.mark.refusal
@pytest.mark.before_loading
@pytest.mark.parametrize("role", ["model", "teacher_model"])
@pytest.mark.parametrize("path", ["/no/where", "no/where", "."])
def test_a_path_without_a_model_is_refused_before_one_is_loaded(make_trainer, tmp_path, role, path):
    tiny.qwen2(32).save_pretrained(tmp_path / "there")
    given = {"model": str(tmp_path / "there"), "teacher_model": str(tmp_path / "there"), role: path}
    with pytest.raises(ValueError, match=rf"`{role}='{path}'` is neither a folder with a `config\.json` nor"):
        make_trainer(**given)


@pytest.mark.refusal
@pytest.mark.before_loading
def test_one_of_several_teachers_that_is_not_there_is_named_before_one_is_loaded(make_trainer):
    rows = tiny.rows().add_column("teacher", ["big", "small"] * 4)
    with pytest.raises(ValueError, match=r"`teacher_model\['small'\]='/no/where'` is neither"):
        make_trainer(teacher_model={"big": tiny.qwen2(48, 1), "small": "/no/where"}, train_dataset=rows)


@pytest.mark.refusal
@pytest.mark.before_loading
@pytest.mark.parametrize("role", ["model", "teacher_model"])
def test_an_encoder_decoder_at_a_path_is_refused_before_a_model_is_loaded(make_trainer, tmp_path, role):
    encoder_decoder().save_pretrained(tmp_path / "t5")
    tiny.qwen2(32).save_pretrained(tmp_path / "there")
    given = {"model": str(tmp_path / "there"), "teacher_model": str(tmp_path / "there"), role: str(tmp_path / "t5")}
    with pytest.raises(ValueError, match=f"`{role}` is a T5ForConditionalGeneration"):
        make_trainer(**given)


@pytest.mark.refusal
def test_options_for_loading_a_teacher_that_is_already_loaded_are_refused(make_trainer):
    with pytest.raises(ValueError, match="the teacher is given as an object"):
        make_trainer(teacher_model_init_kwargs={"dtype": "float32"})


def test_a_teacher_with_code_of_its_own_needs_a_switch_of_its_own(make_trainer, monkeypatch, tmp_path):
    loaded = {}

    def load(path, **kwargs):
        loaded.update(kwargs)
        return tiny.qwen2(48, 1)

    monkeypatch.setattr(trl_opsd.teacher.build, "create_model_from_path", load)
    path = tmp_path / "teacher"
    tiny.qwen2(48, 1).config.save_pretrained(path)
    make_trainer(teacher_model=str(path), trust_remote_code=True)
    assert loaded["trust_remote_code"] is False
    assert loaded["use_safetensors"] is True
    make_trainer(teacher_model=str(path), teacher_trust_remote_code=True)
    assert loaded["trust_remote_code"] is True


def test_every_new_option_is_documented():
    ours, trls = ({field.name for field in fields(config)} for config in (OPSDConfig, DistillationConfig))
    new = ours - trls
    assert {name for name in new if f"        {name} (" in (OPSDConfig.__doc__ or "")} == new != set()


def test_accumulation_that_differs_between_the_launch_and_the_options(tmp_path, monkeypatch):
    launch = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
    for name, value in {**launch, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}.items():
        monkeypatch.setenv(name, value)
    assert tiny.config(tmp_path, gradient_accumulation_steps=4).gradient_accumulation_steps == 4
    with pytest.raises(
        ValueError, match=r"^`gradient_accumulation_steps` is 4 in the accelerate .* 2 in `OPSDConfig`: r"
    ):
        tiny.config(tmp_path, gradient_accumulation_steps=2)


def test_a_launch_with_fsdp_of_the_first_kind(make_trainer):
    trainer = make_trainer()
    trainer._dist.fsdp_version = 1
    with pytest.raises(ValueError, match=r"`fsdp_version: 1`.* set `fsdp_version: 2` in the accelerate file"):
        trainer._check_fsdp()


def test_a_launch_with_fsdp_that_splits_nothing(make_trainer, monkeypatch, caplog):
    make_trainer()
    assert "FSDP" not in caplog.text
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    make_trainer()
    assert "nothing is split, this is plain data parallelism" in caplog.text
