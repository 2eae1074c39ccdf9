"""Options and settings that mean nothing or cannot go together: an error names each, before anything is loaded.

`test_config.py` has the bounds of each option, from the table of their types.
"""

from __future__ import annotations

from typing import Any

import pytest
from support import tiny
from support.byte_languages import byte_pairs

from trl_opsd import FixedRollout, OPSDConfig, OPSDTrainer
from trl_opsd.losses import Divergence

pytestmark = [pytest.mark.refusal, pytest.mark.quick]
URL = "http://127.0.0.1:1"
NAN, INFINITE = float("nan"), float("inf")


class Own(Divergence):
    def value(self, log_student, log_teacher):
        return (log_student - log_teacher).square().sum(-1)


NOT_DRAWN = {
    "temperature": 0.7, "do_sample": False, "suppress_tokens": [7], "typical_p": 0.9, "min_new_tokens": 4,
    "no_repeat_ngram_size": 2, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1,
}  # fmt: skip
"""Keys with which tokens are not drawn from the student's distribution."""
NOT_DRAWN_BY_ENGINES = {"min_tokens": 4, "logit_bias": {7: 1.0}, "presence_penalty": 0.1}
OF_SAME_TOKENS = {
    "top_k_teacher": 5, "kl_clip": 1.0, "teacher_server_url": URL, "teacher_model_kind": "base",
}  # fmt: skip
FITTING = {
    "teacher_server_url": {"teacher_model": "teacher"},
    "teacher_model_kind": {"teacher_model": None},
}
SAMPLED = {"divergence": "sampled_reverse_kl"}

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("learning_rate", {"learning_rate": "fast"}),
    ("learning_rate", {"learning_rate": None}),
    ("learning_rate", {"learning_rate": (1e-5,)}),
    ("per_device_train_batch_size", {"per_device_train_batch_size": 2.5}),
    ("save_steps", {"save_steps": 2.5, "save_strategy": "steps"}),
    ("seed", {"seed": 2**32}),
    ("use_vllm", {"use_vllm": "maybe"}),
    ("max_steps", {"max_steps": "all"}),
    ("temperature", {"temperature": INFINITE}),
    ("max_completion_length", {"max_completion_length": None}),
    ("resume_with_changes", {"resume_with_changes": "temperature"}),
    ("statc", {"cache_implementation": "statc"}),
    ("did you mean|Did you mean", {"vllm_mode": "colocated"}),
    ("did you mean|Did you mean", {"divergence": "reverse-kl"}),
    ("skew", {"divergence": {"skewed_forward_kl": {"skew": 1.0}}}),
    ("sglang_server_url", {"sglang_server_url": "127.0.0.1:30000"}),
    ("sglang_server_url", {"sglang_server_url": "http://127.0.0.1:x"}),
    # what cannot go together
    ("teacher_offload", {"teacher_offload": "zero3", "teacher_model_kind": "ema"}),
    ("teacher_offload", {"teacher_offload": "zero3"}),
    ("seq_kd", {"seq_kd": True}),
    ("seq_kd", {"seq_kd": True, "lmbda": 0, "teacher_server_url": URL}),
    ("seq_kd", {"seq_kd": True, "lmbda": 0, "teacher_offload": "stream"}),
    ("num_generations.* 2 rows", {"num_generations": 4}),
    ("lmbda", {"lmbda": 0.5, "overlap": "step"}),
    ("overlap", {"overlap": "ahead", "use_vllm": True, "vllm_mode": "colocate"}),
    ("optim", {"optim": "lomo", "max_tokens_per_microbatch": 9}),
    ("optim", {"optim": "lomo", "overlap": "step"}),
    ("auto_find_batch_size", {"auto_find_batch_size": True}),
    ("torch_compile_mode", {"torch_compile_mode": "max-autotune"}),
    ("dataloader_in_order", {"dataloader_in_order": False, "dataloader_num_workers": 2}),
    ("top_k_teacher", {"top_k_teacher": 4, **SAMPLED}),
    ("kl_clip", {"kl_clip": 0.05, "top_k_teacher": 4}),
    ("kl_clip", {"kl_clip": 0.05, "divergence": Own()}),
    ("SampledReverseKL", {"kl_clip": 0.05, **SAMPLED}),
    *((name, {name: 0.5, **SAMPLED}) for name in ("top_p", "min_p", "lmbda", "student_temperature")),
    *(
        (name, {"generation_kwargs": {name: 3}, "use_vllm": True, "seq_kd": True, "lmbda": 0.5})
        for name in ("min_tokens", "stop")
    ),
    # `generation_kwargs`
    *((name, {**SAMPLED, "generation_kwargs": {name: value}}) for name, value in NOT_DRAWN.items()),
    *(
        (name, {**SAMPLED, "generation_kwargs": {name: value}, "use_vllm": True})
        for name, value in NOT_DRAWN_BY_ENGINES.items()
    ),
    *(
        (name, {"generation_kwargs": {name: value}})
        for name, value in {
            "num_return_sequences": 2, "return_dict_in_generate": True, "disable_compile": False, "top_p": 7,
            "early_stopping": "perhaps", "supress_tokens": [1], "stop_strings": ["\n"],
        }.items()
    ),
    ("'n'", {"generation_kwargs": {"n": 2}, "use_vllm": True}),
    ("max_completion_length", {"generation_kwargs": {"max_new_tokens": None}}),
    *((f"{name}_full_eval", {f"{name}_full_eval": True}) for name in ("fp16", "bf16")),
]  # fmt: skip


@pytest.mark.parametrize(("named", "given"), OPTIONS)
def test_an_option_is_refused_by_name(tmp_path, named, given):
    with pytest.raises(ValueError, match=named):
        tiny.config(tmp_path, **given)


def test_a_misspelt_name_is_corrected():
    for name in ("learing_rate", "vllm_host", "teacher_revision"):
        with pytest.raises(TypeError, match=f"'{name}': did you mean "):
            OPSDConfig("out", **{name: 1})
    with pytest.raises(TypeError, match=r"'zzz'.*docs/migration.md"):
        OPSDConfig("out", zzz=1)
    for name, meant in {"compute_metrics": "docs/migration.md", "peft_cfg": "peft_config"}.items():
        with pytest.raises(TypeError, match=f"'{name}'.*{meant}"):
            OPSDTrainer("student", "teacher", **{name: object()})
    with pytest.raises(TypeError, match=r"OPSDConfig\(max_steps="):
        OPSDTrainer("student", "teacher", max_steps=1)


REWARDED = {"reward_funcs": len, "num_generations": 2}
GROUPED = {"teacher_context": "group_success", **REWARDED}
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("criterion", {"token_selection": "top", "token_fraction": 0.5}),
    ("fraction", {"token_selection": "prefix", "token_fraction": 0.0}),
    ("factor", {"extrapolation": -1.0}),
    ("weight", {"anchor_weight": INFINITE}),
    ("weight", {"contrast_weight": NAN}),
    ("gate", {"reward_gate": "best"}),
    ("gate", {"reward_gate": NAN}),
    ("weihgt.*Did you mean", {"methods": {"contrast": {"weihgt": 1}}}),
    ("contrats.*Did you mean", {"methods": {"contrats": {}}}),
    ("'weight'", {"methods": {"contrast": {}}}),
    ("methods=5", {"methods": 5}),
    ("num_generations", {"teacher_context": "group_success", "reward_funcs": len}),
    ("num_generations", {"reward_gate": "advantage", "reward_funcs": len}),
    ("overlap", {"reward_gate": 1.0, "overlap": "step", "reward_funcs": len}),
    ("lmbda", {"lmbda": 0, "reward_weight": 0.5, **REWARDED}),
    ("lmbda", {"lmbda": 0, "reward_gate": 1.0, **REWARDED}),
    ("lmbda", {"lmbda": 0, **GROUPED}),
    ("lmbda", {"lmbda": 0, "teacher_prompt_fn": lambda row, completion, outcome: row["prompt"]}),
    (
        "seq_kd.*completion_prefix",
        {"lmbda": 0.5, "seq_kd": True, "train_dataset": tiny.rows().add_column("completion_prefix", ["so"] * 8)},
    ),
    ("seq_kd", {"lmbda": 0.5, "seq_kd": True, "teacher_prompt_fn": lambda row, completion: row["prompt"]}),
    ("without rewards", {"reward_gate": 1.0}),
    ("without rewards", {"teacher_prompt_fn": lambda row, completion, outcome: "a"}),
    ("teacher_prompt_fn", {**GROUPED, "teacher_prompt_fn": lambda row, completion: "a"}),
    ("accuracy", {"reward_funcs": "accuracy"}),
    *(
        ("cross_tokenizer", {"cross_tokenizer": "bytes", "teacher_processing_class": byte_pairs(40), **more})
        for more in (
            {"token_selection": "student_entropy", "token_fraction": 0.5},
            {"contrast_weight": 0.5},
            {"extrapolation": 1.5},
            {"anchor_weight": 0.1},
            {"tools": [tiny.add]},
            SAMPLED,
            *({name: OF_SAME_TOKENS[name], **FITTING.get(name, {})} for name in OF_SAME_TOKENS),
        )
    ),
    ("eval_strategy", {"save_strategy": "best", "metric_for_best_model": "loss"}),
    ("eval_strategy", {"load_best_model_at_end": True, "metric_for_best_model": "loss"}),
    ("rollout", {"use_vllm": True}),
    *(
        (named, {"methods": {"blend": {"teacher": 0.3}}, "rollout": None, **more})
        for named, more in (
            ("the rollout", {"use_vllm": True}),
            ("FixedRollout", {"rollout": FixedRollout({})}),
            ("teacher_server_url", {"teacher_server_url": URL, "teacher_model": "teacher"}),
            ("cross_tokenizer", {"cross_tokenizer": "bytes", "teacher_processing_class": byte_pairs(40)}),
            ("tools", {"tools": [tiny.add]}),
            ("overlap", {"overlap": "step"}),
            ("lmbda", {"lmbda": 0}),
            ("temperature", {"temperature": 0.7}),
            ("top_p", {"top_p": 0.9}),
            ("min_new_tokens", {"generation_kwargs": {"min_new_tokens": 4}}),
            ("made of the completion", {"teacher_prompt_fn": lambda row, completion: "a"}),
            ("a second such method", {"methods": {"blend": {"teacher": 0.3}, "speculative": None}}),
            *((one, {"methods": {"blend": {"teacher": 0.3, one: 0}}}) for one in ("teacher", "until_step", "block")),
            ("top_k", {"methods": {"speculative": {"top_k": 0}}}),
        )
    ),
    ("teacher_model_name_or_path", {"teacher_model_name_or_path": "other"}),
]


@pytest.mark.before_loading
@pytest.mark.parametrize(("named", "given"), METHODS)
def test_a_setting_is_refused_by_name(refuses, named, given):
    refuses(named, given)


# ---- Engines and servers --------------------------------------------------------------------------------------------

SERVER = {"rollout": None, "sglang_server_url": "http://127.0.0.1:9", "vllm_server_timeout": 0.0}


@pytest.mark.before_loading
@pytest.mark.parametrize(
    ("named", "given"),
    [
        ("num_beams", {"generation_kwargs": {"num_beams": 2}}),
        ("stop_token_ids", {"generation_kwargs": {"ignore_eos": True, "stop_token_ids": 5}}),
        ("No SGLang server", {}),
    ],
)
def test_sglang_is_refused_what_it_cannot_do(refuses, named, given):
    refuses(named, {**SERVER, **given})


@pytest.mark.vllm
@pytest.mark.before_loading
@pytest.mark.parametrize(
    ("named", "given"),
    [
        ("logprobs", {"generation_kwargs": {"logprobs": 3}}),
        ("presence_penality", {"generation_kwargs": {"presence_penality": 1.0}}),
        ("temperature", {"temperature": 3.0}),
    ],
)
def test_vllm_is_refused_options_that_it_has_not(refuses, named, given):
    pytest.importorskip("vllm")
    refuses(named, {"use_vllm": True, "rollout": None, **given})


@pytest.mark.vllm
@pytest.mark.parametrize("path", ["", "/no/where"])
def test_vllm_needs_a_checkpoint_of_the_student(refuses, path):
    pytest.importorskip("vllm")
    student = tiny.qwen2(64)
    student.name_or_path = path
    refuses("name_or_path", {"model": student, "use_vllm": True, "rollout": None})
