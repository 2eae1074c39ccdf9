"""A student split over two processes by DeepSpeed ZeRO-3, with a vLLM engine in each: one launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
from printed import check_one_traceback

pytest.importorskip("vllm")

HERE = Path(__file__).parent
SECONDS = 240


@pytest.mark.distributed
@pytest.mark.vllm
@pytest.mark.timeout(SECONDS + 30)
def test_engines_that_do_not_get_the_whole_of_a_split_student_are_noticed_and_one_that_fails_ends_both(tmp_path):
    tiny.qwen2(64, seed=0).save_pretrained(tmp_path / "student")
    config = HERE.parent / "distributed" / "zero3_two_processes.yaml"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, "--main_process_port", "0"]
    path = os.pathsep.join([str(HERE.parent), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])
    finished = subprocess.run(
        [*launch, HERE / "vllm_sharded.py", tmp_path],
        env={**os.environ, "PYTHONPATH": path, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    ended = time.time()
    assert (tmp_path / "results.json").exists(), finished.stderr[-3000:]
    results = json.loads((tmp_path / "results.json").read_text())
    print(f"\n{results}")
    for name in ("full", "adapter"):
        assert results[name]["processes"] == 2
        assert results[name]["mode"] == name
        assert len(results[name]["gaps"]) == 3, "a sync before each of three steps"
        assert max(results[name]["gaps"]) <= 1e-4
    assert results["fault"] == ["an error", "an error"], "although only one engine was wrong"
    assert finished.returncode == 1
    assert "[rank1]: RuntimeError: injected into sync" in finished.stderr
    check_one_traceback(finished.stderr, ended, first=1)
