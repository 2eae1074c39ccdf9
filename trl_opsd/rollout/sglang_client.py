"""Connects to an SGLang server, and sends it weights; each request is sent once and has a deadline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import torch
from torch import Tensor

from trl_opsd._compat.weight_group import MEET_SECONDS, WeightGroup
from trl_opsd.config import OPSDConfig
from trl_opsd.errors import ServerError
from trl_opsd.rollout import sglang_answers as answers
from trl_opsd.rollout.sessions import ServerKind, accepts, content
from trl_opsd.rollout.sglang_asking import SGLangAsking
from trl_opsd.rollout.weight_sync import BUCKET_BYTES

SGLANG = ServerKind(
    name="SGLang",
    option="sglang_server_url",
    address="`sglang_server_url`",
    timeout="sglang_server_timeout",
    context="a larger `--context-length` or more memory for its cache",
    health_seconds=30.0,  # the check generates a token, which takes a second, and up to 20 on a busy server
)
_IDLE_SECONDS = 10.0
"""A server may still be ending requests that it has answered, or whose connection was closed."""
_BYTES_PER_SECOND = 1e7
"""Slower networks are not waited for."""


class SGLangClient(SGLangAsking):
    """A connection to an SGLang server in the process that sends weights; errors of the server are `ServerError`."""

    def __init__(self, args: OPSDConfig, deadline: float) -> None:
        url = str(args.sglang_server_url).rstrip("/")
        session = SGLANG.session(url, deadline)
        SGLANG.wait(session, url, args.sglang_server_timeout)
        super().__init__(url, session, answers.facts(content(session.get(f"{url}/server_info"))))
        self._group: WeightGroup | None = None
        self._run, self._sent = uuid4().hex[:8], 0

    def knows(self, vocabulary: int) -> bool:
        """Whether the server's model has this many ids or more; another would end at the first that it lacks."""
        asked = {"max_new_tokens": 1, "logit_bias": {str(vocabulary - 1): 0.0}}
        return accepts(self.session.post(f"{self.url}/generate", json={"input_ids": [0], "sampling_params": asked}))

    def connect(self, device: torch.device) -> torch.device:
        """Joins a process group with the server's workers to broadcast weights; returns where these have to be."""
        with suppress(ServerError):  # another server may be at this address now
            self.close()  # a connection of another student
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
            try:
                asked.result()
            except ServerError:
                group.abandon()
                raise
        self._group = group
        return device if on_gpus else torch.device("cpu")

    def check_connected(self) -> None:
        """Raises `ServerError` if weights cannot be sent any more."""
        self._connected()

    def _connected(self) -> WeightGroup:
        if self._group is None:
            raise ServerError(
                f"The SGLang server at {self.url} is not connected to any more, after an update has failed or the "
                "rollout was closed: begin the training anew."
            )
        return self._group

    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces all weights, bucket by bucket. If it fails, those of the server are unknown."""
        group = self._connected()
        self._group = self.version = None  # until all have arrived
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
            try:
                self._call("destroy_weights_update_group", group_name=self._name)
            finally:
                group.close()

    def _call(self, path: str, within: float | None = None, **asked: Any) -> None:
        answer = content(self.session.post(f"{self.url}/{path}", json=asked, seconds=within))
        if answer.get("success") is not True:
            raise ServerError(f"The SGLang server, asked for /{path}, answered {str(answer)[:500]}.")


def _buckets(weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Groups weights, since the server holds those of a request besides its own."""
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
