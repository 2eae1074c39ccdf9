"""A student sharded over two processes by ZeRO-3 or FSDP2, with a vLLM engine in each."""

from __future__ import annotations

import pytest
from support import forks, tiny

pytest.importorskip("vllm")

import vllm_sharded

pytestmark = [pytest.mark.distributed, pytest.mark.vllm, pytest.mark.timeout(forks.SECONDS + 60)]


@pytest.mark.parametrize(
    ("strategy", "names", "size"),
    [
        ("zero3_cpu", ["adapter"], 1),
        *(
            pytest.param(strategy, names, size, marks=pytest.mark.long)
            # FSDP2 merges an adapter in shards, ZeRO-3 in whole tensors; "merged" sends all, as "full"
            for strategy, names in {"zero3_cpu": ["full", "adapter"], "fsdp2_cpu": ["merged", "adapter"]}.items()
            for size in (1, 2)
        ),
    ],
)
def test_engines_get_whole_sharded_student(tmp_path, strategy, names, size):
    tiny.qwen2(64, seed=0).save_pretrained(tmp_path / "student")
    results = forks.results(strategy, vllm_sharded.main, tmp_path, names, size)[0]
    for name in names:
        found = results[name]
        assert found["split"]
        assert found["processes"] == 2
        assert found["mode"] == ("adapter" if name == "adapter" else "full")
        assert len(found["gaps"]) == 3, "a sync before each of three steps"
        assert max(found["gaps"]) <= 1e-4
    first, *later = results["adapter"]["bytes"]
    assert first > later[0], "the base is sent once"
    assert later == [results["adapter bytes"]] * 2
    assert results["announced"]
    assert results["fault"] == ["an error", "an error"], "although only one engine was wrong"
    if names == ["adapter"]:
        assert results["held"] < 0.3, "the student is not gathered to verify a sync"
    if strategy == "fsdp2_cpu":  # writes to the shards of ZeRO-3 by hand leave no trace
        assert results["noticed"] == {"a rollout": False, "the adapter": True, "the base": True, "loading": True}


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
