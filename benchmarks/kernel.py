"""Errors, traffic and registers of the fused kernel of the loss, on a machine without a GPU.

    python benchmarks/kernel.py

Errors are those of the kernel in Triton's interpreter, relative to the largest entry of the same in float64, with the
eager steps beside it; far apart, near agreement (a divergence of 1e-6 nats), and with every property a head can have.
Bytes are counted as the interpreter reads and writes them. Registers and spills are those of Triton's own assembler,
for which no GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

INTERPRETED = "TRITON_INTERPRET"
ARCHITECTURES = {80: "sm_80", 90: "sm_90a", 100: "sm_100a"}
"""A100, H100 and H200, B200."""
TARGET = "the target"
CLIP = 0.02
"""Nats; of distributions that are far apart it clips the largest entries."""


def tile(rows: int, width: int, values: Any = None, dtype: Any = None) -> Any:
    """[rows, width], stored as in the loss, with NaN beyond the vocabulary."""
    import torch

    stored = torch.full((rows, -(-width // 64) * 64), torch.nan, dtype=dtype)[:, :width]
    return stored if values is None else stored.copy_(values)


def case(kind: str, rows: int, width: int) -> dict[str, Any]:
    """Products of both models, the sampled tokens, and what is done to them."""
    import torch

    from trl_opsd.losses import Sampled
    from trl_opsd.losses.elementwise import Finish

    generator = torch.Generator().manual_seed(rows + width)

    def random(*shape: int) -> torch.Tensor:
        return 3 * torch.randn(shape, generator=generator)

    student, teacher, weights, finishes = random(rows, width), random(rows, width), None, (Finish(None, None),) * 2
    sampled = Sampled(torch.randint(width, (rows,), generator=generator))
    if kind == "near":
        teacher = student + 5e-4 * random(rows, width)
    if kind == "huge":
        student, teacher = 1e4 * student, 1e4 * teacher
    if kind == "rich":
        biases = random(width), random(width)
        biases[0][1 :: max(2, width // 3)] = biases[1][1 :: max(2, width // 3)] = -torch.inf
        finishes = Finish(biases[0], None), Finish(biases[1], None)
        weights = torch.linspace(0, 2, rows)
        ids = torch.arange(rows) * 5 % width  # none that a bias excludes
        ids = ids - (ids % max(2, width // 3) == 1).long()
        sampled = Sampled(ids.clamp(min=0), random(rows), -random(rows).abs() - 1)
    if kind == "capped":
        finishes = Finish(random(width) / 30, 30.0), Finish(None, 20.0)
        student, teacher = student / 30, teacher / 30
        sampled = Sampled(sampled.ids, random(rows))
    return {"student": student, "teacher": teacher, "weights": weights, "finishes": finishes, "sampled": sampled}


def objectives() -> list[tuple[Any, float | None]]:
    """Every divergence that has a kernel, at its default setting and at an extreme one, with and without a clip."""
    from trl_opsd.losses import GeneralizedJSD, SampledReverseKL, SkewedForwardKL
    from trl_opsd.losses.device import KERNELS

    named = [kind(0.5) if kind is GeneralizedJSD else kind() for kind in KERNELS]
    extreme = [GeneralizedJSD(0.1), SkewedForwardKL(0.9)]
    return [*((one, None) for one in (*named, *extreme)), *((one, CLIP) for one in named if one != SampledReverseKL())]


def oracle(divergence: Any, clip: float | None, given: dict[str, Any]) -> tuple[Any, Any]:
    """Statistics and gradient in float64, by autograd."""
    import torch

    from trl_opsd.losses import SampledReverseKL
    from trl_opsd.losses.sampled import drawn

    products = given["student"].double().requires_grad_()
    logs = []
    for finish, one in zip(given["finishes"], (products, given["teacher"].double()), strict=True):
        logits = one if finish.bias is None else one + finish.bias.double()
        logits = logits if finish.cap is None else finish.cap * logits.tanh()
        logs.append(logits.clamp(min=torch.finfo(torch.float64).min).log_softmax(-1))
    chosen = [log.gather(-1, given["sampled"].ids.unsqueeze(-1)).squeeze(-1) for log in logs]
    values, pulled, importance, _ = drawn(divergence, given["sampled"], *chosen)
    clipped = torch.zeros(len(values))
    if not isinstance(divergence, SampledReverseKL):
        entries = divergence.entries(*logs)
        values = (entries if clip is None else entries.clamp(max=clip)).sum(-1)
        clipped = clipped if clip is None else (entries > clip).any(-1)
    (gradient,) = torch.autograd.grad((values + pulled).sum(), products)
    cap, weights = given["finishes"][0].cap or 1.0, given["weights"]
    factor = torch.ones(len(values)) if weights is None else weights
    entropies = [-(log.exp() * log.clamp(min=-1e300)).sum(-1) for log in logs]
    ratio = logs[1].exp().sum(-1) / logs[1].exp().amax(-1) / logs[1].size(-1)
    same, first = logs[0].argmax(-1) == logs[1].argmax(-1), chosen[1] == logs[1].amax(-1)
    of_sampled = pulled * factor, same, first, importance, chosen[0]
    statistics = torch.stack([values * factor, *entropies, ratio, clipped, *of_sampled])
    return statistics.detach(), gradient * factor.unsqueeze(-1) / cap


def error(found: Any, expected: Any) -> float:
    """The largest difference, relative to the largest number; all may be 0 or infinite."""
    found, finite = found.double(), expected.isfinite()
    if not found[~finite].equal(expected[~finite]):
        return float("inf")
    largest = expected[finite].abs().max().clamp(min=1e-9)
    return float((found - expected)[finite].abs().max() / largest)


def errors(rows: int, widths: list[int]) -> list[dict[str, Any]]:
    """Errors of the kernel and of the eager steps, and the bytes that the kernel moves for a pair of logits."""
    import torch

    from trl_opsd.losses.elementwise import eager_
    from trl_opsd.losses.fused import fused_

    found = []
    for divergence, clip in objectives():
        for kind in ("far", "near", "huge", "rich", "capped"):
            for width in widths:
                given = case(kind, rows, width)
                statistics, gradient = oracle(divergence, clip, given)
                name = repr(divergence) if clip is None else f"{divergence!r} clipped"
                row: dict[str, Any] = {"divergence": name, "kind": kind, "width": width}
                for name, step in (("kernel", fused_), ("eager", eager_)):
                    for dtype in (torch.float32, torch.bfloat16):
                        tiles = tile(rows, width, given["student"]), tile(rows, width, given["teacher"])
                        out = tiles[0] if dtype == torch.float32 else tile(rows, width, dtype=dtype)
                        with counted() as bytes_moved:
                            got = step(
                                divergence, clip, given["finishes"], *tiles, given["weights"], given["sampled"], out
                            )
                        row[f"{name} {str(dtype).removeprefix('torch.')}"] = {
                            "value": error(got[0], statistics[0]),
                            "entropies": max(error(got[1], statistics[1]), error(got[2], statistics[2])),
                            "ratio": error(got[3], statistics[3]),
                            "clipped": error(got[4], statistics[4]),
                            "nll": error(got[5], statistics[5]),
                            "firsts": max(error(got[6], statistics[6]), error(got[7], statistics[7])),
                            "importance": error(got[8], statistics[8]),
                            "sampled": error(got[9], statistics[9]),
                            "gradient": error(out, gradient),
                            "bytes": bytes_moved[0] / (rows * width),
                        }
                found.append(row)
    return found


def target_cases(rows: int, width: int) -> dict[str, dict[str, Any]]:
    """Products of a teacher and of models beside it, and what is done to them."""
    import torch

    from trl_opsd.losses.elementwise import Finish

    generator = torch.Generator().manual_seed(rows + width)
    products = 3 * torch.randn(3, rows, width, generator=generator)
    biases = torch.randn(2, width, generator=generator)
    biases[0][1::7] = biases[1][2::5] = -torch.inf  # the teacher excludes some tokens, the other model some others
    plain, place = Finish(None, None), [(-1.0, None), (1.0, 10.0)]
    some = [Finish(one, None) for one in biases]
    rich = [Finish(biases[0], 30.0), some[1], Finish(None, 20.0)]
    return {
        "bounded": {"products": products[:2], "finishes": [plain] * 2, "pushes": [(0.5, 2.0)]},
        "in its place": {"products": products, "finishes": [plain] * 3, "pushes": place},
        "excluding": {
            "products": products[:2],
            "finishes": [Finish(biases[0], None), rich[1]],
            "pushes": [(2.0, None)],
        },
        "rich": {"products": products, "finishes": rich, "pushes": [(2.0, None), (0.5, 3.0)]},
    }


def target_oracle(given: dict[str, Any]) -> Any:
    """Log-probabilities of the target, in float64."""
    import torch

    from trl_opsd.losses.elementwise import FARTHEST

    logs = []
    for finish, products in zip(given["finishes"], given["products"].double(), strict=True):
        logits = products if finish.bias is None else (products + finish.bias.double()).clamp(min=-1e38)
        logits = logits if finish.cap is None else finish.cap * logits.tanh()
        logs.append(logits.log_softmax(-1))
    target = logs[0]
    for finish, log, (push, bound) in zip(given["finishes"][1:], logs[1:], given["pushes"], strict=True):
        gap = logs[0] - log
        if bound is not None:
            gap = bound * (gap / bound).tanh()
        elif finish.bias is not None or given["finishes"][0].bias is not None:
            gap = gap.clamp(-FARTHEST, FARTHEST)
        target = target + push * gap
    return target.masked_fill(target < -1e30, -torch.inf).log_softmax(-1)


def targets(rows: int, widths: list[int]) -> list[dict[str, Any]]:
    """Errors of the target's log-probabilities, and the bytes that its kernel moves for a logit of each model."""
    import torch

    from trl_opsd.losses.fused import fused_target_
    from trl_opsd.losses.target import target_

    found = []
    for width in widths:
        for kind, given in target_cases(rows, width).items():
            row: dict[str, Any] = {"target": kind, "models": len(given["products"]), "width": width}
            for name, step in (("kernel", fused_target_), ("eager", target_)):
                tiles = [tile(rows, width, one) for one in given["products"]]
                with counted() as bytes_moved:
                    step(given["finishes"], tiles, given["pushes"])
                logs = tiles[0].double().masked_fill(tiles[0] < -1e30, -torch.inf).log_softmax(-1)
                row[name] = error(logs, target_oracle(given))
                row[f"{name} bytes"] = bytes_moved[0] / (rows * width)
                row[f"{name} keeps"] = all(map(torch.equal, tiles[1:], given["products"][1:]))
            found.append(row)
    return found


class counted:
    """Counts the bytes that Triton's interpreter reads and writes."""

    def __enter__(self) -> list[int]:
        from triton.runtime.interpreter import InterpreterBuilder

        self._before = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
        count = [0]

        def wrapped(original: Any, mask_at: int) -> Any:
            def call(builder: Any, pointers: Any, *others: Any) -> Any:
                count[0] += int(others[mask_at].data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8
                return original(builder, pointers, *others)

            return call

        InterpreterBuilder.create_masked_load = wrapped(self._before[0], 0)
        InterpreterBuilder.create_masked_store = wrapped(self._before[1], 1)
        return count

    def __exit__(self, *_: object) -> None:
        from triton.runtime.interpreter import InterpreterBuilder

        InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = self._before


def compiled(architectures: list[int]) -> list[dict[str, Any]]:
    """Registers of a thread, bytes spilled, places in loops where threads wait for each other, and accesses of memory
    by their width, for each kernel and architecture.
    """
    import triton
    from triton.backends import nvidia
    from triton.backends.compiler import GPUTarget

    from trl_opsd.losses.fused import KERNELS

    found = []
    for divergence in (*KERNELS, None):
        for rich in (False, True):
            for architecture in architectures:
                target = GPUTarget("cuda", architecture, 32)
                source = specialized_target(rich) if divergence is None else specialized(divergence, rich)
                built = triton.compile(source, target=target, options={"num_warps": 8})
                name = "ptxas-blackwell" if architecture >= 100 else "ptxas"
                with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
                    file.write(built.asm["ptx"])
                    file.flush()
                    command = [Path(nvidia.__file__).parent / "bin" / name, "-v", file.name, "-o", os.devnull]
                    command.append(f"--gpu-name={ARCHITECTURES[architecture]}")
                    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
                parts = [built.asm["ptx"][at:end] for at, end in loops(built.asm["ptx"])]
                widths = [
                    int(number or 1) for number in re.findall(r"(?:ld|st)\.global(?:\.v(\d))?\.", built.asm["ptx"])
                ]
                found.append(
                    {
                        "divergence": TARGET if divergence is None else divergence.__name__,
                        "rich": rich,
                        "architecture": ARCHITECTURES[architecture],
                        "registers": int(re.findall(r"Used (\d+) registers", said)[0]),
                        "spilled": int(re.findall(r"(\d+) bytes spill stores", said)[0]),
                        "waits": sum(len(re.findall(r"\b(?:bar\.sync|barrier|shfl)", part)) for part in parts),
                        "loops": len(parts),
                        "wide": sum(width == 4 for width in widths),
                        "narrow": sum(width < 4 for width in widths),
                    }
                )
    return found


def loops(ptx: str) -> list[tuple[int, int]]:
    """Where they begin and end: a label, and a jump back to it."""
    jumps = [(ptx.find(f"\n{jump[1]}:"), jump.start()) for jump in re.finditer(r"bra\S*\s+(\$\w+);", ptx)]
    return [(label, jump) for label, jump in jumps if 0 <= label < jump]


def specialized(divergence: type, rich: bool) -> Any:
    """The kernel as a run on a GPU compiles it: for aligned rows, an odd vocabulary and a gradient in bfloat16."""
    from trl_opsd.losses import SampledReverseKL, fused

    kernel, policy = fused.KERNELS[divergence], divergence is SampledReverseKL
    clips = rich and not policy
    total = fused.THIRD_PASS.value if clips else kernel.total
    kinds: dict[str, Any] = dict.fromkeys(("student", "teacher", "statistics"), "*fp32")
    kinds |= {"gradient": "*bf16", "ids": "*i64"} | dict.fromkeys(("setting", "floor", "drift"), "fp32")
    optional = dict.fromkeys(("student_bias", "teacher_bias", "weights", "nll_weights"), "*fp32")
    optional |= dict.fromkeys(("student_cap", "teacher_cap"), "fp32")
    kinds |= optional if rich else dict.fromkeys(optional, None)
    kinds |= {"clip": "fp32" if clips else None, "logprobs": "*fp32" if rich and policy else None}
    constants = {"TERMS": kernel.terms, "TOTAL": total, "POLICY": policy, "BLOCK": fused._BLOCK, "LANES": fused._LANES}
    return as_compiled(fused._rows, kinds, constants)


def specialized_target(rich: bool) -> Any:
    """The kernel of the target: one model with a bound; `rich`, two with all that a head may have."""
    from trl_opsd.losses import fused

    others = 1 + rich
    kinds = {
        "teacher": "*fp32",
        "others": ("*fp32",) * others,
        "biases": ("*fp32" if rich else None,) * (1 + others),
        "caps": ("fp32" if rich else None,) * (1 + others),
        "pushes": ("fp32",) * others,
        "bounds": ("fp32", None)[:others],
    }
    return as_compiled(fused._targets, kinds, {"BLOCK": fused._TARGET_BLOCK, "LANES": fused._LANES})


def as_compiled(kernel: Any, kinds: dict[str, Any], constants: dict[str, Any]) -> Any:
    """The source of a kernel with arguments of these kinds, `None` for none; all others are integers."""
    from triton.compiler import ASTSource

    names, aligned = kernel.arg_names, []
    constexprs = {(names.index(name),): value for name, value in constants.items()}

    def kind_of(kind: Any, *path: int) -> Any:
        if isinstance(kind, tuple):
            return tuple(kind_of(one, *path, place) for place, one in enumerate(kind))
        if kind is None:
            constexprs[path] = None
        if path in constexprs:
            return "constexpr"
        if kind.startswith("*") or names[path[0]] == "padded" or names[path[0]].endswith("stride"):
            aligned.append(path)
        return kind

    signature = {name: kind_of(kinds.get(name, "i32"), place) for place, name in enumerate(names)}
    return ASTSource(kernel, signature, constexprs, {path: [["tt.divisibility", 16]] for path in aligned})


def in_process(*options: object, interpreted: bool) -> list[dict[str, Any]]:
    """One of the two parts, in a process of its own: Triton decides at its import whether it interprets."""
    env = {name: value for name, value in os.environ.items() if name != INTERPRETED}
    command = [sys.executable, __file__, "--json", *map(str, options)]
    run = subprocess.run(
        command, env=env | ({INTERPRETED: "1"} if interpreted else {}), stdout=subprocess.PIPE, text=True, check=True
    )
    found: list[dict[str, Any]] = json.loads(run.stdout[run.stdout.index("[") :])
    return found


def measure(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    widths, architectures = map(str, args.widths), map(str, args.architectures)
    interpreted = in_process("--part", "errors", "--rows", args.rows, "--widths", *widths, interpreted=True)
    return {
        "errors": [row for row in interpreted if "target" not in row],
        "targets": [row for row in interpreted if "target" in row],
        "compiled": in_process("--part", "compiled", "--architectures", *architectures, interpreted=False),
    }


def table(result: dict[str, list[dict[str, Any]]]) -> str:
    """Of all widths the largest errors; value, entropies and gradient of kernel and eager steps."""
    names = ("kernel float32", "kernel bfloat16", "eager float32")
    parts = ("value", "entropies", "gradient")
    lines = [f"{'':40}" + "".join(f"{name:>30}" for name in names) + f"{'bytes per pair':>18}"]
    lines.append(f"{'':40}" + "".join(f"{part:>10}" for part in parts) * len(names) + f"{'fp32':>10}{'bf16':>8}")
    for key in dict.fromkeys((row["divergence"], row["kind"]) for row in result["errors"]):
        rows = [row for row in result["errors"] if (row["divergence"], row["kind"]) == key]
        line = f"{key[0]:34}{key[1]:6}"
        line += "".join(f"{max(row[name][part] for row in rows):10.1e}" for name in names for part in parts)
        widest = max(rows, key=lambda row: row["width"])
        lines.append(line + f"{widest[names[0]]['bytes']:10.1f}{widest[names[1]]['bytes']:8.1f}")
    lines.append(f"\n{TARGET:28}{'models':>8}{'kernel':>10}{'eager':>10}{'bytes per logit':>18}")
    for row in result["targets"]:
        sizes = f"{row['target']:18}{row['width']:10}{row['models']:8}"
        lines.append(f"{sizes}{row['kernel']:10.1e}{row['eager']:10.1e}{row['kernel bytes']:18.1f}")
    lines.append(f"\n{'':32}{'registers':>10}{'spilled':>9}{'waits':>7}{'wide':>6}{'narrow':>8}")
    for row in result["compiled"]:
        name = f"{row['divergence']}{' rich' if row['rich'] else ''}"
        counts = f"{row['registers']:8}{row['spilled']:9}{row['waits']:7}{row['wide']:6}{row['narrow']:8}"
        lines.append(f"{name:28}{row['architecture']:8}{counts}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=3)
    parser.add_argument("--widths", type=int, nargs="+", default=[2, 37, 64, 2048, 2049, 5001])
    parser.add_argument("--architectures", type=int, nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    parser.add_argument("--part", choices=("errors", "compiled"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        interpreted = args.part == "errors"
        found = [*errors(args.rows, args.widths), *targets(args.rows, args.widths)] if interpreted else []
        found += [] if interpreted else compiled(args.architectures)
        print(json.dumps(found))
        return
    result = measure(args)
    print(json.dumps(result, indent=2) if args.json else table(result))


if __name__ == "__main__":
    main()
