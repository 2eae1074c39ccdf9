"""Measures the placements of a teacher: time, bytes on the device and bytes moved, beside accelerate's offload hooks.

    python benchmarks/teacher.py                                      # a small model, on any device
    python benchmarks/teacher.py --model 7B --dtype bfloat16 --rows 64 --length 2048

One optimizer step reads `rows` rows of `length` tokens once, whatever the number of accumulation steps. Models are
Qwen2.5-shaped with random weights; --layers 0 are the model's own, and --pass-bytes limit the activations of a pass.
Times are medians over interleaved repeats. On a CPU the "device" is the host, but weights are copied to separate
buffers as well; accelerate's hooks, which would copy nothing there, get weights that are copied on access.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from accelerate import cpu_offload
from common import device, options, qwen2, show, table
from timing import allocated, in_turns, ratio
from torch import Tensor

from trl_opsd.models.backbone import completion_hidden
from trl_opsd.models.grouping import bytes_per_token
from trl_opsd.teacher import FrozenTeacher, Resident
from trl_opsd.teacher.frozen import PASS_BYTES, pass_groups
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
    shape = {"intermediate_size": inner, "num_key_value_heads": key_values, "tie_word_embeddings": tied}
    shape |= {"max_position_embeddings": max(4096, args.length)}
    made = qwen2(hidden, args.layers or layers, vocabulary, heads=heads, dtype=args.dtype, on=args.device, **shape)
    return made.eval().requires_grad_(False)


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


def measure(args: argparse.Namespace) -> dict[str, Any]:
    rollout = make_rollout(args)
    programs = {name: placed(name, args, rollout) for name in PLACEMENTS} | {"accelerate": hooked(args, rollout)}
    outputs = {name: read() for name, (read, _) in programs.items()}
    before = {name: meter()["moved"] for name, (_, meter) in programs.items()}
    times = in_turns({name: read for name, (read, _) in programs.items()}, args.device, args.repeats, warm_ups=0)
    model = make_model(args)
    parts = parts_of(model)
    of_token, of_pair = bytes_per_token(model)
    rows = max(1, args.pass_bytes // (args.length * (of_token + of_pair * args.length)))
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
                "over_none": ratio(times[name], times["none"]),
                "equal": torch.equal(outputs[name], outputs["none"]),
            }
            for name, (_, meter) in programs.items()
        },
    }
    if args.device.type == "cpu":
        result["activation_bytes"] = allocated(programs["none"][0], args.device) - outputs["none"].nbytes
        result["activation_estimate"] = args.pass_bytes * min(rows, args.rows) // rows
    return result


def main() -> None:
    args = options(
        __doc__,
        model="small",
        layers=0,
        rows=8,
        length=128,
        dtype=torch.float32,
        pass_bytes=PASS_BYTES,
        repeats=5,
        device=device(),
    )
    found = measure(args)
    if args.json:
        show([found], args.json)
        return
    rows = [{"placement": name, **one} for name, one in found.pop("placements").items()]
    print(found, table(rows), sep="\n")


if __name__ == "__main__":
    main()
