"""Authentication tokens for servers, from the environment: command lines are visible to other users, and options are
logged.

A token is called an API key by vLLM and SGLang.
"""

from __future__ import annotations

import os

TEACHER_TOKEN = "TRL_OPSD_TEACHER_TOKEN"
"""The variable with the token of a teacher's server, for the trainer and for the server."""
ROLLOUT_TOKEN = "TRL_OPSD_ROLLOUT_TOKEN"
"""The variable with the `--api-key` of a vLLM or SGLang server that generates completions."""


def token_in(variable: str) -> str | None:
    """The token in an environment variable; `None` if there is none. An error about it does not quote it."""
    token = os.environ.get(variable, "")
    if token and not (token.isascii() and token.isprintable() and " " not in token):
        raise ValueError(f"{variable} has spaces, line ends or characters beyond ASCII: expected `A-Za-z0-9_-`.")
    return token or None


def token_header(variable: str) -> dict[str, str]:
    """The authorization header for a server with a token; empty if the variable has none."""
    token = token_in(variable)
    return {} if token is None else {"Authorization": f"Bearer {token}"}
