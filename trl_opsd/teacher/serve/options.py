"""The options of `python -m trl_opsd.teacher.serve`, and every check of them that needs no model."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import HfArgumentParser

from trl_opsd.http.urls import TEACHER_TOKEN, is_loopback, token_in
from trl_opsd.options.values import from_to, integer, one_of
from trl_opsd.teacher.serve.protocol import DTYPES

PROG = "python -m trl_opsd.teacher.serve"
OFFLOADS = ("none", "cpu", "stream")


@dataclass
class ServeOptions:
    """What is served, to whom, and how much of it at once."""

    host: str = field(
        default="127.0.0.1",
        metadata={"help": f"Address to listen on. Any other than loopback needs a token, in {TEACHER_TOKEN}."},
    )
    port: int = field(default=8000, metadata={"help": "Port to listen on; 0 takes a free one and prints it."})
    dtype: str = field(
        default="auto",
        metadata={"help": "'auto', the dtype of the checkpoint, or 'float32', 'bfloat16', 'float16'."},
    )
    revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of a model from the Hub."})
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Run Python code that comes with the model: read it first."}
    )
    offload: str = field(
        default="none",
        metadata={
            "help": "Where the weights are kept: 'none', on the device; 'cpu', in host memory, copied to the device "
            "while requests are read; 'stream', in host memory, copied layer by layer, for a model larger than the "
            "device."
        },
    )
    padding_free: bool = field(
        default=False,
        metadata={"help": "Read the rows of a pass as one, without padding, if the model keeps them apart."},
    )
    served_model_name: str | None = field(
        default=None, metadata={"help": "What requests call the model; its path or id if not given."}
    )
    max_model_len: int | None = field(
        default=None, metadata={"help": "Most tokens of a row; the model's context if not given."}
    )
    max_request_tokens: int | None = field(
        default=None,
        metadata={"help": "Most tokens of all rows of a request; 16384 or `max_model_len` if not given."},
    )
    max_waiting_tokens: int = field(
        default=2**20,
        metadata={
            "help": "Most tokens that may wait, be read or be sent at once; beyond it requests are answered 503. Each "
            "can take two bytes, or four in float32, times the hidden width, in host memory."
        },
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
                f"`max_request_tokens={self.max_request_tokens}` is more than `max_waiting_tokens="
                f"{self.max_waiting_tokens}`: such a request could never be accepted."
            )
        if self.served_model_name is not None and not self.served_model_name.strip():
            raise ValueError("`served_model_name` is empty: expected the name that requests give the model.")

    def token(self) -> str | None:
        """The token that clients must send, `None` if they need none; others than this machine's clients always do."""
        token = token_in(TEACHER_TOKEN)
        if token is None and not is_loopback(self.host):
            raise ValueError(
                f"`host={self.host!r}` can be reached from other machines, and {TEACHER_TOKEN} is not set: anyone "
                "could have this model read. Set it to a secret here and where the training runs, for instance "
                f"`export {TEACHER_TOKEN}=$(openssl rand -hex 32)`, or leave `host` at 127.0.0.1 and use an SSH tunnel."
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
            f"`host={host!r}`, `port={port}` cannot be listened on ({error}): choose another port, 0 for any free one, "
            "or an address of this machine."
        ) from error
    return found
