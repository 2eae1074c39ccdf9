"""A teacher behind servers, which return its last hidden states; only its output head is in this process.

So every divergence is exact over the whole vocabulary, for `2 * H` bytes per token of a teacher in half precision.

B rows · C completion tokens · L tokens of a row · H hidden width
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from trl_opsd.models.backbone import check_no_holes
from trl_opsd.models.head import shape_of
from trl_opsd.run.kept import Keeper
from trl_opsd.teacher.answered_states import Expected
from trl_opsd.teacher.base import Teacher
from trl_opsd.teacher.checkpoint_head import CheckpointHead
from trl_opsd.teacher.replica import say
from trl_opsd.teacher.replicas import Replicas
from trl_opsd.teacher.served_agreement import Reached, reached_by_all
from trl_opsd.types import OutputHead, Rollout, TeacherTargets

_EXPECTED_BYTES = 4_000_000_000
"""Limit for the states of rows that were expected and not asked for yet; more are read when they are asked for."""


class _Row(NamedTuple):
    """What a server has to read so that the targets of a row are known."""

    ids: tuple[int, ...]
    """Prompt and completion up to the token before the last one that counts."""
    first: int
    """The place of the state that predicts the first token of the completion."""


class ServedTeacher(Teacher):
    """A frozen causal language model behind one server or several, as `OPSDConfig.teacher_server_url` says.

    Args:
        path (`str`):
            Its checkpoint, a folder or a model id, from which config, output head and final norm are read.
        urls (`Sequence[str]`):
            The addresses of its servers: `vllm serve` with the pooler task `token_embed`, or
            `python -m trl_opsd.teacher.serve`.
        device (`torch.device`):
            Where the head is kept.
        deadline (`float`):
            Seconds within which the rows of a batch have to be read, over all attempts.
        timeout (`float`, *optional*, defaults to 0):
            Seconds to wait for servers that are not up yet, and then for their first rows.
        place (`Mapping[str, Any]`, *optional*):
            Options that locate the checkpoint, as `revision`.
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            Whether the checkpoint's own Python code may be run.
        cache_device (`str`, *optional*, defaults to `"auto"`):
            Where targets are kept until they are used: see `OPSDConfig.teacher_cache_device`.
        progress (`bool`, *optional*, defaults to `False`):
            Show a progress bar when reading takes longer than a few seconds.

    Attributes:
        config ([`~transformers.PretrainedConfig`]): the checkpoint's config.

    Raises:
        ValueError: A server is not up, or the checkpoint lacks something.
        ServerError: A server does not return this teacher's states.
    """

    def __init__(
        self,
        path: str,
        urls: Sequence[str],
        device: torch.device,
        deadline: float,
        timeout: float = 0.0,
        place: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
        cache_device: str = "auto",
        progress: bool = False,
    ) -> None:
        self._path, self._urls = path, tuple(urls)
        self._cache_device, self._progress = cache_device, progress
        self._replicas = Replicas(urls, deadline, timeout)
        checkpoint = CheckpointHead(path, place or {}, trust_remote_code)
        self.config = checkpoint.config
        self._context = _smallest(
            getattr(self.config.get_text_config(), "max_position_embeddings", None),
            None if self._replicas.context is None else self._replicas.context + 1,  # the last token is not sent
        )
        self._probe = self._replicas.prove(Expected(path, checkpoint.width, checkpoint.norm), checkpoint.vocabulary)
        self._head = checkpoint.head(self._replicas.dtype, device)
        self._expected: dict[_Row, Future[Tensor]] = {}
        self._alone: tuple[_Row, Future[Tensor]] | None = None
        self._warn(checkpoint)

    def __str__(self) -> str:
        dtype = str(self._replicas.dtype).removeprefix("torch.")
        rows, width = shape_of(self._head)
        return (
            f"{self._path!r} behind {' and '.join(self._urls)}, which send {width * self._replicas.dtype.itemsize} "
            f"bytes per token, in {dtype}; its head, {rows} x {width}, on {self._head.weight.device}"
        )

    @property
    def head(self) -> OutputHead:
        return self._head

    @property
    def context(self) -> int | None:
        return self._context

    def compare_processes(self) -> None:
        """Compares the servers with those of the other processes. Collective.

        Raises:
            WrongStatesError: They have another teacher.
        """
        own = Reached(self._urls, self._probe, self._replicas.dtype, self._context)
        self._context = _smallest(*(one.context for one in reached_by_all(own)))

    def expect(self, rollout: Rollout) -> None:
        width = shape_of(self._head)[1] * self._replicas.dtype.itemsize
        kept = sum(len(row.ids) for row in self._expected) * width
        for row in self._rows(rollout):
            if row is None or row in self._expected:
                continue
            kept += len(row.ids) * width
            if kept > _EXPECTED_BYTES:  # read when it is asked for
                return
            self._expected[row] = self._replicas.start(row.ids)

    def forget_expected(self) -> None:
        for future in self._expected.values():
            future.cancel()
        self._expected.clear()

    def targets(self, rollout: Rollout) -> TeacherTargets:
        check_no_holes(rollout.measured())
        rows = self._rows(rollout)
        asked = {row for row in rows if row is not None}
        # The longest first: it should not be the last to begin.
        reading = {row: self._begun(row) for row in sorted(asked, key=lambda row: -len(row.ids))}
        # A process that waits for others with `overlap="step"` has one of its rows taught again and again.
        self._alone = next(iter(reading.items())) if len(rows) == len(reading) == 1 else None
        last = {row: number for number, row in enumerate(rows)}
        keeper = Keeper(rollout.weights, self._cache_device)
        no_states = torch.empty(0, shape_of(self._head)[1], dtype=self._replicas.dtype)
        bar = tqdm(rows, desc="teach", unit="row", delay=5, leave=False, disable=not self._progress)
        try:
            for number, row in enumerate(bar):
                states_LH = no_states if row is None else reading[row].result()[row.first :]
                keeper.put([number], states_LH[None])
                if row is not None and last[row] == number:
                    del reading[row]  # else all states of a batch would be held twice
        finally:
            for future in reading.values():
                future.cancel()
        return keeper.targets()

    def _begun(self, row: _Row) -> Future[Tensor]:
        """The states of a row that was expected, or was the last to be asked for alone; else it is asked for now.

        What has failed since then, perhaps in a training before this one, is asked for again.
        """
        found = self._expected.pop(row, None)
        if found is None and self._alone is not None and self._alone[0] == row:
            found = self._alone[1]
        if found is not None and not (found.done() and (found.cancelled() or found.exception())):
            return found
        return self._replicas.start(row.ids)

    def _rows(self, rollout: Rollout) -> list[_Row | None]:
        """What has to be read of each row; `None` where no token counts."""
        found: list[_Row | None] = []
        counts_BC, vocabulary = rollout.counts.cpu(), shape_of(self._head)[0]
        for prompt, completion, counts_C in zip(
            rollout.prompt_lists(), rollout.completion_lists(), counts_BC, strict=True
        ):
            places = counts_C.nonzero().flatten().tolist()
            if not places:
                found.append(None)
                continue
            ids = (*prompt, *completion[: places[-1]])
            if max(ids) >= vocabulary:  # vLLM would read some row of its padded embeddings
                raise ValueError(
                    f"A row has the token id {max(ids)}, but the teacher's vocabulary has {vocabulary}: were the rows "
                    "written with another tokenizer? Nothing of this batch was sent."
                )
            found.append(_Row(ids, len(prompt) - 1))
        return found

    def _warn(self, checkpoint: CheckpointHead) -> None:
        """Says what cannot be known, or may not be meant."""
        served, ours = self._replicas.facts.source.rstrip("/"), self._path.rstrip("/")
        if Path(ours).name.lower() not in served.lower() and Path(served).name.lower() not in ours.lower():
            say(
                f"The teacher's server says that it serves {served!r}, and the head is read from {ours!r}: the two "
                "have to be one checkpoint, of which only the final norm could be compared."
            )
        if checkpoint.norm is None:
            say(
                f"{ours!r} ends with no norm that is known, so that states of another model with the same width could "
                "not be told from its own."
            )
        stored = checkpoint.dtype
        if self._replicas.dtype != stored:
            say(
                f"The teacher's server computes in {self._replicas.dtype} and the checkpoint is in {stored}: start it "
                f"with `--dtype {str(stored).removeprefix('torch.')}` if that is not meant."
            )


def _smallest(*limits: int | None) -> int | None:
    return min((one for one in limits if one is not None), default=None)
