"""`python -m trl_opsd.teacher.serve MODEL`: reads the command line, loads the model, serves, and ends cleanly."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import AutoConfig, HfArgumentParser
from transformers.hf_argparser import HfArg
from transformers.utils import CONFIG_NAME, cached_file, extract_commit_hash

from trl_opsd._compat.server import web
from trl_opsd.config import OPSDConfig
from trl_opsd.errors import explained
from trl_opsd.http.urls import TEACHER_TOKEN, is_loopback, token_in
from trl_opsd.models.backbone import model_shape
from trl_opsd.models.checks import language_config
from trl_opsd.options.table import from_to, integer, one_of
from trl_opsd.teacher.build import build_teacher
from trl_opsd.teacher.frozen import FrozenTeacher
from trl_opsd.teacher.serve.reader import Reader, row_states
from trl_opsd.teacher.serve.server import DTYPES, Served, TeacherServer

PROG = "python -m trl_opsd.teacher.serve"
OFFLOADS = ("none", "cpu", "stream")


@dataclass
class ServeOptions:
    """What is served, to whom, and how much of it at once."""

    host: str = HfArg(
        default="127.0.0.1",
        help=f"Address to listen on. Addresses other than loopback need a token in {TEACHER_TOKEN}.",
    )
    port: int = HfArg(default=8000, help="Port to listen on; 0 picks a free one and prints it.")
    dtype: str = HfArg(default="auto", help="'auto' (the checkpoint's dtype), 'float32', 'bfloat16' or 'float16'.")
    revision: str | None = HfArg(default=None, help="Branch, tag or commit of a model from the Hub.")
    trust_remote_code: bool = HfArg(default=False, help="Run Python code that comes with the model; read it first.")
    offload: str = HfArg(
        default="none",
        help="Where the weights are kept: 'none', on the device; 'cpu', in host memory, copied to the device to score "
        "requests; 'stream', in host memory, copied layer by layer, for a model larger than the device.",
    )
    padding_free: bool = HfArg(
        default=False, help="Concatenate the rows of a forward pass, without padding, if the model supports it."
    )
    served_model_name: str | None = HfArg(default=None, help="Model name in requests. Default: its path or id.")
    max_model_len: int | None = HfArg(default=None, help="Maximum tokens of a row. Default: the model's context.")
    max_request_tokens: int | None = HfArg(
        default=None, help="Maximum tokens of a request. Default: 16384, or `max_model_len` if larger."
    )
    max_waiting_tokens: int = HfArg(
        default=2**20,
        help="Maximum tokens that are queued, scored or sent at once; further requests get status 503. Each token "
        "takes two bytes (four in float32) times the hidden size in host memory.",
    )

    def __post_init__(self) -> None:
        from_to(0, 65535).check("port", self.port)
        one_of("auto", *DTYPES).check("dtype", self.dtype)
        one_of(*OFFLOADS).check("offload", self.offload)
        for name in ("max_model_len", "max_request_tokens", "max_waiting_tokens"):
            if getattr(self, name) is not None:
                integer(1).check(name, getattr(self, name))
        if (self.max_request_tokens or 0) > self.max_waiting_tokens:
            raise ValueError(
                f"`max_request_tokens={self.max_request_tokens}` exceeds "
                f"`max_waiting_tokens={self.max_waiting_tokens}`, so such a request could never be accepted: lower it."
            )
        if self.served_model_name is not None and not self.served_model_name.strip():
            raise ValueError("`served_model_name` is empty: expected the model name in requests.")

    def token(self) -> str | None:
        """The token that clients must send, `None` if they need none; others than this machine's clients always do."""
        token = token_in(TEACHER_TOKEN)
        if token is None and not is_loopback(self.host):
            raise ValueError(
                f"`host={self.host!r}` is reachable from other machines, but {TEACHER_TOKEN} is not set, so anyone "
                "could use this model. Set it to a secret here and where the training runs, for instance `export "
                f"{TEACHER_TOKEN}=$(openssl rand -hex 32)`, or leave `host` at 127.0.0.1 and use an SSH tunnel."
            )
        return token


def parsed(arguments: Sequence[str]) -> tuple[str, ServeOptions]:
    """The model and the options of a command line; ends the program with a message if they are wrong."""
    parser = HfArgumentParser(
        ServeOptions,
        prog=PROG,
        description="Serves the last hidden states of a causal language model in the protocol of `vllm serve --runner "
        "pooling`, for teachers whose architecture vLLM lacks. See docs/teachers.md. `--traceback` prints whole "
        "errors.",
        allow_abbrev=False,
    )
    parser.add_argument("model", help="Path or id of the model.")
    try:
        options, positional = parser.parse_args_into_dataclasses(list(arguments), look_for_args_file=False)
    except ValueError as error:
        parser.error(str(error))
    return positional.model, options


def bound(host: str, port: int) -> socket.socket:
    """A socket with the address, which does not listen yet; a `ValueError` if the address is not available."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
        except OSError:
            found.close()
            raise
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"Cannot listen on `host={host!r}`, `port={port}` ({error}): choose another port (0 for a free one), or an "
            "address of this machine."
        ) from error
    return found


logger = logging.getLogger(__name__)

_UNLIMITED = 32768
"""`max_model_len` of a model whose config states no context."""
_REQUEST_TOKENS = 16384
_SHUTDOWN_SECONDS = 60.0
"""Deadline for answers in flight when the server ends."""
_LOG_SECONDS = 60.0
_NAMES = {
    "teacher_offload": "offload",
    "teacher_trust_remote_code": "trust_remote_code",
    "in `OPSDConfig`, which applies only to teachers": "here",
}
"""Names of this command's options by the trainer's, for messages."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    logger.setLevel(logging.INFO)
    given = list(sys.argv[1:] if arguments is None else arguments)
    path, options = parsed([one for one in given if one != "--traceback"])
    with explained(lambda: PROG, whole="--traceback" in given):
        try:
            token = options.token()
            # The address is taken before the model is loaded, so that a port in use is noticed at once.
            with bound(options.host, options.port) as listener:
                check_model(path, options)
                teacher = load(path, options)
                return asyncio.run(_serve(teacher, facts(path, options, teacher), options, token, listener))
        except (ValueError, OSError) as error:
            raise ValueError(
                re.sub("|".join(map(re.escape, _NAMES)), lambda found: _NAMES[found[0]], str(error))
            ) from error
        except KeyboardInterrupt:
            return 130


def check_model(path: str, options: ServeOptions) -> None:
    """Refuses a model that its config shows to be unfit or too short."""
    loading = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
    language_config(path, "MODEL", loading, "teacher_trust_remote_code")
    config = AutoConfig.from_pretrained(path, **{name: value for name, value in loading.items() if value})
    context: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    if options.max_model_len is not None and context is not None and options.max_model_len > context:
        raise ValueError(
            f"`max_model_len={options.max_model_len}` exceeds the model's context of {context} tokens: lower it, or "
            "remove it."
        )


def load(path: str, options: ServeOptions) -> FrozenTeacher:
    """Loads the model as a trainer would load its teacher, probed to keep rows independent."""
    args = OPSDConfig(
        "unused",
        report_to="none",
        teacher_model_revision=options.revision,
        teacher_trust_remote_code=options.trust_remote_code,
        teacher_offload=options.offload,
        teacher_model_init_kwargs={"dtype": options.dtype},
        padding_free=options.padding_free,
    )
    teacher = build_teacher(path, args)
    assert isinstance(teacher, FrozenTeacher), "it is built from a path"
    return teacher


def facts(path: str, options: ServeOptions, teacher: FrozenTeacher) -> Served:
    """What clients are told of the model; dtype and width are measured."""
    length = options.max_model_len or teacher.context or _UNLIMITED
    with torch.no_grad(), teacher.placement.reading(1) as run:
        (states,) = run(
            row_states, [torch.zeros(1, dtype=torch.long, device=teacher.placement.device)], teacher.reading
        )
    request = options.max_request_tokens or max(length, _REQUEST_TOKENS)
    return Served(
        name=options.served_model_name or path,
        root=path,
        revision=commit(path, options.revision) or options.revision,
        dtype=states.dtype,
        vocabulary=model_shape(teacher.model)[0],
        width=states.size(-1),
        max_model_len=length,
        max_request_tokens=min(request, options.max_waiting_tokens),
    )


def commit(path: str, revision: str | None) -> str | None:
    """The commit that a model from the Hub was loaded from, by where its config is cached; `None` for a local model."""
    config = cached_file(
        path,
        CONFIG_NAME,
        revision=revision,
        local_files_only=True,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    found: str | None = extract_commit_hash(config, None)
    return found


async def _serve(
    teacher: FrozenTeacher, served: Served, options: ServeOptions, token: str | None, listener: socket.socket
) -> int:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    reader = Reader(teacher, options.max_waiting_tokens, loop)
    server = TeacherServer(reader, served, token)
    reader.start()
    runner = server.runner(_SHUTDOWN_SECONDS)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    for one in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(one, stop.set)  # repeated signals change nothing: launchers forward theirs
    host, port = listener.getsockname()[:2]
    dtype = str(served.dtype).removeprefix("torch.")
    print(
        f"Ready: http://{f'[{host}]' if ':' in host else host}:{port} serves {served.name!r}: {teacher}; states in "
        f"{dtype} of rows of up to {served.max_model_len} tokens (batching: {teacher.reading}).",
        flush=True,
    )
    log = asyncio.create_task(_log(server, reader))
    await stop.wait()
    log.cancel()
    # Waiting rows are refused, rows in flight are answered.
    server.close()
    await runner.cleanup()
    await asyncio.to_thread(reader.join, _SHUTDOWN_SECONDS)
    print(f"Stopped after {server.requests} requests, {reader.counts.tokens} tokens.", flush=True)
    return 0


async def _log(server: TeacherServer, reader: Reader) -> None:
    """Logs a line for each minute with requests."""
    before = (0, 0, 0, 0)
    while True:
        await asyncio.sleep(_LOG_SECONDS)
        now = (server.requests, server.refused, reader.counts.tokens, reader.counts.passes)
        if now != before:
            requests, refused, tokens, passes = (one - other for one, other in zip(now, before, strict=True))
            logger.info(
                f"{requests} requests served, {refused} rejected, {tokens} tokens in {passes} forward passes, "
                f"{reader.waiting.tokens} tokens queued."
            )
        before = now


if __name__ == "__main__":
    sys.exit(main())
