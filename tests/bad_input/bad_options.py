"""Options out of range, unknown, or without effect, as far as the config alone can check."""

from __future__ import annotations

from cases import Case, method, option

from trl_opsd.losses import Divergence


class Own(Divergence):
    """A divergence of the user's own."""

    def value(self, log_student, log_teacher):
        return (log_student - log_teacher).square().sum(-1)


NAN = float("nan")

RANGES = [
    option("beta", "`beta=nan`", beta=NAN),
    option("temperature", "`temperature=inf`", temperature=float("inf")),
    option("temperature", "`eval_temperature=-1.0`: expected greater than or equal to 0", eval_temperature=-1.0),
    option("max_completion_length", "`max_completion_length=None`", max_completion_length=None),
    option("top_p", "`top_p=0.0`: expected greater than 0", top_p=0.0),
    option("top_k", "`top_k=2.5`", top_k=2.5),
    option("min_p", "`min_p=-0.1`", min_p=-0.1),
    option("repetition_penalty", "`repetition_penalty=0.0`", repetition_penalty=0.0),
    option("pad_to_multiple_of", "`pad_to_multiple_of=0`", pad_to_multiple_of=0),
    option("chunk size", "`loss_chunk_tokens=0`", loss_chunk_tokens=0),
    option("divergence", "skew is 1.0", divergence={"skewed_forward_kl": {"skew": 1.0}}),
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
    method("at least", "`methods=5`: expected", methods=5),
]

GENERATION_KWARGS = [
    option(
        "generation kwargs: number of sequences",
        "the trainer sets this",
        generation_kwargs={"num_return_sequences": 2},
    ),
    option("generation kwargs: number of sequences", "the trainer sets", generation_kwargs={"n": 2}, use_vllm=True),
    option("generation kwargs: return type", "the trainer sets", generation_kwargs={"return_dict_in_generate": True}),
    option("generation kwargs: overriding", "the trainer sets this", generation_kwargs={"disable_compile": False}),
    option("generation kwargs: range", "`top_p=7`: expected less than", generation_kwargs={"top_p": 7}),
    option("generation kwargs: range", "`max_completion_length=None`", generation_kwargs={"max_new_tokens": None}),
    option("generation kwargs: range", "early_stopping", generation_kwargs={"early_stopping": "perhaps"}),
    option("generation kwargs: unknown", "did you mean 'suppress_tokens'", generation_kwargs={"supress_tokens": [1]}),
    option("at least", "matches text", generation_kwargs={"stop_strings": ["\n"]}),
    option("cache_implementation", "statc", cache_implementation="statc"),
    *(
        Case(
            "generation kwargs: end tokens",
            repr(value),
            "no completion could end with",
            lambda lab, value=value: lab.make(generation_kwargs={"eos_token_id": value}),
        )
        for value in (None, "x", [2, -1])
    ),
]

NAMES = [
    option("vllm_mode", "Did you mean 'colocate'", vllm_mode="colocated"),
    option("divergence", "`divergence='kl'`: expected one of 'forward_kl', 'reverse_kl', 'jsd'", divergence="kl"),
    option("divergence", "Did you mean 'reverse_kl'", divergence="reverse-kl"),
    option("teacher_offload", "`teacher_offload='streamed'`: expected 'none', 'cpu'", teacher_offload="streamed"),
    option("at least", "`resume_with_changes='temperature'`: expected a valid list", resume_with_changes="temperature"),
]

WITHOUT_EFFECT = [
    option("auto_find_batch_size", "`auto_find_batch_size=True`", auto_find_batch_size=True),
    option("torch_compile", "`torch_compile=True`", torch_compile=True),
    option("at least", "could be used twice", dataloader_in_order=False, dataloader_num_workers=2),
]

CASES: list[Case] = [*RANGES, *GENERATION_KWARGS, *NAMES, *WITHOUT_EFFECT]
