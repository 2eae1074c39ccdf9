"""The options of [`OPSDTrainer`], and every check that needs only the options; no check loads anything."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from transformers.utils import is_torch_xla_available

from trl_opsd._compat.trl import DistillationConfig
from trl_opsd._compat.urls import server_urls
from trl_opsd._compat.values import Natural, NotNegative, Positive, Share, Unit
from trl_opsd._compat.versions import ALIASES
from trl_opsd.data.completions import named_as_here
from trl_opsd.data.prompts import check_template
from trl_opsd.losses import Divergence, divergence_of
from trl_opsd.losses.divergence import describe
from trl_opsd.losses.validation import check_clip
from trl_opsd.options.names import StrictNames
from trl_opsd.options.normalize import check_sampled, settle_loading, settle_sampling, with_help
from trl_opsd.options.rules import check_launch, check_together
from trl_opsd.options.table import LOCAL, RESUMED, check_values, checked, option_values

_COMPILING = ("torch_compile", "torch_compile_backend", "torch_compile_mode")
_ADDRESSES = ("teacher_server_url", "sglang_server_url", "vllm_server_base_url")


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
    """Whether to compute in bfloat16, with float32 weights. When `None`, only with an accelerator and without
    `fp16`."""
    # the objective
    divergence: Divergence | str | dict | None = None
    """The objective: a name from `docs/objectives.md`, a name with its settings, for instance
    `{"skewed_reverse_kl": {"skew": 0.5}}`, or a `Divergence`. When `None`, `beta` decides, as in TRL: 0 is the forward
    KL, 1 the reverse KL, between them is the JSD."""
    top_k_teacher: Natural | None = None
    """Number of the teacher's likeliest tokens compared one by one, all others as one bucket. When `None`, all."""
    kl_clip: Annotated[Positive | None, RESUMED] = None
    """Upper bound, in nats, of what each vocabulary entry adds to a token's divergence (OPSD, arXiv 2601.18734).
    Refused with a divergence of your own. When `None`, no bound."""
    student_temperature: Annotated[Positive | None, RESUMED] = None
    """Softmax temperature of the student in the loss. When `None`, `temperature`."""
    teacher_temperature: Annotated[Positive | None, RESUMED] = None
    """Softmax temperature of the teacher in the loss. When `None`, `temperature`."""
    eval_temperature: NotNegative | None = None
    """Sampling temperature in evaluations and predictions; 0 is greedy decoding. When `None`, `temperature`."""
    # who generates completions, and how many
    num_generations: Annotated[Natural, RESUMED] = 1
    """Completions of each prompt, as in TRL's `GRPOConfig`: a row of a batch is one completion."""
    num_generations_eval: Natural | None = None
    """Completions of each prompt in evaluations and in `predict`. When `None`, `num_generations`."""
    lmbda: Annotated[Unit, RESUMED] = 1.0
    """Share of rows that the student completes, as in TRL's `GKDConfig` (GKD, arXiv 2306.13649); the others have a
    column `completion`, or with `seq_kd` the teacher completes them."""
    seq_kd: Annotated[bool, RESUMED] = False
    """Whether the teacher completes the share `1 - lmbda` of rows, as TRL's `GKDConfig` (GKD, arXiv 2306.13649)."""
    methods: dict | str | None = None
    """Methods by name with their settings, for instance `{"contrast": {"weight": 0.5}}`, or `module.Class` of a method
    of your own; see `docs/extending.md`. In Python also `OPSDTrainer(methods=[...])`."""
    # rows and memory
    overlong_prompts: Literal["error", "drop"] = "error"
    """Whether a prompt that leaves no room for a completion is an error, or is dropped and counted."""
    loss_chunk_tokens: Natural | None = None
    """Number of tokens whose logits exist at once in the loss; the result does not depend on it. When `None`, as many
    as take 0.6 GB, or 0.015 of the accelerator's memory if that is more."""
    padding_free: bool = False
    """Whether the models process the rows of a micro-batch concatenated, without padding: with FlashAttention as one
    sequence, with SDPA in several of about 1,024 tokens, as its time grows with the square of the length."""
    max_tokens_per_microbatch: Natural | None = None
    """Maximum tokens of a micro-batch in training, padding included; a longer row is a micro-batch alone. The gradient
    does not depend on it. When `None`, a micro-batch has `per_device_train_batch_size` rows."""
    overlap: Literal["step", "ahead"] | None = None
    """Which phases run concurrently, none when `None`: `"step"` trains on each row once it is generated; `"ahead"`
    generates the rows of the next step during a step. See `docs/generation.md`."""
    overlap_max_divergence: Positive = 0.1
    """Maximum change of the student in one step, in nats per token, up to which rows generated ahead are used; above it
    the trainer generates them again."""
    deterministic: bool = False
    """Whether runs are reproducible, at a cost in speed: `overlap` trains on rows in order, not as they are generated,
    and requests to a generating server have seeds (in evaluations they always do)."""
    # the teacher
    cross_tokenizer: Annotated[Literal["bytes"] | None, RESUMED] = None
    """How to compare a teacher that has another tokenizer than the student: `"bytes"`, by distributions over the next
    byte (arXiv 2506.14123, `docs/tokenizers.md`). When `None`, the trainer refuses such a teacher."""
    cross_tokenizer_missed: Annotated[Share, RESUMED] = 0.01
    """Maximum probability that may be missing from a distribution over the next byte; bytes above it are not compared.
    The lower it is, the more alternative tokens the models score; at 1 none."""
    teacher_trust_remote_code: bool = False
    """Whether loading the teacher may run Python code from its repository."""
    teacher_model_kind: Annotated[Literal["base", "ema", "live"] | None, RESUMED] = None
    """Makes the student its own teacher, which then needs context of its own: `"base"` is the initial student, `"ema"`
    its exponential moving average, `"live"` the current student."""
    teacher_update_rate: Annotated[Share, RESUMED] = 0.05
    """Weight of the student in each update of the `"ema"` teacher."""
    teacher_sync_steps: Annotated[Natural, RESUMED] = 1
    """Optimizer steps between updates of the `"ema"` teacher."""
    environment_timeout: Positive | None = None
    """Maximum seconds for each `reset` of an environment, all its calls in one turn, `get_reward` and `get_feedback`. A
    late call ends the episode, without a reward; a late `reset` ends the run. When `None`, no limit."""
    teacher_prompt_template: Annotated[str | None, RESUMED] = None
    """Template of the teacher's prompt from `{prompt}` and column `{privileged_context}`; see `docs/teachers.md`."""
    feedback_template: Annotated[str, RESUMED] = "Feedback on an earlier attempt:\n\n{feedback}"
    """Template, in the teacher's prompt, of what an environment's `get_feedback` returns."""
    teacher_chat_template_kwargs: Annotated[dict | str | None, RESUMED] = None
    """Chat template arguments that differ for the teacher, for instance `{"enable_thinking": True}`."""
    teacher_offload: Literal["none", "cpu", "stream", "zero3"] = "none"
    """Where the teacher's weights are kept: on the device; in host memory, copied there for a forward pass (`"cpu"`) or
    layer by layer (`"stream"`); or sharded over the processes (`"zero3"`)."""
    teacher_cache_device: Literal["auto", "cpu", "accelerator"] = "auto"
    """Device that holds the teacher's targets until each micro-batch needs them; `"auto"` is the accelerator up to 1 GB
    and the host beyond."""
    teacher_prefix_cache_gb: NotNegative = 0.0
    """Size in GB (1e9 bytes), divided among teachers with fixed weights, of a cache of keys and values of the prefix
    that all rows of a batch share, such as a document: a teacher computes it once. 0 disables it."""
    teacher_server_url: Annotated[dict | str | None, LOCAL] = None
    """URL of a vLLM or SGLang server that runs the teacher, or a dict of URLs by teacher. `teacher_model` is then the
    path of the same checkpoint, of which the trainer keeps only the output head; see `docs/teachers.md`."""
    teacher_server_targets: Literal["states", "student_top_k", "teacher_top_k", "both_top_k"] | None = None
    """What the trainer requests from the teacher's servers: hidden states from a pooling server; or from a generating
    server log-probabilities, of the student's likeliest tokens, the teacher's, or both. When `None`, what the servers
    offer."""
    teacher_server_top_k: Natural | None = None
    """How many likeliest tokens, of each model, the trainer requests from a generating server; the loss treats all
    other tokens as one. When `None`, 64, or the server's maximum."""
    teacher_targets: Annotated[str | None, LOCAL] = None
    """Folder that `trl-opsd targets` has written. The student learns from these targets, without a teacher
    (`lmbda=0`)."""
    teacher_server_timeout: NotNegative = 240.0
    """Seconds to wait for the teacher's servers to start, and then (at least 30) for their first rows."""
    # failures and monitoring
    nonfinite: Literal["raise", "skip"] = "raise"
    """Whether the trainer stops, or skips and counts the step, when a loss or gradient is NaN or infinite. Either way
    the weights stay unchanged."""
    nonfinite_skip_limit: Natural = 10
    """Maximum consecutive skipped steps, including those in the search for a float16 loss scale; one more is an
    error."""
    phase_timeout: Positive | None = None
    """Seconds after which the trainer prints the stacks of all threads if a phase of a step, such as generation, has
    not ended; the run continues. When `None`, never."""
    report: bool = False
    """Whether to record samples of completions, and to write `report.html` at the end; see `docs/tools.md`."""
    # engines
    vllm_weight_sync: Literal["auto", "adapter", "full"] = "auto"
    """What the trainer sends to vLLM or SGLang after each update of a student with a LoRA adapter: the adapter, all
    weights, or the adapter where the engine takes it."""
    vllm_sync_check: Literal["every", "first", "never"] = "every"
    """Which weight syncs the trainer verifies, by comparing log-probabilities of vLLM or SGLang with the student's."""
    sglang_server_url: str | None = None
    """URL of a separately started SGLang server that generates the completions."""
    resume_with_changes: list[str] | None = None
    """Options that a resume may change, for instance `["temperature"]`; see `docs/distributed.md`."""
    vllm_server_host: str = "127.0.0.1"
    """Host of the student vLLM server. A host other than loopback must be set explicitly."""

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        *DistillationConfig._VALID_DICT_FIELDS,
        "teacher_chat_template_kwargs",
        "teacher_server_url",
        "divergence",
        "methods",
    ]

    def __post_init__(self) -> None:
        # 1. each option by itself: its type, its bounds
        check_values(self)
        # 2. the launch, before transformers starts accelerate
        self._choose_for_cpu()
        check_launch(self)
        for name, alias in ALIASES.items():  # transformers would warn of TRL's own default
            if getattr(self, name) is None:
                setattr(self, name, getattr(self, alias))
        # transformers would compile the whole model, whose `forward` nothing calls, and allow TF32.
        compiles, backend, mode = (getattr(self, name) for name in _COMPILING)
        self.__dict__.update(zip(_COMPILING, (False, None, None), strict=True))
        super().__post_init__()
        if compiles or backend or mode:
            self.__dict__.update(zip(_COMPILING, (True, backend or "inductor", mode), strict=True))
        for name in _ADDRESSES:
            server_urls(name, getattr(self, name))
        for name in self._VALID_DICT_FIELDS:
            if name.endswith("_kwargs"):
                checked(name, dict | None, getattr(self, name))
        # 3. names of today, and what `generation_kwargs` say last
        settle_loading(self)
        settle_sampling(self)
        self.teacher_prompt_template = named_as_here(self.teacher_prompt_template)
        check_template("teacher_prompt_template", self.teacher_prompt_template)
        check_template("feedback_template", self.feedback_template, ("feedback",))
        # 4. options together
        check_together(self)
        self.check_divergence(self.build_divergence())
        self._checked = option_values(self)

    def check_divergence(self, divergence: Divergence) -> None:
        """Checks that the other options allow an objective."""
        check_clip(self.kl_clip, divergence)
        check_sampled(self, divergence)

    def check_again(self) -> None:
        """Checks the options again, if some were changed since, as if the config was made with these values."""
        if option_values(self) != self._checked:
            OPSDConfig.__post_init__(self)  # a subclass has extended what the user asked for already

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if "_checked" in vars(self) and name in ALIASES:  # TRL assigns the older name, transformers reads the newer
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
    def tempers_apart(self) -> bool:
        """Whether the loss has different temperatures for student and teacher."""
        student, teacher = self.student_temperature, self.teacher_temperature
        return (student or self.temperature) != (teacher or self.temperature)

    def build_divergence(self) -> Divergence:
        """The objective as an object."""
        return divergence_of(self.divergence, self.beta, self.top_k_teacher)

    def to_dict(self) -> dict[str, Any]:
        """As transformers', for loggers and files, with a divergence or a config of torchao in words."""
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
