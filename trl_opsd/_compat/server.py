"""What a client of servers needs: aiohttp, whose absence is an error that says how to install it."""

from __future__ import annotations

try:
    import aiohttp
except ModuleNotFoundError as error:
    raise ValueError(
        f"Servers (`teacher_server_url`, `sglang_server_url`, `vllm_mode='server'`) need {error.name}, which is not "
        f"installed: `pip install {error.name}`."
    ) from error

__all__ = ["aiohttp"]
