"""Connects to an SGLang server, and sends it weights; each request is sent once and has a deadline."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import torch
from torch import Tensor

from trl_opsd._compat.weight_group import MEET_SECONDS, WeightGroup
from trl_opsd.config import OPSDConfig
from trl_opsd.rollout import sglang_answers as answers
from trl_opsd.rollout.sessions import content, session_with, wait_for_server
from trl_opsd.rollout.sglang_asking import SGLangAsking
from trl_opsd.rollout.weight_sync import BUCKET_BYTES
from trl_opsd.run.bounded_http import BoundedSession
from trl_opsd.run.errors import ServerError

_HEALTH_SECONDS = 30.0
"""A health check writes a token, which takes a second, and up to 20 on a server that is busy with others."""
_IDLE_SECONDS = 10.0
"""A server may still be ending requests that it has answered, or whose connection was closed."""
_BYTES_PER_SECOND = 1e7
"""Slower networks are not waited for."""


class SGLangClient(SGLangAsking):
    """A connection to an SGLang server in the process that sends weights.

    Args:
        args ([`OPSDConfig`]):
            The address of the server, and how long to wait for it.
        deadline (`float`):
            Seconds within which any request has to be answered, to the last byte.

    Raises:
        ValueError: No server answers within `sglang_server_timeout` seconds.
        ServerError: An answer is not an SGLang server's. Every method may raise it.
    """

    def __init__(self, args: OPSDConfig, deadline: float) -> None:
        url = str(args.sglang_server_url).rstrip("/")
        session = session_with("The SGLang server", "sglang_server_url", url, deadline)
        seconds = args.sglang_server_timeout
        why_not = partial(_health_error, session, url)
        wait_for_server("SGLang", url, why_not, seconds, "sglang_server_timeout", "`sglang_server_url`")
        super().__init__(url, session, answers.facts(content(session.get(f"{url}/server_info"))))
        self._group: WeightGroup | None = None
        self._run, self._sent = uuid4().hex[:8], 0

    def connect(self, device: torch.device) -> torch.device:
        """Joins a group with the server's workers, that weights are broadcast in.

        Args:
            device (`torch.device`):
                Where the student is.

        Returns:
            `torch.device`: Where weights have to be, to be sent.
        """
        self.close()  # of another student
        on_gpus = device.type == self.facts.device == "cuda"
        backend = "nccl" if on_gpus else "gloo"
        # A run that was killed may have left it open; a server that is not updating refuses this.
        self.session.post(f"{self.url}/end_weight_update", json={})
        self._name = f"trl_opsd_{uuid4().hex}"
        group = WeightGroup(self._name, urlsplit(self.url).hostname or "", self.facts.workers, backend)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(
                self._call,
                "init_weights_update_group",
                within=MEET_SECONDS,
                master_address=group.address,
                master_port=group.port,
                rank_offset=1,
                world_size=1 + self.facts.workers,
                group_name=self._name,
                backend=backend,
            )
            try:
                group.meet()
            except RuntimeError as error:
                asked.result()  # the server may say why
                raise ServerError(
                    f"The SGLang server at {self.url} did not come to {group.address} port {group.port} of this "
                    f"machine to be sent weights: {error}"
                ) from error
            asked.result()
        self._group = group
        return device if on_gpus else torch.device("cpu")

    def update(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Replaces all weights, some at a time. If it fails, those of the server are not known."""
        if self._group is None:
            raise ServerError(
                f"The SGLang server at {self.url} takes no weights after an update has failed: begin the training anew."
            )
        group, self._group, self.version = self._group, None, None  # until all have arrived
        self._sent += 1
        version = f"{self._run}-{self._sent}"
        try:
            self._call("begin_weight_update", selector="target")
            with ThreadPoolExecutor(1) as pool:
                for bucket in _buckets(weights):
                    self._send(pool, group, bucket)
            self._call("end_weight_update")
            self._call("update_weight_version", new_version=version, abort_all_requests=False)
        except BaseException:
            group.abandon()
            raise
        self._group, self.version = group, version

    def _send(self, pool: ThreadPoolExecutor, group: WeightGroup, bucket: list[tuple[str, Tensor]]) -> None:
        asked = pool.submit(
            self._call,
            "update_weights_from_distributed",
            names=[name for name, _ in bucket],
            dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            shapes=[list(tensor.shape) for _, tensor in bucket],
            group_name=self._name,
            selector="target",
            flush_cache=False,
        )
        seconds = MEET_SECONDS + sum(tensor.nbytes for _, tensor in bucket) / _BYTES_PER_SECOND
        sent = [group.send(tensor, seconds) for _, tensor in bucket]
        asked.result()  # before waiting: a server that refuses does not receive
        for one in sent:
            one.wait()

    def forget_prefixes(self) -> None:
        """Resets the prefix cache, which was computed with earlier weights."""
        answer = self.session.post(f"{self.url}/flush_cache", params={"timeout": _IDLE_SECONDS})
        if answer.status_code != 200:
            raise ServerError(
                f"The SGLang server at {self.url} did not reset its prefix cache, as it does while it serves other "
                f"requests; completions would come from earlier weights. Use it for a single training run. It says: "
                f"{answer.text[:300]}"
            )

    def close(self) -> None:
        """Leaves the group, so that another training run can use the server."""
        group, self._group = self._group, None
        if group is not None:
            self._call("destroy_weights_update_group", group_name=self._name)
            group.close()

    def _call(self, path: str, within: float | None = None, **asked: Any) -> None:
        answer = content(self.session.post(f"{self.url}/{path}", json=asked, seconds=within))
        if answer.get("success") is not True:
            raise ServerError(f"The SGLang server, asked for /{path}, answered {str(answer)[:500]}.")


def _health_error(session: BoundedSession, url: str) -> str | None:
    try:
        status = session.get(f"{url}/health", seconds=_HEALTH_SECONDS).status_code
    except ServerError as error:
        return str(error)
    return None if status == 200 else f"/health answers {status}, not 200"


def _buckets(weights: Iterator[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Groups weights, as the server holds those of one request besides its own."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket
