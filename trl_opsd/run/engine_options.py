"""Checks the options of engines that write completions: vLLM, in the process or served, and SGLang."""

from __future__ import annotations

from urllib.parse import urlsplit

from trl_opsd._compat.trl import DistillationConfig
from trl_opsd.run.ranges import at_least, at_least_one, in_range, one_of


def check_engines(args: DistillationConfig) -> None:
    """Refuses options of engines that are out of range, or contradict each other.

    Args:
        args ([`~trl.DistillationConfig`]):
            The options.

    Raises:
        ValueError: There is such an option.
    """
    _check_vllm(args)
    if args.sglang_server_url is not None:
        _check_sglang(args)
    if args.has_engine and not args.ds3_gather_for_generation:
        engine = "use_vllm=True" if args.use_vllm else "sglang_server_url"
        raise ValueError(
            f"`ds3_gather_for_generation=False` cannot be used with `{engine}`, the weights have to be gathered to be "
            "sent to it: remove it."
        )


def _check_vllm(args: DistillationConfig) -> None:
    one_of("vllm_mode", args.vllm_mode, ("colocate", "server"))
    one_of("vllm_weight_sync", args.vllm_weight_sync, ("auto", "adapter", "full"))
    one_of("vllm_sync_check", args.vllm_sync_check, ("every", "first", "never"))
    in_range("vllm_gpu_memory_utilization", args.vllm_gpu_memory_utilization, 0.0, 1.0, open_below=True)
    at_least("vllm_server_timeout", args.vllm_server_timeout, 0)
    at_least("sglang_server_timeout", args.sglang_server_timeout, 0)
    for name in ("vllm_server_port", "vllm_group_port"):
        in_range(name, getattr(args, name), 1, 65535)
    at_least_one("vllm_tensor_parallel_size", args.vllm_tensor_parallel_size)
    if args.vllm_max_model_length is not None:
        at_least_one("vllm_max_model_length", args.vllm_max_model_length)


def _check_sglang(args: DistillationConfig) -> None:
    url = args.sglang_server_url
    if args.use_vllm:
        raise ValueError(
            f"`sglang_server_url={url!r}` and `use_vllm=True`: two engines cannot write the same completions: leave "
            "one of them out."
        )
    if not _is_origin(url):
        raise ValueError(
            f"`sglang_server_url={url!r}`: expected a scheme, a host and a port, as 'http://127.0.0.1:30000'."
        )


def _is_origin(url: object) -> bool:
    try:
        parts = urlsplit(str(url))
        known = parts.port is not None or ":" not in parts.netloc.rpartition("]")[2]
    except ValueError:  # a port that is no number
        return False
    return known and parts.scheme in ("http", "https") and bool(parts.hostname) and not (parts.query or parts.fragment)
