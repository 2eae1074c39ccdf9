"""Measures the placements of a teacher: time, bytes on the device and bytes moved, beside accelerate's offload hooks.

    python benchmarks/teacher.py                                      # a small model, on any device
    python benchmarks/teacher.py --model 7B --dtype bfloat16 --rows 64 --length 2048

One optimizer step reads `rows` rows of `length` tokens once, whatever the number of accumulation steps. Models are
Qwen2.5-shaped with random weights. Times are medians over interleaved repeats. On a CPU the "device" is the host, but
weights are copied to separate buffers as well; accelerate's hooks, which would copy nothing there, get weights that are
copied on access.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from accelerate import cpu_offload
from timing import once
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, Qwen2Config

from trl_opsd.models.backbone import completion_hidden
from trl_opsd.teacher import FrozenTeacher, Resident
from trl_opsd.teacher.frozen import PASS_BYTES, bytes_per_token, pass_groups
from trl_opsd.teacher.offloaded import Hosted, Streamed, parts_of, tensors_of
from trl_opsd.types import Rollout

SHAPES = {  # hidden, inner, layers, heads, key-value heads, vocabulary, tied
    "small": (512, 2048, 12, 8, 2, 32000, False),
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
}
PLACEMENTS = {"none": Resident, "cpu": Hosted, "stream": Streamed}


class CopiedOnAccess(Mapping):
    """Weights in host memory for accelerate's hooks; each access copies a tensor and counts the bytes."""

    def __init__(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        self.tensors, self.device, self.moved = tensors, device, 0

    def __getitem__(self, name: str) -> Tensor:
        self.moved += self.tensors[name].nbytes
        return self.tensors[name].to(self.device, copy=True)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def make_model(args: argparse.Namespace) -> Any:
    hidden, inner, layers, heads, key_values, vocabulary, tied = SHAPES[args.model]
    config = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=args.layers or layers,
        num_attention_heads=heads,
        num_key_value_heads=key_values,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=max(4096, args.length),
    )
    torch.manual_seed(0)
    with args.device:
        return AutoModelForCausalLM.from_config(config, dtype=args.dtype).eval().requires_grad_(False)


def make_rollout(args: argparse.Namespace) -> Rollout:
    """Half prompt, half completion, no padding."""
    torch.manual_seed(0)
    prompt = args.length // 2
    ids = torch.randint(SHAPES[args.model][5], (args.rows, args.length), device=args.device)
    mask = torch.ones_like(ids)
    return Rollout(
        prompt_ids=ids[:, :prompt],
        prompt_mask=mask[:, :prompt],
        completion_ids=ids[:, prompt:],
        completion_mask=mask[:, prompt:],
        weights=mask[:, prompt:].float(),
    )


def groups(model: Any, rollout: Rollout, args: argparse.Namespace) -> list[list[int]]:
    """The rows of each pass."""
    lengths = [one.total for one in rollout.ended().measured()]
    return pass_groups(model, lengths, rollout.prompt_ids.device, pass_bytes=args.pass_bytes)


def hooked(args: argparse.Namespace, rollout: Rollout) -> tuple[Callable[[], Tensor], Callable[[], dict[str, int]]]:
    """accelerate's `cpu_offload`: the weights of a module are copied when it is called and freed when it returns."""
    model = make_model(args).cpu()
    largest = max(sum(one.nbytes for one in module.parameters(recurse=False)) for module in model.modules())
    weights = CopiedOnAccess({name: tensor.detach() for name, tensor in model.state_dict().items()}, args.device)
    model = cpu_offload(model, execution_device=args.device, state_dict=weights)
    chunks = [rollout.select(rows) for rows in groups(model, rollout, args)]

    def read() -> Tensor:
        with torch.no_grad():
            return torch.cat([completion_hidden(model, chunk).clone() for chunk in chunks])

    # The head is not on the device when the loss needs it; the embeddings are, while they are looked up.
    return read, lambda: {"between": 0, "during": largest, "moved": weights.moved}


def placed(
    name: str, args: argparse.Namespace, rollout: Rollout
) -> tuple[Callable[[], Tensor], Callable[[], dict[str, int]]]:
    teacher = FrozenTeacher(PLACEMENTS[name](make_model(args), args.device), pass_bytes=args.pass_bytes)
    prefetcher = getattr(teacher.placement, "prefetcher", None)
    whole = sum(tensor.nbytes for tensor in tensors_of(teacher.model))

    def meter() -> dict[str, int]:
        if prefetcher is None:
            return {"between": whole, "during": whole, "moved": 0}
        return {"between": prefetcher.held_bytes, "during": prefetcher.peak_bytes, "moved": prefetcher.moved_bytes}

    return lambda: teacher.targets(rollout).hidden, meter


def activation_bytes(read: Callable[[], Tensor]) -> int | None:
    """Peak of the bytes allocated in one reading with resident weights, on a CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        read()
    now = peak = 0
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def measure(args: argparse.Namespace) -> dict[str, Any]:
    rollout = make_rollout(args)
    programs = {name: placed(name, args, rollout) for name in PLACEMENTS} | {"accelerate": hooked(args, rollout)}
    outputs = {name: read() for name, (read, _) in programs.items()}
    before = {name: meter()["moved"] for name, (_, meter) in programs.items()}
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(args.repeats):
        for name, (read, _) in programs.items():
            times[name].append(once(read, args.device))
    model = make_model(args)
    parts = parts_of(model)
    rows = max(1, args.pass_bytes // (args.length * bytes_per_token(model, args.length)))
    width, vocabulary, bytes_each = outputs["none"].size(-1), SHAPES[args.model][5], args.dtype.itemsize
    result: dict[str, Any] = {
        "model_bytes": sum(tensor.nbytes for tensor in tensors_of(model)),
        "layer_bytes": max(sum(tensor.nbytes for tensor in own) for _, own in parts.layers),
        "head_bytes": sum(tensor.nbytes for tensor in parts.head),
        "passes": len(groups(model, rollout, args)),
        "tokens_per_pass": min(rows, args.rows) * args.length,
        "target_bytes_per_token": width * bytes_each,
        "logit_bytes_per_token": vocabulary * bytes_each,
        "placements": {
            name: meter()
            | {
                "moved": (meter()["moved"] - before[name]) // args.repeats,
                "seconds": statistics.median(times[name]),
                "over_none": statistics.median(a / b for a, b in zip(times[name], times["none"], strict=True)),
                "equal": torch.equal(outputs[name], outputs["none"]),
            }
            for name, (_, meter) in programs.items()
        },
    }
    if args.device.type == "cpu":
        result["activation_bytes"] = activation_bytes(programs["none"][0]) - outputs["none"].nbytes
        result["activation_estimate"] = args.pass_bytes * min(rows, args.rows) // rows
    return result


def table(result: dict[str, Any]) -> str:
    """MB and seconds for one optimizer step."""
    megabytes = {name: result[f"{name}_bytes"] / 1e6 for name in ("model", "layer", "head")}
    lines = [
        "  ".join(f"{name} {size:.1f} MB" for name, size in megabytes.items())
        + f"  {result['passes']} passes of {result['tokens_per_pass']} tokens",
        f"targets {result['target_bytes_per_token']} bytes per token, logits {result['logit_bytes_per_token']}: "
        f"{result['logit_bytes_per_token'] / result['target_bytes_per_token']:.1f}x",
        f"{'':12}{'between MB':>11}{'during MB':>11}{'moved MB':>10}{'s / pass':>10}{'vs none':>9}  bit-equal",
    ]
    for name, row in result["placements"].items():
        sizes = "".join(f"{row[key] / 1e6:{wide}.1f}" for key, wide in (("between", 11), ("during", 11), ("moved", 10)))
        lines.append(
            f"{name:12}{sizes}{row['seconds'] / result['passes']:10.3f}{row['over_none']:8.2f}x  {row['equal']}"
        )
    if "activation_bytes" in result:
        measured, estimated = result["activation_bytes"] / 1e6, result["activation_estimate"] / 1e6
        lines.append(f"activations of a pass {measured:.1f} MB, estimated {estimated:.1f} MB")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="small")
    parser.add_argument("--layers", type=int, help="layers, if not the model's own number")
    parser.add_argument("--rows", type=int, default=8, help="rows of a generation batch")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row, half of them completion")
    parser.add_argument("--dtype", type=lambda name: getattr(torch, name), default=torch.float32, metavar="float32")
    parser.add_argument(
        "--pass-bytes", type=int, default=PASS_BYTES, help="memory limit for the activations of a pass, in bytes"
    )
    parser.add_argument("--repeats", type=int, default=5)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    parser.add_argument("--device", type=torch.device, default=accelerator or torch.device("cpu"))
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    args = parser.parse_args()
    result = measure(args)
    print(json.dumps(result, indent=2) if args.json else table(result))


if __name__ == "__main__":
    main()
