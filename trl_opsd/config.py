"""The options of [`OPSDTrainer`], and every check that needs only the options; no check loads anything."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
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
from trl_opsd.losses.entrywise import NoDivergence
from trl_opsd.losses.objective import Objective
from trl_opsd.losses.registry import DIVERGENCES, Settings, divergence_of
from trl_opsd.losses.token_selection import EARLY, LATE, Selection
from trl_opsd.losses.validation import check_clip
from trl_opsd.options.foreign_names import StrictNames, without_meaning
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
    ANCHOR,
    ANCHORS,
    ASSIGN,
    CONTEXT,
    CONTRASTS,
    CONTROLS,
    EMA,
    ENGINE,
    ENVIRONMENTS,
    EXTRAPOLATES,
    FRACTION,
    GATE,
    GROWS,
    LIVE,
    LOADED,
    LONG,
    NAME,
    NAMES,
    NO_PROMPT_FN,
    NO_WEIGHT_FN,
    NUMBER,
    NUMBERS,
    OFF_POLICY,
    ORIGIN,
    OVERLAP_AHEAD,
    OVERLAP_STEP,
    POSITIVES,
    REWARD_WEIGHT,
    REWARDS,
    SELECTION,
    SGLANG,
    SKIPPED,
    SKIPS,
    SUCCESS,
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
    """Configuration of [`OPSDTrainer`]: every field of [`~trl.DistillationConfig`], with its name, default and
    meaning, and the fields below.

    Two defaults differ, for safety: `vllm_server_host` is loopback, and `trust_remote_code` does not cover the teacher.
    Without an accelerator, `bf16` is off unless it is set; TRL's default is refused there.

    Raises:
        ValueError: An option is out of range, unknown, or contradicts another.

    Example:

    ```python
    >>> from trl_opsd import OPSDConfig
    >>> OPSDConfig("out", divergence="forward_kl").build_divergence()
    ForwardKL()
    ```
    """

    bf16: bool | None = None
    """Whether to compute in bfloat16, with float32 weights. If not set, where there is an accelerator and no `fp16`."""
    # the objective
    divergence: Annotated[
        Divergence | str | None, Option(a_divergence, instead=ASSIGN, also="f_divergence_type kl_type")
    ] = None
    """The objective: a name from `docs/objectives.md`, or a `Divergence`. When `None`, `beta` decides, as in TRL: 0 is
    the forward KL, 1 the reverse KL, between them is the JSD."""
    skew: Annotated[float, Option(between(0, 1), of_divergences("skew"), also="skew_alpha")] = 0.1
    """Of the skewed KLs, the share of the first distribution in the mixture that it is compared with."""
    alpha: Annotated[float, Option(between(0, 1), of_divergences("alpha"), also="f_alpha_divergence_coef")] = 0.5
    """Of the α-divergence: towards the reverse KL near 0, towards the forward KL near 1."""
    top_k_teacher: Annotated[int | None, Option(integer(1) | None, also="gkd_logits_topk")] = None
    """Number of the teacher's likeliest tokens that are compared one by one; all others share one bucket."""
    kl_clip: Annotated[
        float | None,
        Option(
            above(0) | None, resumed=True, words="each entry clipped at {:g} nats", also="jsd_token_clip token_clip"
        ),
    ] = None
    """Upper bound, in nats, of what each vocabulary entry adds to a token's divergence. Not for one of your own."""
    vllm_importance_sampling_clip_max: Annotated[
        float | None, Option(above(0) | None, of_divergences("clip_max"), also="distillation_is_clip")
    ] = 3.0
    """Largest importance weight of a token of `"sampled_reverse_kl"` with an engine; `None` for no bound."""
    student_temperature: Annotated[float | None, Option(above(0) | None, resumed=True)] = None
    """Softmax temperature of the student in the loss. When `None`, `temperature`."""
    teacher_temperature: Annotated[float | None, Option(above(0) | None, resumed=True)] = None
    """Softmax temperature of the teacher in the loss. When `None`, `temperature`."""
    eval_temperature: Annotated[float | None, Option(at_least(0) | None, read=LIVE)] = None
    """Sampling temperature in evaluations and predictions; 0 is greedy decoding. When `None`, `temperature`."""
    contrast_weight: Annotated[
        float,
        Option(at_least(0), resumed=True, words="moved {:g} times away from a contrast", also="contrast_alpha"),
    ] = 0.0
    """How far the target moves from the teacher's distribution away from the one in the context of the column
    `contrast_context` or `contrast_prompt`: log-probabilities plus so many times their difference."""
    contrast_clip: Annotated[float | None, Option(above(0) | None, (CONTRASTS,), resumed=CONTRASTS)] = None
    """Soft bound of that difference in nats, `c * tanh(difference / c)`. When `None`, none."""
    extrapolation: Annotated[
        float,
        Option(
            at_least(0),
            resumed=True,
            words="extrapolated {:g} times from the student as it was passed",
            also="lambda_vals",
        ),
    ] = 1.0
    """Factor of the difference between the teacher's log-probabilities and those of the student as it was passed, to
    which the target adds it; above 1 beyond the teacher."""
    extrapolation_reference: Annotated[
        str | None,
        Option(NAME | None, (EXTRAPOLATES,), resumed=True, words="with the teacher {!r} in place of that student"),
    ] = None
    """The name of one of several teachers that stands in place of the student as it was passed: in G-OPD, the model
    that the teacher was trained from. Rows name another as their teacher."""
    anchor_weight: Annotated[
        float,
        Option(
            at_least(0),
            resumed=True,
            words="plus {:g} times the divergence from the student as it was passed",
            also="ref_kl_coef kl_coef",
        ),
    ] = 0.0
    """Weight of the divergence of the student from itself as it was passed, which is added to that from the teacher."""
    anchor_divergence: Annotated[str, Option(one_of(*ANCHORS), (ANCHOR,), resumed=ANCHOR)] = "reverse_kl"
    """That divergence."""
    position_discount: Annotated[
        float, Option(above(0), resumed=True, words="each token counted {:g} times the one before")
    ] = 1.0
    """In training, the weight of each completion token relative to the one before it; above 1, later tokens count
    more."""
    position_weights: Annotated[
        list[float] | None, Option(POSITIVES | None, resumed=True, words="weighted along the completion by {}")
    ] = None
    """In training, weights at equally spaced places of a completion, from its first token to its last, between which
    they are interpolated. When `None`, all are 1."""
    equal_turns: Annotated[
        bool, Option(resumed=True, words="each turn alike, a completion without tools being one")
    ] = False
    """In training, whether each turn of a completion weighs as much as any other, however long it is; a completion
    without tools is one turn. Otherwise each token does."""
    token_selection: Annotated[str | None, Option(one_of(None, *EARLY, *LATE), (FRACTION,), resumed=True)] = None
    """In training, which tokens of each row count in the loss: the first, random ones, or those with the highest
    entropy or divergence; see `docs/objectives.md`. When `None`, all."""
    token_fraction: Annotated[float, Option(share(), (SELECTION,), resumed=True)] = 1.0
    """Share of the tokens of a row that `token_selection` keeps, rounded up to whole tokens."""
    # who generates completions, and how many
    num_generations: Annotated[int, Option(integer(1), resumed=True, also="rollout_n num_return_sequences")] = 1
    """Completions of each prompt, as in TRL's `GRPOConfig`: a row of a batch is one completion."""
    num_generations_eval: Annotated[int | None, Option(integer(1) | None)] = None
    """The same in evaluations, and in `predict`. When `None`, `num_generations`."""
    completion_length_start: Annotated[
        int | None, Option(integer(1) | None, resumed=True, words="completions of at most {} tokens at first")
    ] = None
    """Most tokens of a completion in the first step of a training, from where the limit rises to
    `max_completion_length`. When `None`, it is the same in all steps."""
    completion_length_steps: Annotated[int, Option(integer(1), (GROWS,), resumed=GROWS)] = 100
    """Optimizer steps until it has risen."""
    skip_prompts: Annotated[
        float | str | None,
        Option(SKIPPED | None, (NO_WEIGHT_FN,), resumed=True, words="prompts skipped by their last visit ({})"),
    ] = None
    """In training, which prompts nothing is generated for when they come again: `"flat_groups"`, those whose
    completions all had the same reward; a number, those whose divergence from the teacher was below it, in nats per
    token. The visit after that is a whole one. When `None`, none."""
    lmbda: Annotated[float, Option(from_to(0, 1), resumed=True)] = 1.0
    """Share of rows that the student completes, as in TRL's `GKDConfig`; the others have a column `completion`."""
    seq_kd: Annotated[bool, Option(resumed=True, also="generate_from_teacher")] = False
    """Whether the teacher generates the completions of these other rows, as in TRL's `GKDConfig`."""
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
    """Weight of `-log p` of the student beside the divergence, for completions that it has not generated."""
    # rewards
    reward_weight: Annotated[
        float,
        Option(at_least(0), resumed=True, words="plus {:g} times the policy gradient of rewards", also="reward_coef"),
    ] = 0.0
    """Weight of the policy gradient of `reward_funcs` beside the divergence. At 0 they are only logged."""
    reward_weights: Annotated[list[float] | None, Option(NUMBERS | None, (REWARDS,), resumed=REWARD_WEIGHT)] = None
    """Weight of each reward function in their sum, as in TRL's `GRPOConfig`. When `None`, each has 1."""
    scale_rewards: Annotated[str, Option(one_of("group", "batch", "none"), (REWARD_WEIGHT,), resumed=REWARD_WEIGHT)] = (
        "group"
    )
    """Standard deviation that rewards are divided by, as there: `"group"` or `True`, of those of a prompt; `"batch"`,
    of the step; `"none"` or `False`, none."""
    multi_objective_aggregation: Annotated[
        str, Option(one_of("sum_then_normalize", "normalize_then_sum"), (REWARD_WEIGHT,), resumed=REWARD_WEIGHT)
    ] = "sum_then_normalize"
    """Whether several rewards are scaled after they are added, or each before, as there."""
    reward_gate: Annotated[
        float | str | None, Option(GATE | None, (REWARDS,), resumed=True, words="rows gated by their reward ({})")
    ] = None
    """In training, which completions of the student count in the loss: those with a reward of at least this number, or
    all, weighted by `"reward"` or by `"advantage"` where these are above 0. When `None`, all alike."""
    # rows and memory
    overlong_prompts: Annotated[str, Option(one_of("error", "drop"))] = "error"
    """Whether a prompt that leaves no room for a completion is an error, or is dropped and counted."""
    loss_chunk_tokens: Annotated[int | None, Option(integer(1) | None, read=LIVE)] = None
    """Number of tokens whose logits exist at once in the loss; the result does not depend on it. When `None`, as many
    as take 0.6 GB, or 0.015 of the accelerator's memory if that is more."""
    padding_free: Annotated[bool, Option(also="use_remove_padding packing_samples")] = False
    """Whether the rows of a micro-batch are read as one sequence without padding, in a variable-length call of
    FlashAttention; with SDPA, whose time grows with the square of the sequence, as several of about 1,024 tokens."""
    max_tokens_per_microbatch: Annotated[int | None, Option(integer(1) | None, also="token_budget", read=LIVE)] = None
    """Most tokens of a micro-batch in training, padding included; a longer row gets one of its own. The gradient does
    not depend on it. When `None`, a micro-batch has `per_device_train_batch_size` rows."""
    overlap: Annotated[str | None, Option(one_of(None, "step", "ahead"))] = None
    """Which phases run concurrently: `"step"`, rows are trained on as they end; `"ahead"`, the rows of the next step
    are generated during this one. See `docs/generation.md`."""
    overlap_max_divergence: Annotated[float, Option(above(0), (OVERLAP_AHEAD,))] = 0.1
    """The most that a step may move the student, in nats per token, for rows generated ahead to be used after it;
    others are generated again."""
    deterministic: Annotated[bool, Option(needs=(OVERLAP_STEP,))] = False
    """Whether `overlap` trains on rows in their order, so that sums are rounded alike in each run."""
    # the teacher
    cross_tokenizer: Annotated[
        str | None, Option(one_of(None, "bytes"), resumed=True, words="compared by {}, as the tokenizers differ")
    ] = None
    """How a teacher is compared whose tokenizer is not the student's: `"bytes"`, by distributions over the next byte
    (`docs/tokenizers.md`). When `None`, such a teacher is refused."""
    teacher_trust_remote_code: Annotated[bool, Option(needs=(LOADED,))] = False
    """Whether the teacher may be loaded from a repository that ships its own Python code."""
    teacher_model_kind: Annotated[str | None, Option(one_of(None, "base", "ema", "live"), resumed=True)] = None
    """Makes the student its own teacher, which then needs context of its own: `"base"` is the student as it was passed,
    `"ema"` its exponential moving average, `"live"` the current student."""
    teacher_update_rate: Annotated[
        float, Option(share(), (EMA,), resumed=EMA, also="ref_model_mixup_alpha ema_rate")
    ] = 0.05
    """Weight of the student in each update of the `"ema"` teacher."""
    teacher_sync_steps: Annotated[int, Option(integer(1), (EMA,), resumed=EMA, also="ref_model_sync_steps")] = 1
    """Optimizer steps between updates of the `"ema"` teacher."""
    teacher_context: Annotated[
        str | None, Option(one_of(None, "group_success"), (REWARDS, NO_PROMPT_FN), resumed=True)
    ] = None
    """What the teacher reads beside the columns: `"group_success"`, another completion of the same prompt whose reward
    is high enough; a row without one, and without context in the columns, does not count in the loss."""
    feedback_template: Annotated[
        str, Option(partial(check_template, names=("feedback",)), (ENVIRONMENTS,), resumed=ENVIRONMENTS)
    ] = "Feedback on an earlier attempt:\n\n{feedback}"
    """How the teacher is told what an environment's `get_feedback` returns."""
    environment_timeout: Annotated[float | None, Option(above(0) | None, (ENVIRONMENTS,))] = None
    """Seconds that `reset` of an environment, its calls in one turn, `get_reward` and `get_feedback` may take each.
    After that the episode ends, without a reward; a `reset` ends the run. When `None`, as long as they need."""
    success_threshold: Annotated[
        float, Option(NUMBER, (SUCCESS,), resumed=SUCCESS, also="success_reward_threshold")
    ] = 1.0
    """Least reward of that completion."""
    teacher_control: Annotated[
        str | None,
        Option(one_of(None, *CONTROLS), resumed=True, words="control: {} teacher"),
    ] = None
    """A control for studies: `"shuffled"`, the teacher reads what belongs to another prompt; `"unprivileged"`, the
    student's; `"constant"`, nothing is learned from it, but the least likely fifth of the tokens is pushed down."""
    teacher_prompt_template: Annotated[str | None, Option(check_template, (NO_PROMPT_FN, CONTEXT), resumed=True)] = None
    """Joins the prompt and the column `privileged_context` into the teacher's prompt; see `docs/teachers.md`."""
    teacher_chat_template_kwargs: Annotated[dict | str | None, Option(resumed=True)] = None
    """Chat template arguments that differ for the teacher, for instance `{"enable_thinking": True}`."""
    teacher_offload: Annotated[str, Option(one_of("none", "cpu", "stream", "zero3"))] = "none"
    """Where the teacher's weights are kept: on the device; in host memory, copied there for a forward pass (`"cpu"`) or
    layer by layer (`"stream"`); or sharded over the processes (`"zero3"`)."""
    teacher_cache_device: Annotated[str, Option(one_of("auto", "cpu", "accelerator"))] = "auto"
    """Device that holds the teacher's targets until each micro-batch needs them; `"auto"` is the accelerator up to 1 GB
    and the host beyond."""
    teacher_server_url: Annotated[
        list | str | dict | None,
        Option(server_urls, may_differ=True, also="teacher_model_server_url teacher_server_urls use_teacher_server"),
    ] = None
    """URL of a server that has the teacher's layers. Several are tried in turn; a dict has those of several teachers.
    `teacher_model` is then the checkpoint of its output head; see `docs/teachers.md`."""
    teacher_server_timeout: Annotated[float, Option(at_least(0), (TEACHER_SERVER,))] = 240.0
    """Seconds to wait for the teacher's servers to be up, and then for their first rows, for these at least 30."""
    # failures and monitoring
    nonfinite: Annotated[str, Option(one_of("raise", "skip"), read=LIVE)] = "raise"
    """Whether an optimizer step whose loss or gradient is NaN or infinite is an error, or is skipped and counted. The
    weights are unchanged either way."""
    nonfinite_skip_limit: Annotated[int, Option(integer(1), (SKIPS,), read=LIVE)] = 10
    """Maximum consecutive skipped steps, including those while a float16 loss scale is found; one more is an error."""
    collapse_guard: Annotated[str | None, Option(one_of(None, "warn", "stop"), (LONG,))] = "warn"
    """Whether to warn, or to save a checkpoint and end the training, when the last 10 optimizer steps leave the bounds
    in `docs/distributed.md`. When `None`, nothing."""
    phase_timeout: Annotated[float | None, Option(above(0) | None)] = None
    """Seconds after which a phase of training is reported, with the stacks of all threads; the run continues."""
    report: Annotated[bool, Option()] = False
    """Whether to record samples of completions, and to write `report.html` at the end; see `docs/tools.md`."""
    # engines
    vllm_weight_sync: Annotated[str, Option(one_of("auto", "adapter", "full"), (VLLM,))] = "auto"
    """What is sent to vLLM after an update of a student with a LoRA adapter: the adapter, all weights, or the adapter
    where vLLM supports it."""
    vllm_sync_check: Annotated[str, Option(one_of("every", "first", "never"), (ENGINE,), read=LIVE)] = "every"
    """Which weight syncs, with vLLM or SGLang, are verified by comparing its log-probabilities with the student's."""
    sglang_server_url: Annotated[str | None, Option(ORIGIN | None)] = None
    """URL of a separately started SGLang server, which then generates the completions."""
    sglang_server_timeout: Annotated[float, Option(at_least(0), (SGLANG,))] = 240.0
    """Seconds to wait for the SGLang server to be up."""
    resume_with_changes: Annotated[list[str] | None, Option(NAMES | None, read=LIVE)] = None
    """Options that a resume may change, for instance `["temperature"]`; see `docs/distributed.md`."""
    vllm_server_host: str = "127.0.0.1"
    """Host of the student vLLM server. A host other than loopback must be set explicitly."""

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
                f"`args.{name} = {value!r}` would have no effect: {why}. Use another name for your own attribute.",
                name=name,
                obj=self,
            )
        super().__setattr__(name, value)
        if "_checked" in there and name in ALIASES:  # TRL assigns to the older name, and transformers reads the newer
            super().__setattr__(ALIASES[name], value)

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
    def anchor(self) -> Divergence | None:
        """The divergence from the student as it was passed; `None` without one."""
        return DIVERGENCES[self.anchor_divergence](self.settings) if self.anchor_weight else None

    @property
    def tempers_apart(self) -> bool:
        """Whether the loss has different temperatures for student and teacher."""
        student, teacher = self.student_temperature, self.teacher_temperature
        return (student or self.temperature) != (teacher or self.temperature)

    @property
    def pulls(self) -> bool:
        """Whether the loss has terms beside the divergence: a policy gradient of rewards, or `sft_weight`."""
        return bool(self.reward_weight or (self.sft_weight and self.lmbda < 1) or self.constant_advantage)

    @property
    def calls_rewards(self) -> bool:
        """Whether training depends on rewards."""
        named = self.reward_gate is not None or self.teacher_context is not None or self.skip_prompts == "flat_groups"
        return self.reward_weight > 0 or named

    @property
    def differs_from_itself(self) -> bool:
        """Whether a student without a teacher's context has something to learn from itself."""
        return self.tempers_apart or self.pulls or self.contrast_weight > 0 or self.extrapolation != 1

    @property
    def constant_advantage(self) -> float:
        """The advantage of every token that counts, of a control: "fixed negative" in arXiv 2608.31046."""
        return -0.5 if self.teacher_control == "constant" else 0.0

    def completion_limit(self, step: int) -> int:
        """Most tokens of a completion that is generated in training after so many steps."""
        most, first = self.max_completion_length, self.completion_length_start
        if first is None:
            return most
        return most - int((most - first) * max(0.0, 1 - step / self.completion_length_steps))

    def build_divergence(self) -> Divergence:
        """The objective as an object: `divergence`, or the one it names; else the one `beta` selects."""
        if self.teacher_control == "constant":
            return NoDivergence()
        return divergence_of(self.divergence, self.settings)

    def objective(self, divergence: Divergence, temperatures: tuple[float, float], vocabulary: int | None) -> Objective:
        """How student and teacher are compared with these options."""
        return Objective(
            divergence=divergence,
            temperatures=temperatures,
            chunk_tokens=self.loss_chunk_tokens,
            vocabulary=vocabulary,
            kl_clip=self.kl_clip,
            contrast=(self.contrast_weight, self.contrast_clip),
            extrapolation=self.extrapolation,
            anchor_weight=self.anchor_weight,
            anchor=self.anchor,
        )

    @property
    def reads_origin(self) -> bool:
        """Whether the loss uses the student as it was passed."""
        return self.extrapolation != 1 or self.anchor_weight > 0

    def build_selection(self) -> Selection | None:
        """Which tokens of a row count in the loss; `None` if all do."""
        if self.teacher_control == "constant":
            return Selection("student_surprise", 0.2)
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
