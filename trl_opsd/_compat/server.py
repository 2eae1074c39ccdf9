"""What clients and servers of HTTP need: aiohttp, and pydantic for responses; errors say how to install them."""

from __future__ import annotations

try:
    import aiohttp
    import pydantic
    from aiohttp import web
except ModuleNotFoundError as error:
    raise ValueError(
        "Servers (`teacher_server_url`, `sglang_server_url`, `vllm_mode='server'`, `trl_opsd.teacher.serve`) need "
        f"{error.name}, which is not installed: `pip install {error.name}`."
    ) from error

__all__ = ["aiohttp", "pydantic", "web"]
