"""A teacher behind a server, which returns its last hidden states; only its output head is in this process.

So every divergence is exact over the whole vocabulary, for `2 * H` bytes per token of a teacher in half precision.

B rows · C completion tokens · L tokens of a row · H hidden width
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor, distributed

from trl_opsd.http.client import WrongAnswerError, warn_in_main
from trl_opsd.models.backbone import check_no_holes, logits_of, shape_of
from trl_opsd.teacher.asked import Asked, rows_of
from trl_opsd.teacher.base import Teacher
from trl_opsd.teacher.checkpoint_head import CheckpointHead
from trl_opsd.teacher.servers import Expected, StatesServer, are_same, distance, probe_ids, smallest, word
from trl_opsd.types import OutputHead, Rollout, TeacherTargets
from trl_opsd.types.targets import Keeper


class _Row(NamedTuple):
    """The tokens that a server has to score for the targets of a row."""

    ids: tuple[int, ...]
    """Prompt and completion up to the token before the last one that counts."""
    first: int
    """Index of the state that predicts the first completion token."""


class ServedTeacher(Teacher):
    """A frozen causal language model behind `vllm serve` (task `token_embed`)."""

    def __init__(
        self,
        path: str,
        url: str,
        device: torch.device,
        deadline: float,
        timeout: float = 0.0,
        options: Mapping[str, Any] | None = None,
        cache_device: str = "auto",
        progress: bool = False,
    ) -> None:
        # `path` is the checkpoint, from which config, output head and final norm are loaded; `options` are such as
        # `revision`. `deadline` limits a batch over all attempts, `timeout` the wait for the server at the start.
        self._path, self._url = path, url
        self._cache_device, self._progress = cache_device, progress
        self._server = StatesServer(url, deadline, timeout)
        checkpoint = CheckpointHead(path, options)
        self.config = checkpoint.config
        self._context = smallest(
            getattr(self.config.get_text_config(), "max_position_embeddings", None),
            None if self._server.context is None else self._server.context + 1,  # the last token is not sent
        )
        self.probe_row = probe_ids(checkpoint.vocabulary)
        self._probe = self._server.prove(Expected(path, checkpoint.width, checkpoint.norm), checkpoint.vocabulary)
        self._head = checkpoint.head(self._server.dtype, device)
        width = checkpoint.width * self._server.dtype.itemsize
        self._asked = Asked[_Row](lambda row: self._server.start(row.ids), lambda row: len(row.ids), width)
        self.noise = _nats(*map(self._predictions, self._server.twice))
        """Nats between two answers for the same tokens."""
        self._warn(checkpoint)

    def _predictions(self, states_LH: Tensor) -> Tensor:
        """[L, V], log-probabilities in host memory."""
        return logits_of(states_LH.to(self._head.weight), self._head).float().log_softmax(-1).cpu()

    def told_apart(self, logs_LV: Tensor) -> float:
        """Nats between what the server's states say and these log-probabilities, [L - 1, V], of `probe_row`."""
        return _nats(self._predictions(self._probe[:-1]), logs_LV)

    def __str__(self) -> str:
        dtype = word(self._server.dtype)
        rows, width = shape_of(self._head)
        return (
            f"{self._path!r} behind {self._url}, {width * self._server.dtype.itemsize} bytes "
            f"per token in {dtype}; its head, {rows} x {width}, on {self._head.weight.device}"
        )

    @property
    def head(self) -> OutputHead:
        return self._head

    @property
    def context(self) -> int | None:
        return self._context

    def compare_processes(self) -> None:
        """Raises `WrongAnswerError` if the server of another process has another teacher. Collective."""
        if not distributed.is_initialized() or distributed.get_world_size() == 1:
            return
        # Processes may reach different servers at the same address.
        found = gather_object([(self._url, self._probe, self._server.dtype, self._context)])
        url, states, dtype, _ = found[0]
        for process, (their_url, their_states, their_dtype, _) in enumerate(found):
            is_shape = their_states.shape == states.shape
            if is_shape and their_dtype == dtype and are_same(their_states, states):
                continue
            apart = f"{distance(their_states, states):.2g} times their length apart, " if is_shape else ""
            raise WrongAnswerError(
                f"The teacher's servers of process 0 ({url}) and of process {process} ({their_url}) return "
                f"different states for the same tokens, {apart}in {word(dtype)} and {word(their_dtype)}: start "
                "all with the same checkpoint, revision and `--dtype`; 127.0.0.1 is a different server on each machine."
            )
        self._context = smallest(*(context for *_, context in found))

    def expect(self, rollout: Rollout) -> None:
        self._asked.expect(self._rows(rollout))

    def forget_expected(self) -> None:
        self._asked.forget()

    def targets(self, rollout: Rollout) -> TeacherTargets:
        check_no_holes(rollout.measured())
        rows = self._rows(rollout)
        keeper = Keeper(rollout.weights, self._cache_device)
        no_states = torch.empty(0, shape_of(self._head)[1], dtype=self._server.dtype)
        with closing(self._asked.answers(rows, self._progress)) as answers:
            for number, (row, states_LH) in enumerate(zip(rows, answers, strict=True)):
                keeper.put([number], (no_states if row is None or states_LH is None else states_LH[row.first :])[None])
        return keeper.targets()

    def _rows(self, rollout: Rollout) -> list[_Row | None]:
        """The tokens to score for each row; `None` where no token counts."""

        def row(_: int, prompt: list[int], completion: list[int], places: list[int]) -> _Row:
            return _Row((*prompt, *completion[: places[-1]]), len(prompt) - 1)

        return rows_of(rollout, shape_of(self._head)[0], row)

    def _warn(self, checkpoint: CheckpointHead) -> None:
        """Warns of what cannot be verified or may not be meant."""
        self._server.warn_of_name(self._path, "only the final norm was compared")
        if checkpoint.norm is None:
            warn_in_main(
                f"{self._path!r} has no known final norm, so states of another model of the same width would not be "
                "detected."
            )
        stored = checkpoint.dtype
        if self._server.dtype != stored:
            warn_in_main(
                f"The teacher's server computes in {self._server.dtype} and the checkpoint is in {stored}: start it "
                f"with `--dtype {word(stored)}` if that is not meant."
            )


def _nats(one_LV: Tensor, other_LV: Tensor) -> float:
    """The median over tokens of the KL of one from the other: half precision is far off at the first of a row alone."""
    return max(0.0, float((one_LV.exp() * (one_LV - other_LV)).sum(-1).median()))
