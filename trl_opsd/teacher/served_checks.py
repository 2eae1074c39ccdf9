"""Checks the options of teachers behind servers, before a model is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trl_opsd.config import OPSDConfig
from trl_opsd.http.urls import server_urls
from trl_opsd.teacher.location import LOCATION_OPTIONS

_OPTION = "teacher_server_url"


def deadline(args: OPSDConfig) -> float:
    """Seconds that each teacher behind servers has for a batch."""
    # Teachers score one after the other, and other processes wait meanwhile, for at most `ddp_timeout`.
    return 0.9 * args.ddp_timeout / max(len(server_urls(_OPTION, args.teacher_server_url)), 1)


def check_served(teachers: Mapping[str, Any], args: OPSDConfig) -> None:
    """Refuses servers without a teacher, teachers behind servers that are no paths, and options that have no effect."""
    urls = server_urls(_OPTION, args.teacher_server_url)
    if not urls:
        return
    if args.teacher_model_kind is not None:
        raise ValueError(
            f"`{_OPTION}` with `teacher_model_kind={args.teacher_model_kind!r}`: the student is its own teacher, and "
            "only this process has it: leave one of them out."
        )
    if unknown := sorted(set(urls) - set(teachers)):
        raise ValueError(
            f"`{_OPTION}` has servers for {unknown}, but the teachers are {sorted(teachers)}: use their names, in a "
            'dict where there are several, as `{"math": "http://127.0.0.1:8000"}`.'
        )
    for name in urls:
        if not isinstance(teachers[name], str):
            called = "`teacher_model`" if len(teachers) == 1 else f"`teacher_model[{name!r}]`"
            raise ValueError(
                f"`{_OPTION}` says that a server has the teacher, but {called} is a {type(teachers[name]).__name__}: "
                "pass the path or model id of its checkpoint, from which its head is read; or leave the server out."
            )
    if set(urls) == set(teachers):
        _check_loading(args)


def _check_loading(args: OPSDConfig) -> None:
    """Refuses options about a teacher's layers, where all teachers are behind servers."""
    if args.teacher_offload != "none":
        raise ValueError(
            f"`teacher_offload={args.teacher_offload!r}` with `{_OPTION}`: the server has the teacher's layers, and "
            "the head is on the device: leave it at 'none'."
        )
    others = [name for name in args.teacher_model_init_kwargs or {} if name not in LOCATION_OPTIONS]
    if others:
        raise ValueError(
            f"`teacher_model_init_kwargs` has {others[0]!r} with `{_OPTION}`: the server has loaded the teacher: "
            "remove it, and start the server with what you want, for instance `--dtype`."
        )


def check_up(args: OPSDConfig) -> None:
    """Waits until all servers of teachers are up; a `ValueError` if one is not in time."""
    if not (served := server_urls(_OPTION, args.teacher_server_url)):
        return
    from trl_opsd.teacher.replicas import Replicas  # needs aiohttp, which may be absent where no server is used

    for urls in served.values():
        Replicas(urls, deadline(args), args.teacher_server_timeout)
