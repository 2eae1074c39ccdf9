"""A student sharded over two processes by ZeRO-3 or FSDP2, with a vLLM engine in each."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from support import forks, tiny
from support.one_traceback import check_one_traceback
from support.processes import launch

pytest.importorskip("vllm")

import vllm_sharded

pytestmark = [pytest.mark.distributed, pytest.mark.vllm, pytest.mark.timeout(forks.SECONDS + 60)]

QUIET = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "TORCHDYNAMO_DISABLE": "1"}
MODES = {"full": "full", "merged": "full", "adapter": "adapter"}
"""How each variant of the script must send its weights."""
VARIANTS = {"zero3": ("full", "adapter"), "fsdp2": ("merged", "adapter")}
"""Of each strategy. FSDP2 merges an adapter in shards, ZeRO-3 in whole tensors; `"merged"` sends all, as `"full"`."""


def check(folder: Path, names: tuple[str, ...]) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    for name in names:
        print(f"\n{name}: log-prob gaps", *(f"{gap:.1e}" for gap in results[name]["gaps"]))
        assert results[name]["split"]
        assert results[name]["processes"] == 2
        assert results[name]["mode"] == MODES[name]
        assert len(results[name]["gaps"]) == 3, "a sync before each of three steps"
        assert max(results[name]["gaps"]) <= 1e-4
    first, *later = results["adapter"]["bytes"]
    assert first > later[0], "the base is sent once"
    assert later == [results["adapter bytes"]] * 2
    assert results["announced"]
    assert results["fault"] == ["an error", "an error"], "although only one engine was wrong"
    return results


def test_engines_get_base_and_adapter_of_a_zero3_student(tmp_path):
    tiny.qwen2(64, seed=0).save_pretrained(tmp_path / "student")
    forks.results("zero3_cpu", vllm_sharded.main, tmp_path, ["adapter"])
    assert check(tmp_path, ("adapter",))["held"] < 0.3, "the student is not gathered to verify a sync"


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2], ids=["an engine in each", "an engine over both"])
@pytest.mark.parametrize("strategy", VARIANTS)
def test_engines_get_whole_sharded_student_and_failure_ends_both(tmp_path, strategy, size):
    tiny.qwen2(64, seed=0).save_pretrained(tmp_path / "student")
    names = VARIANTS[strategy]
    printed = launch(strategy, Path(vllm_sharded.__file__), tmp_path, size, *names, status=1, **QUIET)
    ended = time.time()
    assert (tmp_path / "results.json").exists(), printed[-3000:]
    results = check(tmp_path, names)
    if strategy == "fsdp2":  # writes to the shards of ZeRO-3 by hand leave no trace
        assert results["noticed"] == {"a rollout": False, "the adapter": True, "the base": True, "loading": True}
    assert "[rank1]: RuntimeError: injected into sync" in printed
    check_one_traceback(printed, ended, first=1)


@pytest.mark.long
def test_engines_over_two_processes_generate_what_one_does(tmp_path):
    tiny.qwen2(64, seed=0).save_pretrained(tmp_path / "student")
    together = forks.results("ddp", vllm_sharded.written_together, tmp_path, 2, processes=4)
    (alone,) = forks.results("alone", vllm_sharded.written_together, tmp_path, 1).values()
    assert [len(of_one["sampled"]) for of_one in together.values()] == [*vllm_sharded.OF_EACH]
    for name, tolerance in {"sampled": None, "logprobs": 1e-4}.items():
        found = [one for of_one in together.values() for one in of_one[name]]
        assert found == (alone[name] if tolerance is None else pytest.approx(alone[name], abs=tolerance))
    assert len({str(of_one["drawn"]) for of_one in together.values()}) == 4, "each process has seeds of its own"
    for of_one in together.values():
        assert of_one["loss"] == pytest.approx(alone["loss"], abs=1e-5)
        assert "sampled different tokens" in of_one["in disagreement"]
    assert not alone["in disagreement"]
