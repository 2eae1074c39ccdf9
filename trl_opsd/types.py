"""The values that flow through one training step: shapes and units only; no loss is computed here.

B rows · P prompt tokens · C completion tokens · N tokens in the loss · V vocabulary size · H hidden size
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor


class Length(NamedTuple):
    """Numbers of tokens of a row without the padding around it."""

    prompt: int
    completion: int
    masked: int
    """Those that no token may attend to, between others."""

    @property
    def total(self) -> int:
        """Tokens from the first to the last that may be attended to."""
        return self.prompt + self.completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """The student's prompts and completions: prompts padded on the left, completions on the right."""

    prompt_ids: Tensor
    """[B, P], token ids."""
    prompt_mask: Tensor
    """[B, P], 1 where the token is real."""
    completion_ids: Tensor
    """[B, C], token ids."""
    completion_mask: Tensor
    """[B, C], 1 where the token is real and may be attended to."""
    weights: Tensor
    """[B, C], float32: weight of each token in the loss, at least 0; 0 for padding and for tool output."""
    lengths: tuple[Length, ...] | None = None
    """B of them, in host memory; `None` where they were not read from the masks yet."""
    begins_at: int | None = None
    """Where rows are divided by position among processes, the position of the first token of this part; else `None`.

    The last token of a part is the first one of the next, and is predicted here but read there."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Values of the rollout that are not row-aligned tensors; [`select`], [`chunks`] and [`to`] keep them unchanged."""

    @classmethod
    def unpack(cls, batch: Mapping[str, Any]) -> Rollout:
        """Builds a rollout from the row-aligned tensors that TRL passes between generation and loss."""
        mask, tool_mask = batch["completion_mask"], batch.get("tool_mask")
        weights = batch.get("loss_weights")
        if weights is None:
            weights = ((mask if tool_mask is None else mask * tool_mask) != 0).float()
        return cls(
            prompt_ids=batch["prompt_ids"],
            prompt_mask=batch["prompt_mask"],
            completion_ids=batch["completion_ids"],
            completion_mask=mask,
            weights=weights,
            lengths=None if (known := batch.get("lengths")) is None else tuple(known),
            begins_at=batch.get("begins_at"),
        )

    @property
    def counts(self) -> Tensor:
        """[B, C], whether the token's weight in the loss is not 0."""
        return self.weights != 0

    @property
    def input_ids(self) -> Tensor:
        """[B, P + C], prompt and completion token ids."""
        return torch.cat([self.prompt_ids, self.completion_ids], dim=1)

    @property
    def attention_mask(self) -> Tensor:
        """[B, P + C], 1 where a model may attend."""
        return torch.cat([self.prompt_mask, self.completion_mask], dim=1)

    def prompt_lists(self) -> list[list[int]]:
        """The prompts without their padding."""
        return _without_padding(self.prompt_ids, self.prompt_mask)

    def completion_lists(self) -> list[list[int]]:
        """The completions without their padding."""
        return _without_padding(self.completion_ids, self.completion_mask)

    def select(self, rows: Sequence[int]) -> Rollout:
        """The given rows, in the given order."""
        lengths = None if self.lengths is None else tuple(self.lengths[row] for row in rows)
        return replace(self._each(itemgetter(list(rows))), lengths=lengths)

    def after(self, prompts: Mapping[str, Tensor]) -> Rollout:
        """The same completion tokens after other prompts: `input_ids` and `attention_mask`, [B, P]."""
        return replace(self, prompt_ids=prompts["input_ids"], prompt_mask=prompts["attention_mask"], lengths=None)

    def measured(self) -> tuple[Length, ...]:
        """The lengths of the rows; waits for the device where they are not known yet."""
        return lengths_of(self.prompt_mask, self.completion_mask) if self.lengths is None else self.lengths

    def cut(self) -> Rollout:
        """Without the columns that are padding in every row; one of prompts and one of completions stay.

        A part of rows is as wide in all processes, and is not cut.
        """
        if self.begins_at is not None:
            return self
        lengths = self.measured()
        prompt, completion = (max(*each, 1) for each in list(zip(*lengths, strict=True))[:2])
        return replace(
            self,
            prompt_ids=self.prompt_ids[:, -prompt:],
            prompt_mask=self.prompt_mask[:, -prompt:],
            completion_ids=self.completion_ids[:, :completion],
            completion_mask=self.completion_mask[:, :completion],
            weights=self.weights[:, :completion],
            lengths=lengths,
        )

    def chunks(self, rows: int) -> Iterator[Rollout]:
        """Splits along B into rollouts of at most `rows` rows, in order."""
        every = range(len(self.prompt_ids))
        return (self.select(every[start : start + rows]) for start in every[::rows])

    def to(self, device: torch.device) -> Rollout:
        """The same rollout on another device."""
        return self._each(lambda tensor: tensor.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Rollout:
        values: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        changed = {name: change(one) for name, one in values.items() if isinstance(one, Tensor)}
        return Rollout(**{**values, **changed})


def lengths_of(prompt_mask_BP: Tensor, completion_mask_BC: Tensor) -> tuple[Length, ...]:
    """The length of each row, from the masks; waits for the device."""
    prompts, tokens = prompt_mask_BP.size(1), prompt_mask_BP.size(1) + completion_mask_BC.size(1)
    real_BL = (torch.cat([prompt_mask_BP, completion_mask_BC], dim=1) != 0).cpu()
    places_L = torch.arange(tokens)
    before_B = prompts - places_L.where(real_BL, prompts)[:, :prompts].amin(1)
    after_B = (places_L + 1).where(real_BL, prompts)[:, prompts:].amax(1) - prompts
    masked_B = before_B + after_B - real_BL.sum(1)
    return tuple(map(Length, before_B.tolist(), after_B.tolist(), masked_B.tolist()))


def _without_padding(ids_BL: Tensor, mask_BL: Tensor) -> list[list[int]]:
    return [ids[mask != 0].tolist() for ids, mask in zip(ids_BL.cpu(), mask_BL.cpu(), strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """An engine's completion of one prompt."""

    prompt_ids: list[int]
    """The prompt tokens as the engine read them."""
    completion_ids: list[int]
    """The generated tokens."""
    prompt_logprobs: list[float]
    """Log-probability of each prompt token but the first, in nats; empty unless requested."""
    logprobs: list[float]
    """Log-probability of each generated token, in nats, before temperature and truncation; empty unless requested."""


@dataclass(frozen=True, slots=True)
class RowTargets:
    """The targets of the tokens of one row that may count, and of no other token."""

    hidden: Tensor
    """[n, H_t], in the width and dtype of the row's teacher; where targets are kept."""
    places: Tensor
    """[n], int64, in host memory: which tokens of the completion these are, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherTargets:
    """The teacher's targets for a rollout, small enough to keep for a whole generation batch.

    `TeacherTargets(hidden=...)` has a state for each token. Teachers of this package keep those of the tokens that may
    count, in `rows`; there `hidden` is a copy, which is made when it is first read and is from then on what counts.
    """

    hidden: Tensor
    """[B, C, H_t], the teacher's last hidden state at the position that *predicts* each completion token.

    Made from `rows`, it is 0 at tokens that cannot count; where several teachers share a batch, H_t is their largest
    hidden size, and smaller states are padded with zeros.
    """
    teacher: Tensor | None = None
    """[B], in host memory, the number of the teacher that read the row; `None` where there is only one."""
    rows: tuple[RowTargets, ...] | None = field(default=None, init=False, repr=False)
    """The targets row by row, or `None` where `hidden` holds them."""
    tokens: int = field(default=0, init=False, repr=False)
    """C of `rows`."""

    def cut(self, tokens: int) -> TeacherTargets:
        """The targets of the first completion tokens, which are all that may count."""
        if self.rows is None:
            return replace(self, hidden=self.hidden[:, :tokens])
        return TeacherTargets.by_row(self.rows, tokens, self.teacher)

    @classmethod
    def by_row(cls, rows: Iterable[RowTargets], tokens: int, teacher: Tensor | None = None) -> TeacherTargets:
        """Targets of B rows of C = `tokens` completion tokens."""
        self = object.__new__(cls)
        for name, value in {"rows": tuple(rows), "tokens": tokens, "teacher": teacher}.items():
            object.__setattr__(self, name, value)
        return self

    def __getattr__(self, name: str) -> Tensor:
        # Reached only while the slot is empty. States that were read may be written to, so they replace the rows.
        if name != "hidden":
            raise AttributeError(f"`TeacherTargets` has no attribute `{name}`.")
        assert self.rows, "a rollout has rows"
        wide = max((row.hidden for row in self.rows), key=lambda states: states.size(1))
        dtype = reduce(torch.promote_types, (row.hidden.dtype for row in self.rows))
        hidden_BCH = wide.new_zeros(len(self.rows), self.tokens, wide.size(1), dtype=dtype)
        for to_CH, row in zip(hidden_BCH, self.rows, strict=True):
            to_CH[row.places.to(to_CH.device), : row.hidden.size(1)] = row.hidden.to(to_CH)
        object.__setattr__(self, "hidden", hidden_BCH)
        object.__setattr__(self, "rows", None)
        return hidden_BCH

    def of(self, row: int, places_n: Tensor) -> Tensor:
        """[n, H_t], states of some tokens of a row that may count, by their places in host memory, ascending."""
        if self.rows is None:
            return self.hidden[row].index_select(0, places_n.to(self.hidden.device))
        kept = self.rows[row]
        return kept.hidden.index_select(0, torch.searchsorted(kept.places, places_n).to(kept.hidden.device))

    def pack(self) -> dict[str, Any]:
        """The row-aligned values that pass through TRL's shuffle and split; of targets kept by row."""
        assert self.rows is not None, "only `rows` do not depend on the longest completion of a batch"
        packed = {"teacher_rows": list(self.rows)}
        return packed if self.teacher is None else {**packed, "teacher_number": self.teacher}

    @classmethod
    def unpack(cls, batch: Mapping[str, Any]) -> TeacherTargets:
        """The inverse of [`~TeacherTargets.pack`], on any subset of the rows."""
        return cls.by_row(batch["teacher_rows"], batch["completion_ids"].size(1), batch.get("teacher_number"))


@dataclass(frozen=True, slots=True)
class OutputHead:
    """How one model turns hidden states into logits: `softcap * tanh(scale * (h @ weight.T + bias) / softcap)`.

    There is no cap when `softcap` is `None`.
    """

    weight: Tensor
    """[V, H]."""
    bias: Tensor | None = None
    """[V], or `None`."""
    scale: float = 1.0
    """Multiplier of the product, before the cap."""
    softcap: float | None = None
    """Bound on the absolute value of the logits."""

    @classmethod
    def of(cls, model: Any) -> OutputHead:
        """Reads the head of a causal language model of `transformers`, bare or wrapped by `peft`.

        The only place that knows the config names of logit post-processing; [`~models.head.prove_head`] verifies the
        result on the model itself.
        """
        layer = model.get_output_embeddings()
        if layer is None:
            raise ValueError(
                f"{type(model).__name__} has no output embeddings, so it predicts no tokens: pass a causal language "
                "model, for instance one loaded with `AutoModelForCausalLM`."
            )
        config = model.config.get_text_config()
        return cls(
            weight=layer.weight,
            bias=getattr(layer, "bias", None),
            scale=_logit_scale(config),
            softcap=_softcap(config),
        )


def _logit_scale(config: Any) -> float:
    """Configs have three names for a multiplier of the logits, and one for a divisor (a multiplier in HyperCLOVA X)."""
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if (scale := getattr(config, name, None)) is not None:
            return float(scale)
    if (scaling := getattr(config, "logits_scaling", None)) is not None:
        return float(scaling) if config.model_type == "hyperclovax" else 1.0 / float(scaling)
    return 1.0


def _softcap(config: Any) -> float | None:
    """Configs have three names for the cap of the logits."""
    for name in ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"):
        if (bound := getattr(config, name, None)) is not None:
            return float(bound)
    return None


@dataclass(frozen=True, slots=True)
class LazyLogits:
    """Logits that are not materialised yet: `head(hidden) / temperature`. A loss takes two of these."""

    hidden: Tensor
    """[N, H], the last hidden states of only the tokens in the loss."""
    head: OutputHead
    temperature: float = 1.0
    """Softmax temperature, applied after the head's own scale and cap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PerToken:
    """One value per token in the loss, in nats and float32."""

    divergence: Tensor
    """[N], multiplied by the weights if given; carries the gradient to the student."""
    student_entropy: Tensor
    """[N], no gradient."""
    teacher_entropy: Tensor
    """[N], no gradient."""
    teacher_uniform: Tensor | None = None
    """[N], whether the teacher's logits are all equal, which leaves nothing to learn; `None` where it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossParts:
    """One process's contribution to a loss: local sums, for the caller to reduce across processes."""

    ROW_NAMES: ClassVar[tuple[str, ...]] = (
        "weight",
        "divergence",
        "student_entropy",
        "teacher_entropy",
        "tokens",
        "teacher_uniform",
    )
    """Names of the columns of `rows`."""

    loss: Tensor
    """Scalar, divided by the denominator of the whole optimizer step; carries the gradient."""
    rows: Tensor
    """[B, 6], float32, in the order of `ROW_NAMES`: per row, the sum of the weights, three sums of nats times weight,
    the number of tokens in the loss, and of those for which all logits of the teacher are equal.
    """

    def __add__(self, other: LossParts) -> LossParts:
        """Adds the parts of two groups of tokens of the same rows; both must have the same denominator."""
        return LossParts(loss=self.loss + other.loss, rows=self.rows + other.rows)


@dataclass(frozen=True, slots=True)
class Weight:
    """A named checkpoint tensor, computed on demand (`materialize`)."""

    name: str
    """Its name in the checkpoint."""
    base: Tensor
    """The student's own tensor, without adapters."""
    parts: tuple[Tensor, ...]
    """Tensors that must be gathered while it is materialised."""
    materialize: Callable[[], Tensor]
    """Returns the tensor, which is read-only: it may share memory with the student's."""

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Weight:
        """A tensor sent unchanged."""
        return cls(name, tensor, (tensor,), tensor.detach)
