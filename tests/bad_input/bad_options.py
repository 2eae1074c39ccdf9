"""Options out of range, unknown, or without effect, as far as the config alone can check."""

from __future__ import annotations

import re

from cases import Case, method, option

from trl_opsd import OPSDConfig
from trl_opsd.losses import Divergence


class Own(Divergence):
    """A divergence of the user's own."""

    def value(self, log_student, log_teacher):
        return (log_student - log_teacher).square().sum(-1)


NAN, INFINITE = float("nan"), float("inf")
RESULT = "one completion of token ids for each prompt"

RANGES = [
    option("beta", r"`beta=nan`: expected a number in \[0, 1\]", beta=NAN),
    option("beta", r"`beta=1.5`: expected a number in \[0, 1\]", beta=1.5),
    option("beta", "`beta=None`", beta=None),
    option("temperature", "`temperature=0.0`: expected a finite number above 0", temperature=0.0),
    option("temperature", "`temperature=-1.0`: expected a finite number above 0", temperature=-1.0),
    option("temperature", "`eval_temperature=-1.0`: expected a finite number of at least 0", eval_temperature=-1.0),
    option("temperature", "`eval_temperature=nan`", eval_temperature=NAN),
    option("temperature", "set `num_generations_eval=1`", eval_temperature=0.0, num_generations=2),
    option("temperature", "set `num_generations_eval=1`", eval_temperature=0.0, num_generations_eval=2),
    option("temperature", "`temperature=nan`", temperature=NAN),
    option("temperature", "`temperature=inf`", temperature=INFINITE),
    option("temperature", "`temperature=None`", temperature=None),
    option("temperature", "`temperature='hot'`", temperature="hot"),
    option(
        "max_completion_length",
        "`max_completion_length=None`: expected .* as the room for a completion has to be known",
        max_completion_length=None,
    ),
    option("max_completion_length", "`max_completion_length=0`", max_completion_length=0),
    option("max_completion_length", "`max_completion_length=-1`", max_completion_length=-1),
    option("top_p", r"`top_p=0.0`: expected a number in \(0, 1\]", top_p=0.0),
    option("top_p", "`top_p=1.5`", top_p=1.5),
    option("top_p", "`top_p=nan`", top_p=NAN),
    option("top_p", "`top_p=True`", top_p=True),
    option("top_k", "`top_k=-1`: expected an integer of at least 0", top_k=-1),
    option("top_k", "`top_k=2.5`", top_k=2.5),
    option("min_p", r"`min_p=-0.1`: expected a number in \[0, 1\]", min_p=-0.1),
    option("repetition_penalty", "`repetition_penalty=0.0`: expected a finite number above 0", repetition_penalty=0.0),
    option("pad_to_multiple_of", "`pad_to_multiple_of=0`: expected an integer of at least 1", pad_to_multiple_of=0),
    option("divergence", "skew is 1.0", divergence={"skewed_forward_kl": {"skew": 1.0}}),
    option("divergence", "`kl_clip=0.0`: expected a finite number above 0", kl_clip=0.0),
    option("divergence", "`kl_clip='small'`", kl_clip="small"),
    option("divergence", "`top_k_teacher=0`", top_k_teacher=0),
    option("divergence", "`top_k_teacher=2.5`", top_k_teacher=2.5),
    option("divergence", "top_k_teacher is 4 with SampledReverseKL", top_k_teacher=4, divergence="sampled_reverse_kl"),
    *(
        option(
            "divergence",
            rf"^`generation_kwargs={{{name!r}: .*`.* with 'sampled_reverse_kl'",
            divergence="sampled_reverse_kl",
            generation_kwargs={name: value},
            **engine,
        )
        for name, value, engine in [
            ("temperature", 0.7, {}),
            ("do_sample", False, {}),
            ("suppress_tokens", [7], {}),
            ("typical_p", 0.9, {}),
            ("min_new_tokens", 4, {}),
            ("no_repeat_ngram_size", 2, {}),
            ("min_tokens", 4, {"use_vllm": True}),
            ("logit_bias", {7: 1.0}, {"use_vllm": True}),
            ("presence_penalty", 0.1, {"use_vllm": True}),
        ]
    ),
    *(
        option(
            "divergence",
            rf"`{name}={value}` with 'sampled_reverse_kl'",
            divergence="sampled_reverse_kl",
            generation_kwargs={name: value},
        )
        for name, value in [("top_p", 0.9), ("top_k", 5), ("min_p", 0.1), ("repetition_penalty", 1.1)]
    ),
    option(
        "divergence", "with TopKTeacher\\(.*, which is not a sum over vocabulary entries", top_k_teacher=4, kl_clip=0.05
    ),
    option("divergence", "with Own\\(\\), which is not a sum over vocabulary entries", kl_clip=0.05, divergence=Own()),
    method(
        "divergence",
        "`TokenSelection.criterion='top'.`: expected 'prefix', 'random'",
        token_selection="top",
        token_fraction=0.5,
    ),
    method("divergence", "`TokenSelection.fraction=0.0.`", token_selection="prefix", token_fraction=0.0),
    method("at least", "`Extrapolation.factor=-1.0.`: expected greater than or equal to 0", extrapolation=-1.0),
    method("at least", "`Anchor.weight=inf.`", anchor_weight=float("inf")),
    method("at least", "`Contrast.weight=nan.`", contrast_weight=float("nan")),
    method(
        "at least", "'contrast' has no setting 'weihgt'.*Did you mean 'weight'", methods={"contrast": {"weihgt": 1}}
    ),
    method("at least", "'contrats': expected one of .*Did you mean 'contrast'", methods={"contrats": {}}),
    method("at least", "'contrast': .*missing 1 required positional argument: 'weight'", methods={"contrast": {}}),
    method("at least", "`methods=5`: expected settings by name", methods=5),
    option("temperature", "`student_temperature=0.0`: expected a finite number above 0", student_temperature=0.0),
    option("temperature", "`teacher_temperature='hot'`", teacher_temperature="hot"),
    option("chunk size", "`loss_chunk_tokens=0`: expected an integer of at least 1", loss_chunk_tokens=0),
]

TRACKERS = [
    option("package missing", "`report_to='wandb'`: expected 'none', or trackers that are", report_to="wandb"),
    option("package missing", r"`report_to=\['wand'\]`: expected 'none', or trackers that", report_to=["wand"]),
]

GENERATION_KWARGS = [
    option(
        "generation kwargs: number of sequences",
        "one completion of token ids for each prompt",
        generation_kwargs={"num_return_sequences": 2},
    ),
    option("generation kwargs: number of sequences", RESULT, generation_kwargs={"n": 2}, use_vllm=True),
    option("generation kwargs: number of sequences", RESULT, generation_kwargs={"best_of": 2}, use_vllm=True),
    option("generation kwargs: return type", RESULT, generation_kwargs={"return_dict_in_generate": True}),
    option("generation kwargs: overriding", "TRL always sets it to True", generation_kwargs={"disable_compile": False}),
    option(
        "generation kwargs: end tokens",
        "expected a token id that ends a completion, or a list",
        generation_kwargs={"eos_token_id": None},
    ),
    option(
        "generation kwargs: end tokens",
        "expected a token id that ends a completion, or a list",
        generation_kwargs={"eos_token_id": "x"},
    ),
    option("generation kwargs: end tokens", "expected a token id", generation_kwargs={"eos_token_id": [2, -1]}),
    option(
        "generation kwargs: end tokens",
        "expected a token id",
        generation_kwargs={"stop_token_ids": [0.5]},
        use_vllm=True,
    ),
    option("generation kwargs: range", "'do_sample' to False", generation_kwargs={"temperature": 0}),
    option("generation kwargs: range", "expected a finite number above 0", generation_kwargs={"temperature": None}),
    option("generation kwargs: range", r"`top_p=7`: expected a number in \(0, 1\]", generation_kwargs={"top_p": 7}),
    option("generation kwargs: range", "`max_completion_length=None`: exp", generation_kwargs={"max_new_tokens": None}),
    option("generation kwargs: unknown", "did you mean 'suppress_tokens'", generation_kwargs={"supress_tokens": [1]}),
]

TWICE = [
    option(
        "at least",
        r"`dtype='float32'` and `model_init_kwargs=\{'torch_dtype': 'bfloat16'\}` set the same option to two values",
        model_init_kwargs={"dtype": "float32", "torch_dtype": "bfloat16"},
    ),
    option(
        "at least",
        r"`dtype='float32'` and `teacher_model_init_kwargs=\{'torch_dtype': 'bfloat16'\}` set the same option",
        teacher_model_init_kwargs={"dtype": "float32", "torch_dtype": "bfloat16"},
    ),
    option(
        "at least",
        r"`teacher_model_revision='a'` and `teacher_model_init_kwargs=\{'revision': 'b'\}` set the same option",
        teacher_model_revision="a",
        teacher_model_init_kwargs={"revision": "b"},
    ),
]

NAMES = [
    option("cache_implementation", "Did you mean 'static'", cache_implementation="statc"),
    option("vllm_mode", "Did you mean 'colocate'", vllm_mode="colocated"),
    option("vllm_mode", "Did you mean 'server'", vllm_mode="served"),
    option(
        "divergence",
        r"`divergence='kl'`: expected one of 'forward_kl', 'reverse_kl', 'jsd'",
        divergence="kl",
    ),
    option("divergence", "Did you mean 'reverse_kl'", divergence="reverse-kl"),
    option(
        "teacher_offload",
        r"`teacher_offload='streamed'`: expected one of 'none', 'cpu', 'stream'",
        teacher_offload="streamed",
    ),
    option("teacher_offload", "`teacher_offload=None`: expected one of", teacher_offload=None),
]

WITHOUT_EFFECT = [
    option("auto_find_batch_size", "set `per_device_train_batch_size`", auto_find_batch_size=True),
    option("torch_compile", r"to compile decoding, pass `rollout=HFRollout\(compile=True\)`", torch_compile=True),
    option("label_smoothing_factor", "there are no labels", label_smoothing_factor=0.1),
    option(
        "train_sampling_strategy",
        "completion lengths are unknown before generation",
        train_sampling_strategy="group_by_length",
    ),
    option("train_sampling_strategy", "`shuffle_dataset=False` keeps the order", train_sampling_strategy="sequential"),
]

OTHERS = [
    option("at least", "would reorder batches", dataloader_in_order=False, dataloader_num_workers=2),
    option(
        "at least",
        "`overlong_prompts='truncate'`: expected one of 'error', 'drop'",
        overlong_prompts="truncate",
    ),
    option("at least", "it matches text, but a rollout is token ids", generation_kwargs={"stop_strings": ["\n"]}),
    option(
        "at least",
        "it decodes one row at a time, but a rollout is a batch",
        generation_kwargs={"prompt_lookup_num_tokens": 3},
    ),
    option("at least", "it decodes one row at a time", generation_kwargs={"assistant_early_exit": 1}),
    option("at least", "`nonfinite='ignore'`: expected one of 'raise', 'skip'", nonfinite="ignore"),
    option("at least", "`nonfinite_skip_limit=0`: expected an integer of at least 1", nonfinite_skip_limit=0),
    option("at least", "`phase_timeout=0.0`: expected a finite number above 0", phase_timeout=0.0),
    option("at least", "`phase_timeout=inf`", phase_timeout=INFINITE),
    option(
        "at least", "`resume_with_changes='temperature'`: expected a list of names", resume_with_changes="temperature"
    ),
    *(
        option("at least", f"`{name}={re.escape(repr(value))}`: expected a dict", **{name: value})
        for name in OPSDConfig._VALID_DICT_FIELDS
        if name.endswith("_kwargs")
        for value in ("temperature=1", 5, ["temperature"])
    ),
]

CASES: list[Case] = [*RANGES, *TRACKERS, *GENERATION_KWARGS, *TWICE, *NAMES, *WITHOUT_EFFECT, *OTHERS]
