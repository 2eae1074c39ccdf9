"""The options of [`OPSDTrainer`], and every check that needs only the options; no check loads anything."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch
from transformers.utils import is_torch_xla_available

from trl_opsd._compat.deepspeed import check_builds
from trl_opsd._compat.trl import DistillationConfig
from trl_opsd._compat.versions import ALIASES
from trl_opsd.data.completions import named_as_here
from trl_opsd.data.prompts import check_template
from trl_opsd.http.urls import server_urls
from trl_opsd.losses import Divergence
from trl_opsd.losses.divergence import describe
from trl_opsd.losses.registry import Settings, divergence_of
from trl_opsd.losses.streamed import Objective
from trl_opsd.losses.token_selection import EARLY, LATE, Selection
from trl_opsd.losses.validation import check_clip
from trl_opsd.options.foreign_names import StrictNames, explained, without_meaning
from trl_opsd.options.normalize import (
    check_json,
    check_sampled,
    convert_text,
    settle_loading,
    settle_sampling,
    with_help,
)
from trl_opsd.options.rules import AFTER, LAUNCH, Launch, refuse
from trl_opsd.options.table import (
    ASSIGN,
    CONTEXT,
    EMA,
    ENGINE,
    FRACTION,
    LIVE,
    LOADED,
    LONG,
    NAMES,
    NO_PROMPT_FN,
    NUMBERS,
    OFF_POLICY,
    ORIGIN,
    OVERLAP_AHEAD,
    OVERLAP_STEP,
    REWARD_WEIGHT,
    REWARDS,
    SELECTION,
    SGLANG,
    SKIPS,
    TEACHER_SERVER,
    VLLM,
    Option,
    a_divergence,
    above,
    at_least,
    between,
    check_values,
    from_to,
    integer,
    of_divergences,
    one_of,
    option_values,
    share,
)
from trl_opsd.parallel.failure import share_tracebacks


@with_help
@dataclass
class OPSDConfig(StrictNames, DistillationConfig):
    r"""Configuration of [`OPSDTrainer`]: every field of [`~trl.DistillationConfig`], with its name, default and
    meaning, and the fields below.

    Two defaults differ, for safety: `vllm_server_host` is loopback, and `trust_remote_code` does not cover the teacher.
    Without an accelerator, `bf16` is off unless it is set; TRL's default is refused there.

    Parameters:
        divergence (`str` or [`~losses.Divergence`], *optional*):
            The objective. By name: `"forward_kl"` is KL(teacher ‖ student), `"reverse_kl"` is KL(student ‖ teacher),
            `"jsd"` is the generalised Jensen-Shannon divergence with TRL's `beta` where that lies inside (0, 1), and
            with 0.5 otherwise; `docs/objectives.md` explains the others. When `None`, `beta` decides, as in TRL: 0
            forward KL, 1 reverse KL, between: JSD. A [`~losses.Divergence`] is used unchanged; `docs/extending.md`
            shows how to write one.
        skew (`float`, *optional*, defaults to `0.1`):
            Of the skewed KLs, the share of the first distribution in the mixture that it is compared with, in (0, 1).
        alpha (`float`, *optional*, defaults to `0.5`):
            Of the α-divergence, in (0, 1): towards the reverse KL near 0, towards the forward KL near 1.
        top_k_teacher (`int`, *optional*):
            Number of the teacher's likeliest tokens that are compared one by one; all other tokens share one bucket.
            When `None`, the whole vocabulary is compared.
        kl_clip (`float`, *optional*):
            Upper bound, in nats, of what each vocabulary entry adds to the divergence of a token; clipped entries have
            no gradient. OPSD trains with 0.05. Not for a divergence of your own.
        vllm_importance_sampling_clip_max (`float`, *optional*, defaults to `3.0`):
            Largest importance weight of a token of `"sampled_reverse_kl"`, where an engine returns the
            log-probabilities that it sampled with; `None` for no bound. TRL's option of `GRPOConfig`, in its mode
            `"token_truncate"`.
        student_temperature (`float`, *optional*):
            Softmax temperature of the student in the loss. When `None`, `temperature`, that of the completions.
        teacher_temperature (`float`, *optional*):
            Softmax temperature of the teacher in the loss. When `None`, `temperature`.
        eval_temperature (`float`, *optional*):
            Sampling temperature in evaluations and predictions; 0 is greedy decoding. When `None`, that of the
            training. The loss keeps its own.
        position_discount (`float`, *optional*, defaults to `1.0`):
            In training, the weight of each completion token relative to the one before it, in (0, 1]. A `weigh` of your
            own gets such weights from `super().weigh(...)`.
        token_selection (`str`, *optional*):
            In training, which tokens of each row count in the loss. `"prefix"`: the first. `"random"`: drawn from
            `seed`, step and row. `"student_entropy"`: where the student is least certain. `"teacher_divergence"`: where
            the divergence is largest. The first two save forward passes and head FLOPs; the others save head FLOPs of
            the loss, and cost some to score the tokens; see `docs/objectives.md`. When `None`, all tokens.
        token_fraction (`float`, *optional*, defaults to `1.0`):
            With `token_selection`, the share of the tokens of a row that is kept, rounded up to whole tokens, in
            (0, 1].
        num_generations (`int`, *optional*, defaults to `1`):
            Completions of each prompt, as in TRL's `GRPOConfig`: a row of a batch is one completion, and the rows of an
            optimizer step, `per_device_train_batch_size` x processes x `gradient_accumulation_steps`, have to be a
            multiple. An epoch has as many times the steps.
        num_generations_eval (`int`, *optional*):
            The same in evaluations, and in `predict`. When `None`, `num_generations`.
        lmbda (`float`, *optional*, defaults to `1.0`):
            Share of rows whose completion the student generates, in [0, 1], as in TRL's `GKDConfig`, where the default
            is 0.5. The others are trained on with the column `completion` of the dataset; evaluations are fully
            on-policy.
        seq_kd (`bool`, *optional*, defaults to `False`):
            Whether the teacher generates the completions of these other rows, as in TRL's `GKDConfig`, from its own
            prompts and with the student's sampling options. The dataset needs no column `completion` then.
        sft_weight (`float`, *optional*, defaults to `0.0`):
            Weight of `-log p` of the student for each token of a completion that the student has not generated, of the
            rows that `lmbda` below 1 has, beside the divergence.
        reward_weight (`float`, *optional*, defaults to `0.0`):
            Weight of the policy gradient of `reward_funcs` beside the divergence: adds `-log p` of the student for each
            token of a completion, times its advantage over the others of its prompt. At 0 rewards are reported in
            evaluations, and functions are not called in training. Above, `num_generations` has to be at least 2.
        reward_weights (`list[float]`, *optional*):
            Weight of each reward function in their sum, as in TRL's `GRPOConfig`. When `None`, each has 1.
        scale_rewards (`str` or `bool`, *optional*, defaults to `"group"`):
            What differences between the rewards of a prompt are divided by, as there: `"group"` or `True`, their
            standard deviation; `"batch"`, that of the rewards of the step; `"none"` or `False`, nothing.
        multi_objective_aggregation (`str`, *optional*, defaults to `"sum_then_normalize"`):
            How several functions become one advantage, as there: `"sum_then_normalize"`, or `"normalize_then_sum"`,
            where the rewards of each are scaled in their prompt before they are added.
        overlong_prompts (`str`, *optional*, defaults to `"error"`):
            What to do with a prompt that leaves no room for `max_completion_length` tokens in the student's context:
            `"error"` raises an error that names the row, `"drop"` drops the row and counts it.
        loss_chunk_tokens (`int`, *optional*):
            Number of tokens whose logits exist at once in the loss. When `None`, as many as keep both models' logits
            under 0.6 GB, or 0.015 of the accelerator's memory if that is more. The result does not depend on it.
        padding_free (`bool`, *optional*, defaults to `False`):
            Whether student and teacher process the rows of a micro-batch as one packed sequence, without padding: with
            FlashAttention as one variable-length call, elsewhere with a block-diagonal mask of the square of their
            tokens. Refused for a model whose rows would then influence each other.
        max_tokens_per_microbatch (`int`, *optional*):
            Most tokens of a forward pass of the student in training, prompts and padding included. The rows of an
            optimizer step, `per_device_train_batch_size` x `gradient_accumulation_steps` in each process, are dealt to
            as few micro-batches as have no more, at least one for each accumulation step and equally many in all
            processes; a longer row gets a micro-batch of its own. When `None`, a micro-batch has
            `per_device_train_batch_size` rows. The gradient does not depend on it.
        overlap (`str`, *optional*):
            Which phases run concurrently. `"step"`: within an optimizer step, rows are scored and trained on as they
            end, while others are still generated; all with the same weights. Needs a rollout that generates outside the
            trainer's process, as a vLLM server does; see `docs/generation.md`. `"ahead"`: the rows of the next step are
            generated during this one, so with weights that are one step old. When `None`, rows are generated, then
            scored, then trained on.
        overlap_max_divergence (`float`, *optional*, defaults to `0.1`):
            With `overlap="ahead"`, the most that a step may move the student, in nats per token, for prefetched rows to
            be used after it; others are generated again.
        deterministic (`bool`, *optional*, defaults to `False`):
            Whether `overlap` trains on rows in their order, and not in that in which they end, so that sums are rounded
            alike in each run.
        teacher_trust_remote_code (`bool`, *optional*, defaults to `False`):
            Whether the teacher may be loaded from a repository that ships its own Python code.
        teacher_model_kind (`str`, *optional*):
            Makes the student its own teacher, which then needs context that the student does not have: `"base"` is the
            student as it was passed (with LoRA: without its adapter, so there is no second copy), `"ema"` its
            exponential moving average (with LoRA: of the adapter), `"live"` the current student. As in TRL's
            `SDFTConfig`, but off by default.
        teacher_update_rate (`float`, *optional*, defaults to `0.05`):
            Weight of the student in each update of the `"ema"` teacher, in (0, 1].
        teacher_sync_steps (`int`, *optional*, defaults to `1`):
            Optimizer steps between updates of the `"ema"` teacher.
        teacher_prompt_template (`str`, *optional*):
            Joins the prompt and the column `privileged_context` into the teacher's prompt; in a list of messages, it
            applies to the last user message. When `None`, `"{prompt}\n\n{privileged_context}"` for messages, and
            `"{privileged_context}\n\n{prompt}"` for text, whose end is where the answer begins.
        teacher_chat_template_kwargs (`dict` or `str`, *optional*):
            Chat template arguments that differ for the teacher, for instance `{"enable_thinking": True}`.
        teacher_offload (`str`, *optional*, defaults to `"none"`):
            Where the teacher's weights are kept; the results are the same. `"none"`: on the device. `"cpu"`: in host
            memory, on the device only during its forward passes. `"stream"`: in host memory, copied to the device layer
            by layer. `"zero3"`: sharded over the processes, in host memory; needs a launch with DeepSpeed ZeRO-3.
        teacher_cache_device (`str`, *optional*, defaults to `"auto"`):
            Device that holds the teacher's targets of a generation batch until each micro-batch needs them:
            `"accelerator"`, `"cpu"`, or `"auto"`, which is the accelerator up to 1 GB and the host beyond. On the host
            they are pinned, and copied back during the student's forward pass.
        teacher_server_url (`str`, `list` or `dict`, *optional*):
            URL of a server that has the teacher's layers, as `"http://127.0.0.1:8000"`; several, in a list or separated
            by commas, are replicas. A dict has those of several teachers by name. `teacher_model` is then the path or
            id of its checkpoint, of which only the output head is loaded; see `docs/teachers.md`.
        teacher_server_timeout (`float`, *optional*, defaults to `240.0`):
            Seconds to wait for the teacher's servers to be up, and then for their first rows, for these at least 30.
        nonfinite (`str`, *optional*, defaults to `"raise"`):
            What to do with an optimizer step whose loss or gradient is NaN or infinite on any process. `"raise"`: an
            error that names the side, the rank and the step. `"skip"`: skip the step, and count it in the log as
            `nonfinite/skipped_steps`. The weights are unchanged either way.
        nonfinite_skip_limit (`int`, *optional*, defaults to `10`):
            Maximum consecutive skipped steps, including those that are skipped while a float16 loss scale is found,
            whatever `nonfinite` is; one more is an error.
        collapse_guard (`str`, *optional*, defaults to `"warn"`):
            What to do when divergence, entropy, length or repetition of the last 10 optimizer steps leave the bounds in
            `docs/distributed.md`, compared with the first 10. `"warn"`: warn, once of each. `"stop"`: also save a
            checkpoint, beside all others, and end the training. When `None`, nothing.
        phase_timeout (`float`, *optional*):
            Seconds after which a phase of training (`complete`, `sync`, `reward`, `teach`, `compare` or `save`) is
            reported on stderr with the stacks of all threads. The run continues.
        report (`bool`, *optional*, defaults to `False`):
            Whether to record samples of completions, with the distributions of student and teacher at each token, and
            to write `report.html` to `output_dir` when the training ends. With `report_to="trackio"` the samples are
            also traces there. Needs vl-convert-python; see `docs/tools.md`.
        vllm_weight_sync (`str`, *optional*, defaults to `"auto"`):
            What is sent to vLLM after a student with a LoRA adapter has been updated: `"adapter"` sends the adapter
            alone, from memory, `"full"` all weights with the adapter merged, `"auto"` the adapter where vLLM supports
            it.
        vllm_sync_check (`str`, *optional*, defaults to `"every"`):
            Which weight syncs, with vLLM or SGLang, are verified by comparing its log-probabilities with the student's:
            `"every"`, `"first"` or `"never"`.
        sglang_server_url (`str`, *optional*):
            URL of a separately started SGLang server, for instance `"http://127.0.0.1:30000"`, which then generates the
            completions.
        sglang_server_timeout (`float`, *optional*, defaults to `240.0`):
            Seconds to wait for the SGLang server to be up.
        resume_with_changes (`list[str]`, *optional*):
            Names of settings that may differ from the run that wrote the checkpoint to resume from, for instance
            `["temperature"]`. Any other change to the objective or to the order of the rows is refused; see
            `docs/distributed.md`.

    Raises:
        ValueError: An option is out of range, unknown, or contradicts another.

    Example:

    ```python
    >>> from trl_opsd import OPSDConfig
    >>> OPSDConfig("out", divergence="forward_kl").build_divergence()
    ForwardKL()
    ```
    """

    bf16: bool | None = field(
        default=None,
        metadata={
            "help": "Whether to compute in bfloat16, with weights in float32. If not set, where there is an accelerator"
            " and no `fp16`."
        },
    )
    # the objective
    divergence: Annotated[
        Divergence | str | None, Option(a_divergence, instead=ASSIGN, also="f_divergence_type kl_type")
    ] = None
    skew: Annotated[float, Option(between(0, 1), of_divergences("skew"), also="skew_alpha")] = 0.1
    alpha: Annotated[float, Option(between(0, 1), of_divergences("alpha"), also="f_alpha_divergence_coef")] = 0.5
    top_k_teacher: Annotated[int | None, Option(integer(1) | None)] = None
    kl_clip: Annotated[
        float | None,
        Option(
            above(0) | None, resumed=True, words="each entry clipped at {:g} nats", also="jsd_token_clip token_clip"
        ),
    ] = None
    vllm_importance_sampling_clip_max: Annotated[
        float | None, Option(above(0) | None, of_divergences("clip_max"), also="distillation_is_clip")
    ] = 3.0
    student_temperature: Annotated[float | None, Option(above(0) | None, resumed=True)] = None
    teacher_temperature: Annotated[float | None, Option(above(0) | None, resumed=True)] = None
    eval_temperature: Annotated[float | None, Option(at_least(0) | None, read=LIVE)] = None
    position_discount: Annotated[
        float, Option(share(), resumed=True, words="each token counted {:g} times the one before")
    ] = 1.0
    token_selection: Annotated[str | None, Option(one_of(None, *EARLY, *LATE), (FRACTION,), resumed=True)] = None
    token_fraction: Annotated[float, Option(share(), (SELECTION,), resumed=True)] = 1.0
    # who generates completions, and how many
    num_generations: Annotated[int, Option(integer(1), resumed=True, also="rollout_n num_return_sequences")] = 1
    num_generations_eval: Annotated[int | None, Option(integer(1) | None)] = None
    lmbda: Annotated[float, Option(from_to(0, 1), resumed=True)] = 1.0
    seq_kd: Annotated[bool, Option(resumed=True, also="generate_from_teacher")] = False
    sft_weight: Annotated[
        float,
        Option(
            at_least(0),
            (OFF_POLICY,),
            resumed=True,
            words="plus {:g} times -log p of the dataset's completions",
            also="sft_alpha sft_coef",
        ),
    ] = 0.0
    # rewards
    reward_weight: Annotated[
        float,
        Option(at_least(0), resumed=True, words="plus {:g} times the policy gradient of rewards", also="reward_coef"),
    ] = 0.0
    reward_weights: Annotated[list[float] | None, Option(NUMBERS | None, (REWARDS,), resumed=REWARD_WEIGHT)] = None
    scale_rewards: Annotated[str, Option(one_of("group", "batch", "none"), (REWARD_WEIGHT,), resumed=REWARD_WEIGHT)] = (
        "group"
    )
    multi_objective_aggregation: Annotated[
        str, Option(one_of("sum_then_normalize", "normalize_then_sum"), (REWARD_WEIGHT,), resumed=REWARD_WEIGHT)
    ] = "sum_then_normalize"
    # rows and memory
    overlong_prompts: Annotated[str, Option(one_of("error", "drop"))] = "error"
    loss_chunk_tokens: Annotated[int | None, Option(integer(1) | None, read=LIVE)] = None
    padding_free: Annotated[bool, Option()] = False
    max_tokens_per_microbatch: Annotated[int | None, Option(integer(1) | None, also="token_budget", read=LIVE)] = None
    overlap: Annotated[str | None, Option(one_of(None, "step", "ahead"))] = None
    overlap_max_divergence: Annotated[float, Option(above(0), (OVERLAP_AHEAD,))] = 0.1
    deterministic: Annotated[bool, Option(needs=(OVERLAP_STEP,))] = False
    # the teacher
    teacher_trust_remote_code: Annotated[bool, Option(needs=(LOADED,))] = False
    teacher_model_kind: Annotated[str | None, Option(one_of(None, "base", "ema", "live"), resumed=True)] = None
    teacher_update_rate: Annotated[
        float, Option(share(), (EMA,), resumed=EMA, also="ref_model_mixup_alpha ema_rate")
    ] = 0.05
    teacher_sync_steps: Annotated[int, Option(integer(1), (EMA,), resumed=EMA, also="ref_model_sync_steps")] = 1
    teacher_prompt_template: Annotated[str | None, Option(check_template, (NO_PROMPT_FN, CONTEXT), resumed=True)] = None
    teacher_chat_template_kwargs: Annotated[dict | str | None, Option(resumed=True)] = None
    teacher_offload: Annotated[str, Option(one_of("none", "cpu", "stream", "zero3"))] = "none"
    teacher_cache_device: Annotated[str, Option(one_of("auto", "cpu", "accelerator"))] = "auto"
    teacher_server_url: Annotated[
        list | str | dict | None,
        Option(server_urls, may_differ=True, also="teacher_model_server_url teacher_server_urls use_teacher_server"),
    ] = None
    teacher_server_timeout: Annotated[float, Option(at_least(0), (TEACHER_SERVER,))] = 240.0
    # failures and monitoring
    nonfinite: Annotated[str, Option(one_of("raise", "skip"), read=LIVE)] = "raise"
    nonfinite_skip_limit: Annotated[int, Option(integer(1), (SKIPS,), read=LIVE)] = 10
    collapse_guard: Annotated[str | None, Option(one_of(None, "warn", "stop"), (LONG,))] = "warn"
    phase_timeout: Annotated[float | None, Option(above(0) | None)] = None
    report: Annotated[bool, Option()] = False
    # engines
    vllm_weight_sync: Annotated[str, Option(one_of("auto", "adapter", "full"), (VLLM,))] = "auto"
    vllm_sync_check: Annotated[str, Option(one_of("every", "first", "never"), (ENGINE,), read=LIVE)] = "every"
    sglang_server_url: Annotated[str | None, Option(ORIGIN | None)] = None
    sglang_server_timeout: Annotated[float, Option(at_least(0), (SGLANG,))] = 240.0
    resume_with_changes: Annotated[list[str] | None, Option(NAMES | None, read=LIVE)] = None
    vllm_server_host: str = field(
        default="127.0.0.1",
        metadata={"help": "Host of the student vLLM server. A host other than loopback must be set explicitly."},
    )

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        *DistillationConfig._VALID_DICT_FIELDS,
        "teacher_chat_template_kwargs",
        "teacher_server_url",
    ]

    def __post_init__(self) -> None:
        share_tracebacks()
        if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" or self.deepspeed:
            check_builds()
        self.check_as_given()
        self._choose_for_cpu()
        refuse(LAUNCH, Launch.of(self))
        for name, alias in ALIASES.items():  # transformers would warn of TRL's own default
            if getattr(self, name) is None:
                setattr(self, name, getattr(self, alias))
        super().__post_init__()
        settle_loading(self)
        settle_sampling(self)
        self.teacher_prompt_template = named_as_here(self.teacher_prompt_template)
        if isinstance(self.scale_rewards, bool):
            self.scale_rewards = "group" if self.scale_rewards else "none"
        check_values(self)
        refuse(AFTER, self)
        self.check_divergence(self.build_divergence())
        self._checked = option_values(self)

    def check_as_given(self) -> None:
        """Converts text, and checks what transformers and TRL would read before they do."""
        convert_text(self)
        check_json(self)
        check_values(self, DistillationConfig.__dataclass_fields__)

    def check_divergence(self, divergence: Divergence) -> None:
        """Checks that the other options allow an objective."""
        check_clip(self.kl_clip, divergence)
        check_sampled(self, divergence)

    def check_again(self) -> None:
        """Checks the options again, if some were changed since, as if the config was made with these values."""
        if option_values(self) != self._checked:
            OPSDConfig.__post_init__(self)  # a subclass has extended what the user asked for already

    def accept_changes(self) -> None:
        """Marks the present values as checked: TRL adapts some of them when it builds a trainer."""
        self._checked = option_values(self)

    def __setattr__(self, name: str, value: Any) -> None:
        there = vars(self)
        is_new = "_checked" in there and name not in there and not hasattr(type(self), name)
        if is_new and (why := without_meaning(name, type(self), {*there, *dir(type(self))})):
            raise AttributeError(
                f"`args.{name} = {value!r}` would have no effect: {why}. An attribute of your own needs another name.",
                name=name,
                obj=self,
            )
        super().__setattr__(name, value)
        if "_checked" in there and name in ALIASES:  # TRL assigns to the older name, and transformers reads the newer
            super().__setattr__(ALIASES[name], value)

    @classmethod
    def explain(cls, name: str, known: Collection[str]) -> str:
        """What an option of another trainer is called here, or the closest name."""
        return explained("option", name, known, cls)

    @property
    def device(self) -> torch.device:
        """Device of this process. accelerate gives CPU devices an index in a multi-process launch, and torch cannot
        load a file onto an indexed CPU device.
        """
        device: torch.device = super().device
        return torch.device("cpu") if device.type == "cpu" else device

    @property
    def has_engine(self) -> bool:
        """Whether an engine generates the completions, and not `transformers`."""
        return self.use_vllm or self.sglang_server_url is not None

    @property
    def settings(self) -> Settings:
        """What a divergence that is given by name is made from."""
        bound = self.vllm_importance_sampling_clip_max
        return Settings(beta=self.beta, skew=self.skew, alpha=self.alpha, clip_max=bound, top_k=self.top_k_teacher)

    @property
    def tempers_apart(self) -> bool:
        """Whether the loss has different temperatures for student and teacher."""
        student, teacher = self.student_temperature, self.teacher_temperature
        return (student or self.temperature) != (teacher or self.temperature)

    @property
    def pulls(self) -> bool:
        """Whether the loss has terms beside the divergence: a policy gradient of rewards, or `sft_weight`."""
        return bool(self.reward_weight or (self.sft_weight and self.lmbda < 1))

    def build_divergence(self) -> Divergence:
        """The objective as an object: `divergence`, or the one it names; else the one `beta` selects."""
        return divergence_of(self.divergence, self.settings)

    def objective(self, divergence: Divergence, temperatures: tuple[float, float], vocabulary: int | None) -> Objective:
        """How student and teacher are compared with these options."""
        return Objective(
            divergence=divergence,
            temperatures=temperatures,
            chunk_tokens=self.loss_chunk_tokens,
            vocabulary=vocabulary,
            kl_clip=self.kl_clip,
        )

    def build_selection(self) -> Selection | None:
        """Which tokens of a row count in the loss; `None` if all do."""
        if self.token_selection is None or self.token_fraction == 1:
            return None
        return Selection(self.token_selection, self.token_fraction)

    def to_dict(self) -> dict[str, Any]:
        """As transformers', for loggers and files, with a divergence object in words."""
        values: dict[str, Any] = super().to_dict()
        return {name: describe(value) if isinstance(value, Divergence) else value for name, value in values.items()}

    @property
    def teacher_template_kwargs(self) -> dict[str, Any]:
        """Chat template arguments that differ for the teacher; none by default."""
        assert not isinstance(self.teacher_chat_template_kwargs, str), "parsed and checked at construction"
        return dict(self.teacher_chat_template_kwargs or {})

    def _choose_for_cpu(self) -> None:
        """Without an accelerator, float32 unless the options or the launch ask for less, and no pinned memory."""
        if self.use_cpu or not (torch.accelerator.is_available() or is_torch_xla_available()):
            # accelerate hands its precision on, but compares that of DeepSpeed's config with this one.
            sharded = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
            launch = os.environ.get("ACCELERATE_MIXED_PRECISION") if sharded and self.bf16 is None else None
            self.bf16 = bool(self.bf16) or launch == "bf16"
            self.dataloader_pin_memory = False
