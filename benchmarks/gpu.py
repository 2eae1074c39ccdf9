"""Checks on one GPU, within eight minutes, what can only be seen there; at toy sizes on a machine without one.

    python benchmarks/gpu.py                                               # results in gpu.json as well
    python benchmarks/gpu.py --only vllm_full vllm_adapter rollouts        # engines, in a second call
    python benchmarks/gpu.py --toy                                         # on the CPU, what has a meaning there

This process imports everything once, and never uses the GPU. Each check is a fork of it with a time limit, so one that
fails, hangs or is killed costs only its own findings, and leaves no memory behind. A finding is measured and held to a
limit (PASS, FAIL), held to none (-), or left out with the reason (SKIP). Models are made on the spot with random
weights; nothing is downloaded. When the budget runs out, the checks that are left are skipped. At the end all findings
stand in a table in Markdown. The exit status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from gpu_checks import CHECKS, LATER, MACHINE, Check
from gpu_checks.findings import FAIL, NOTE, PASS, SKIP, Findings, finding, read

LEAST = 5.0
"""Seconds below which no check is begun."""
BUDGET = 480.0
STARTING = 30.0
"""Seconds of it without a check: a guess at what imports take."""
EVERY = {**CHECKS, **LATER}
LOG_LINES = 30
"""Lines shown of what a check printed, if it failed; all are in the file."""

IMPORTED_LATE = (
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    "torch._inductor.compile_fx",
    "deepspeed",
)
"""What models, compilers and accelerate import when they first need it, if it is installed."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # else no fork can use a GPU that its parent has asked for
}


# ---- In the process of a check --------------------------------------------------------------------------------------


def work(place: str, path: Path, device: str, limit: float) -> None:
    """Runs one check and ends the process, without the tear-down of engines, which may take as long as the check."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(limit - 2, 0.1), exit=False)  # where it hung
    module, _, function = place.partition(":")
    found, status = Findings(path, device), 1
    try:
        getattr(import_module(module), function)(found)
        found.done()
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(status)


# ---- In the process that others are forks of ------------------------------------------------------------------------


def prepare(places: Iterable[str] = ()) -> None:
    """Imports the modules of checks, and runs nothing.

    A fork has one of its parent's threads, and would wait for the others: none may have begun to compute.
    """
    root = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(root / "tests"), str(root)]
    for place in places:
        with contextlib.suppress(Exception):  # a check that needs it says why it fails
            import_module(place.partition(":")[0])
    gc.freeze()  # a collection in a fork does not walk, and so does not copy, what it has inherited


def run(check: Check, device: str, left: float) -> dict[str, Any]:
    """Seconds and findings of a check, and what it printed if it failed; it ends at its limit, or when no seconds are
    left, and no process of it stays.
    """
    limit, start = min(check.limit, left), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="trl_opsd-gpu-") as folder:  # and no model is left behind
        process = _begun(check, device, Path(folder), limit)
        try:
            code = _ended(process, limit)
        finally:
            with contextlib.suppress(ProcessLookupError):  # none is left
                os.killpg(process, signal.SIGKILL)
        if code is None and _ended(process, 10) is None:
            print("  A process does not end although it was killed; its memory may still be taken.", flush=True)
        found, done = read(Path(folder) / "findings")
        printed = (Path(folder) / "log").read_text(errors="replace").splitlines()
    if not done:
        verdict = SKIP if code is None and limit < check.limit else FAIL
        found.append(finding("the rest" if printed else "all", verdict, _why(code, limit, verdict, printed)))
    result = {"seconds": time.monotonic() - start, "findings": found}
    return result | ({"log": printed} if not done or any(one["verdict"] == FAIL for one in found) else {})


def _begun(check: Check, device: str, folder: Path, limit: float) -> int:
    """The id of a new process, which leads a session of its own and prints into a file."""
    files = os.open(os.devnull, os.O_RDONLY), os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    torch = sys.modules.get("torch")
    alone = check.alone or (torch is not None and torch.cuda.is_initialized())  # a fork could not use the GPU
    sys.stdout.flush()  # else what waits there would be printed twice
    if process := os.fork():
        for one in files:
            os.close(one)
        return process
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for stream in range(3):
            os.dup2(files[stream > 0], stream)
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        if device == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        if alone:
            given = [check.place, str(folder / "findings"), device, str(limit)]
            os.execv(sys.executable, [sys.executable, __file__, "--alone", *given])
        work(check.place, folder / "findings", device, limit)
    finally:
        os._exit(1)


def _ended(process: int, seconds: float) -> int | None:
    """The exit status of a process, or `None` if it runs for longer."""
    until = time.monotonic() + seconds
    while not (ended := os.waitpid(process, os.WNOHANG))[0]:
        if time.monotonic() > until:
            return None
        time.sleep(0.02)
    return os.waitstatus_to_exitcode(ended[1])


def _why(code: int | None, limit: float, verdict: str, printed: list[str]) -> str:
    if code is None:
        return f"not done after {limit:.0f} s" + (", when the budget ran out" if verdict == SKIP else "")
    if code < 0:
        return f"killed by signal {-code}" + (", as for lack of host memory" if code == -signal.SIGKILL else "")
    last = next((line for line in reversed(printed) if line.strip()), "it printed nothing")
    return f"exit status {code}: {last[:200]}"


def machine(toy: bool) -> tuple[dict[str, Any], bool]:
    """What there is, as a fork sees it, and whether forks can use it; else what a new process sees."""
    for alone in (False,) if toy else (False, True):
        result = run(replace(MACHINE, alone=alone), "cpu" if toy else "cuda:0", MACHINE.limit)
        seen = {one["what"]: one["measured"] for one in result["findings"]}
        if seen.get("gpu"):
            break
    return seen, not (alone and seen.get("gpu"))


# ---- The table ------------------------------------------------------------------------------------------------------


def table(results: Mapping[str, dict[str, Any]]) -> str:
    lines = ["| check | finding | measured | held to | |", "|---|---|---|---|---|"]
    for name, result in results.items():
        lines.append(f"| {name} | **all** | {result['seconds']:.1f} s | at most {EVERY[name].limit:g} s | |")
        for one in result["findings"]:
            cells = [name, one["what"], text(one), one["limit"], one["verdict"]]
            lines.append(f"| {' | '.join(' '.join(cell.replace('|', '/').split()) for cell in cells)} |")
    return "\n".join(lines)


def text(one: Mapping[str, Any]) -> str:
    """What was measured."""
    measured = one["measured"]
    return f"{measured:.4g} {one['unit']}".rstrip() if isinstance(measured, float) else f"{measured} {one['unit']}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=EVERY, metavar="NAME", help="these checks only; see --list")
    parser.add_argument("--list", action="store_true", help="print the checks and their limits, and run nothing")
    parser.add_argument("--toy", action="store_true", help="toy sizes on the CPU, as on a machine without a GPU")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds for all checks")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="where the results are written")
    parser.add_argument("--alone", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        place, path, device, limit = args.alone
        prepare()
        work(place, Path(path), device, float(limit))
    if args.list:
        print("\n".join(f"{name:14}{check.limit:5.0f} s  {check.about}" for name, check in EVERY.items()))
        return 0

    start = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the check that runs is ended, too
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    os.environ.update(ENVIRONMENT, CUDA_VISIBLE_DEVICES="" if args.toy else first)
    # kept, so that another run takes less time
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / "trl_opsd-compiled"))
    chosen = {name: check for name, check in EVERY.items() if name in (args.only or CHECKS)}
    places = [check.place for check in chosen.values() if not check.alone]
    prepare([*places, *IMPORTED_LATE] if places else [])
    imports = time.monotonic() - start
    seen, usable = machine(args.toy)
    if not usable:
        chosen = {name: replace(check, alone=True) for name, check in chosen.items()}
    seen |= {"imports": f"{imports:.1f} s, " + ("once" if usable else "again in each check: no fork can use the GPU")}
    device = "cuda:0" if seen.get("gpu") else "cpu"
    about = ", ".join(f"{name} {value}" for name, value in seen.items())
    print(about, *["Toy sizes on the CPU: limits on speed do not hold."] * (device == "cpu"), sep="\n", flush=True)
    results: dict[str, dict[str, Any]] = {}
    for name, check in chosen.items():
        left = args.budget - (time.monotonic() - start)
        print(f"\n{name}: {check.about}", flush=True)
        out = [finding("all", SKIP, f"the budget of {args.budget:.0f} s ran out")]
        results[name] = result = run(check, device, left) if left >= LEAST else {"seconds": 0.0, "findings": out}
        shown = [f"{one['verdict']} {one['what']}: {text(one)}" for one in result["findings"] if one["verdict"] == FAIL]
        shown += [f"| {line}" for line in result.get("log", [])[-LOG_LINES:]]
        print(*shown, f"{len(result['findings'])} findings in {result['seconds']:.1f} s", sep="\n  ", flush=True)
        verdicts = [one["verdict"] for each in results.values() for one in each["findings"]]
        counted = {verdict: verdicts.count(verdict) for verdict in (PASS, FAIL, SKIP, NOTE)}
        summary = {"machine": seen, "device": device, "budget": args.budget, "seconds": time.monotonic() - start}
        # after each, in case this process is ended
        args.json.write_text(json.dumps(summary | {"verdicts": counted, "checks": results}, indent=2) + "\n")
    verdict = ", ".join(f"{number} {name}" for name, number in counted.items() if name != NOTE)
    print(f"\n{about}\n\n{table(results)}\n\n{verdict} in {time.monotonic() - start:.0f} s; {args.json}", flush=True)
    return int(counted[FAIL] > 0)


if __name__ == "__main__":
    sys.exit(main())
