"""Tokens that servers ask for, from the environment: other users of a machine see command lines, and logs see options.

A token is called an API key where vLLM and SGLang ask for one.
"""

from __future__ import annotations

import os

TEACHER_TOKEN = "TRL_OPSD_TEACHER_TOKEN"
"""The variable with the token of a teacher's server, here and where that is started."""
ROLLOUT_TOKEN = "TRL_OPSD_ROLLOUT_TOKEN"
"""The variable with what a vLLM or SGLang server that writes completions was given as `--api-key`."""


def token_in(variable: str) -> str | None:
    """The token in an environment variable; `None` if there is none.

    Raises:
        ValueError: It cannot be sent in a header. It is not quoted.
    """
    token = os.environ.get(variable, "")
    if token and not (token.isascii() and token.isprintable() and " " not in token):
        raise ValueError(f"{variable} has spaces, line ends or characters beyond ASCII: expected `A-Za-z0-9_-`.")
    return token or None


def token_header(variable: str) -> dict[str, str]:
    """The header that a server with a token asks for; empty if the variable has none.

    Raises:
        ValueError: As [`token_in`].
    """
    token = token_in(variable)
    return {} if token is None else {"Authorization": f"Bearer {token}"}
