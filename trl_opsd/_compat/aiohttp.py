"""aiohttp, for clients and servers of HTTP; where it is missing, the error says how to install it."""

from __future__ import annotations

try:
    import aiohttp
    from aiohttp import web
except ModuleNotFoundError as error:
    raise ValueError(
        "Servers (`teacher_server_url`, `sglang_server_url`, `vllm_mode='server'`, `trl_opsd.teacher.serve`) need "
        "aiohttp, which is not installed: `pip install aiohttp`."
    ) from error

__all__ = ["aiohttp", "web"]
