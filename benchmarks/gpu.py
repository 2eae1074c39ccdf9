"""Checks on one GPU, within eight minutes, what can only be seen there; at toy sizes on a machine without one.

    python benchmarks/gpu.py                                   # results in gpu.json as well
    python benchmarks/gpu.py --only vllm_full vllm_adapter rollouts
    python benchmarks/gpu.py --only loss_speed teacher
    python benchmarks/gpu.py --toy                             # what has a meaning on a CPU, on the CPU

Each check is a process of its own with a time limit, so one that fails, hangs or is killed costs only its own findings,
and leaves no memory behind. A finding is measured and held to a limit (PASS, FAIL), held to none (-), or left out with
the reason (SKIP). Models are made on the spot with random weights; nothing is downloaded. When the budget runs out, the
checks that are left are skipped. The exit status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from gpu_checks import CHECKS, LATER, Check
from gpu_checks.findings import FAIL, NOTE, PASS, SKIP, Findings, read

LEAST = 15.0
"""Seconds below which no check is begun: importing torch, TRL and vLLM takes most of them."""
BUDGET = 480.0
EVERY = {**CHECKS, **LATER}
LOG_LINES = 400
"""Lines kept of what a check printed, if it failed; the last of them are also shown."""
SHOWN_LINES = 30

PROBE = """
import json, torch
gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
print(json.dumps({"gpu": gpu and gpu.name, "bytes": gpu and gpu.total_memory, "torch": torch.__version__}))
"""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "PYTHONUNBUFFERED": "1",
}


# ---- In the process of a check --------------------------------------------------------------------------------------


def work(place: str, found: Findings, limit: float) -> None:
    """Runs one check and ends the process, without the tear-down of engines, which may take as long as the check."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(limit - 2, 0.1), exit=False)  # where it hung
    root = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(root / "tests"), str(root)]
    module, _, function = place.partition(":")
    try:
        getattr(import_module(module), function)(found)
        found.done()
    except BaseException:
        traceback.print_exc()
        _leave(1)
    _leave(0)


def _leave(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


# ---- The runner -----------------------------------------------------------------------------------------------------


def run_all(
    checks: Mapping[str, Check], device: str, budget: float, least: float = LEAST
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Runs checks one after the other.

    Args:
        checks (`Mapping[str, Check]`):
            By name.
        device (`str`):
            `"cuda:0"`, or `"cpu"` for toy sizes.
        budget (`float`):
            Seconds for all.
        least (`float`, *optional*):
            Seconds below which no check is begun.

    Yields:
        The name and the result of each: seconds, findings, and the end of what it printed if it failed.
    """
    start = time.monotonic()
    for name, check in checks.items():
        left = budget - (time.monotonic() - start)
        print(f"\n{name}: {check.about}", flush=True)
        yield name, (_skipped(budget) if left < least else _run(check, device, left, budget))


def _run(check: Check, device: str, left: float, budget: float) -> dict[str, Any]:
    limit, start = min(check.limit, left), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="trl_opsd-gpu-") as folder:
        path, log = Path(folder) / "findings", Path(folder) / "log"
        command = [sys.executable, __file__, "--place", check.place, "--findings", str(path)]
        command += ["--device", device, "--limit", str(limit)]
        code = _ended_after(command, {**environment(device), "TMPDIR": folder}, log, limit)  # no model is left behind
        found, done = read(path)
        printed = log.read_text(errors="replace").splitlines()
    if not done:
        found.append(_why_it_ended(code, limit, check, budget, printed))
    result = {"seconds": time.monotonic() - start, "findings": found}
    if not done or any(one["verdict"] == FAIL for one in found):
        result["log"] = printed[-LOG_LINES:]
    return result


def _ended_after(command: list[str], environment: dict[str, str], log: Path, limit: float) -> int | None:
    """The exit status of a process, or `None` if it was ended at its limit; what it started ends with it."""
    with log.open("wb") as printed:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):  # none is left
                os.killpg(process.pid, signal.SIGKILL)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                print("  A process does not end although it was killed; its memory may still be taken.", flush=True)


def _why_it_ended(code: int | None, limit: float, check: Check, budget: float, printed: list[str]) -> dict[str, Any]:
    verdict = FAIL
    if code is None and limit < check.limit:
        verdict, why = SKIP, f"the budget of {budget:.0f} s ran out after {limit:.0f} s of it"
    elif code is None:
        why = f"not done after {limit:.0f} s"
    elif code < 0:
        why = f"killed by signal {-code}" + (", as for lack of host memory" if code == -signal.SIGKILL else "")
    else:
        last = next((line for line in reversed(printed) if line.strip()), "it printed nothing")
        why = f"exit status {code}: {last[:200]}"
    return {"what": "the rest" if printed else "all", "verdict": verdict, "measured": why, "limit": "", "unit": ""}


def _skipped(budget: float) -> dict[str, Any]:
    why = f"the budget of {budget:.0f} s ran out"
    return {
        "seconds": 0.0,
        "findings": [{"what": "all", "verdict": SKIP, "measured": why, "limit": "", "unit": ""}],
    }


def environment(device: str) -> dict[str, str]:
    """That of a check: one GPU or none, and no network."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    compiled = Path(tempfile.gettempdir()) / "trl_opsd-compiled"  # kept, so that another run takes less time
    return {
        **os.environ,
        **ENVIRONMENT,
        "CUDA_VISIBLE_DEVICES": "" if device == "cpu" else first,
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(compiled)),
    }


# ---- The table ------------------------------------------------------------------------------------------------------


def show(result: dict[str, Any]) -> None:
    for one in result["findings"]:
        measured = one["measured"]
        text = f"{measured:.4g}" if isinstance(measured, float) else str(measured)
        text = f"{text} {one['unit']}".rstrip()
        if one["verdict"] == SKIP:
            print(f"  {SKIP:5} {one['what']}: {text}")
        else:
            print(f"  {one['verdict']:5} {one['what']:62} {text:>16}  {one['limit']}".rstrip())
    if "log" in result:
        print("  ".join(["", *(f"| {line}\n" for line in result["log"][-SHOWN_LINES:])]), end="")
    print(f"  {result['seconds']:.1f} s", flush=True)


def counted(results: Mapping[str, dict[str, Any]]) -> dict[str, int]:
    verdicts = [one["verdict"] for result in results.values() for one in result["findings"]]
    return {verdict: verdicts.count(verdict) for verdict in (PASS, FAIL, SKIP, NOTE)}


def machine() -> dict[str, Any]:
    """What there is, seen by a process of its own: a context of this one would take memory from the checks."""
    found: dict[str, Any] = json.loads(
        subprocess.run(
            [sys.executable, "-c", PROBE], env=environment("cuda:0"), stdout=subprocess.PIPE, text=True, check=True
        ).stdout.splitlines()[-1]
    )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=EVERY, metavar="NAME", help="these checks only; see --list")
    parser.add_argument("--list", action="store_true", help="print the checks and their limits, and run nothing")
    parser.add_argument("--toy", action="store_true", help="toy sizes on the CPU, as on a machine without a GPU")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds for all checks")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="where the results are written")
    parser.add_argument("--place", help=argparse.SUPPRESS)
    parser.add_argument("--findings", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--device", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.place:
        work(args.place, Findings(args.findings, args.device), args.limit)
    if args.list:
        print("\n".join(f"{name:14}{check.limit:5.0f} s  {check.about}" for name, check in EVERY.items()))
        return 0

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the check that runs is ended, too
    start, seen = time.monotonic(), machine()
    device = "cpu" if args.toy or seen["gpu"] is None else "cuda:0"
    print(", ".join(f"{name} {value}" for name, value in seen.items()), flush=True)
    if device == "cpu":
        print("Toy sizes on the CPU: limits on speed do not hold.", flush=True)
    chosen = {name: check for name, check in EVERY.items() if name in (args.only or CHECKS)}
    results: dict[str, dict[str, Any]] = {}
    summary: dict[str, Any] = {"machine": seen, "device": device, "budget": args.budget}
    for name, result in run_all(chosen, device, args.budget - (time.monotonic() - start)):
        show(result)
        results[name] = result
        summary |= {"seconds": time.monotonic() - start, "verdicts": counted(results), "checks": results}
        args.json.write_text(json.dumps(summary, indent=2) + "\n")  # after each, in case this process is ended
    verdicts = ", ".join(f"{number} {verdict}" for verdict, number in summary["verdicts"].items() if verdict != NOTE)
    print(f"\n{verdicts} in {summary['seconds']:.0f} s; {args.json}", flush=True)
    return int(summary["verdicts"][FAIL] > 0)


if __name__ == "__main__":
    sys.exit(main())
