"""Two real processes under DeepSpeed ZeRO-3: one launch, several trainings inside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from peft import LoraConfig

HERE = Path(__file__).parent
SECONDS = 240


@pytest.mark.distributed
@pytest.mark.timeout(SECONDS + 30)
def test_a_student_split_over_two_processes_has_the_losses_of_a_whole_one(make_trainer, tmp_path):
    tiny.qwen2(32, seed=0).save_pretrained(tmp_path / "student")
    teacher = tiny.qwen2(48, seed=1)
    teacher.save_pretrained(tmp_path / "teacher")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", HERE / "zero3_two_processes.yaml"]
    path = os.pathsep.join([str(HERE.parent), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])
    finished = subprocess.run(
        [*launch, "--main_process_port", "0", HERE / "train_sharded.py", tmp_path],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    results = json.loads((tmp_path / "results.json").read_text())
    for name, lora in (("full", None), ("lora", LoraConfig(r=4, target_modules="all-linear"))):
        whole = make_trainer(peft_config=lora, gradient_accumulation_steps=2)
        whole.train()
        expected = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
        assert results[name]["processes"] == 2
        assert results[name]["losses"] == pytest.approx(expected, abs=1e-5)
    assert len(results["generated"]["losses"]) == 3
    for name in ("generated", "not_gathered"):
        assert [len(ids) for ids in results[name]["written"]] == [3, 3, 60, 60]
        assert results[name]["written"] == results[name]["alone"]
    assert results["not_gathered"]["losses"] == pytest.approx(results["generated"]["losses"][:1], abs=1e-5)
    for name in ("teacher_zero3", "teacher_none", "teacher_stream"):
        assert results[name]["losses"] == pytest.approx(results["full"]["losses"], abs=1e-5), name
    share = results["teacher_zero3"]
    assert share["share"] == pytest.approx(sum(one.numel() for one in teacher.parameters()) / 2, rel=0.01)
    assert share["devices"] == ["cpu"]
    assert share["gathered_between"] == 0
    assert share["agreed"] == 2
