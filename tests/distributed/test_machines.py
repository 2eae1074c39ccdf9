"""Two machines, each a network namespace with a disk of its own: a training, a machine that dies, a resume."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
import torch
from safetensors.torch import load_file
from support import tiny
from support.processes import CONFIGS

ROOT = CONFIGS.parent.parent
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

SECONDS = 600
STEPS = 6
NAMES = tuple(f"opsd{os.getpid()}n{number}" for number in range(2))


def shell(command: str) -> None:
    subprocess.run(command, shell=True, check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def machines():
    """Namespaces joined by a cable; their addresses are 10.77.0.1 and 10.77.0.2."""
    first, second = NAMES
    try:
        shell(f"unshare -m true && ip netns add {first}")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network and mount namespaces need root and iproute2: {error.stderr.strip()}")
    try:
        shell(f"ip netns add {second} && ip link add eth0 netns {first} type veth peer name eth0 netns {second}")
        for number, name in enumerate(NAMES, 1):
            inside = f"ip netns exec {name} ip"
            shell(f"{inside} addr add 10.77.0.{number}/24 dev eth0; {inside} link set eth0 up; {inside} link set lo up")
        yield NAMES
    finally:
        for name in NAMES:
            shell(f"ip netns pids {name} | xargs -r kill -9; ip netns del {name}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models and rows that both machines see, and disks that one machine sees as `disk`."""
    folder = tmp_path_factory.mktemp("machines")
    tiny.save_pair(folder)
    tiny.rows(32).to_json(folder / "rows.jsonl")
    for name in ("disk", "one", "two", "shared"):
        (folder / name).mkdir()
    return folder


class Run:
    """One training in the background, started on both machines by the command of docs/distributed.md."""

    def __init__(self, folder, config, disks, output, **options):
        self.folder = folder
        given = {
            **tiny.options(folder / "disk" / output, max_steps=STEPS, max_completion_length=8),
            **{"save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-3, "save_only_model": False},
            **{"model_name_or_path": folder / "student", "teacher_model_name_or_path": folder / "teacher"},
            **{"dataset_name": folder / "rows.jsonl", "num_machines": 2, "num_processes": 2},
            **{"main_process_ip": "10.77.0.1", "main_process_port": 29511, "accelerate_config": config, **options},
        }
        self.outputs = [folder / f"{output}{rank}.txt" for rank in range(2)]
        self.processes = [
            self._start(NAMES[rank], folder / disks[rank], self.outputs[rank], {**given, "machine_rank": rank})
            for rank in range(2)
        ]

    def _start(self, machine, disk, output, options):
        flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        mount = f'mount --bind {disk} {self.folder / "disk"}; exec "$@"'
        apart = ["ip", "netns", "exec", machine, "unshare", "-m", "bash", "-c", mount, "bash"]
        with output.open("w") as file:
            return subprocess.Popen(
                [*apart, sys.executable, "-m", "trl_opsd", "train", *flags],
                env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "eth0"},
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def ended(self) -> list[int]:
        return [process.wait(SECONDS) for process in self.processes]

    def said(self, *ranks: int) -> str:
        """The ends of what these machines printed, by default of all: a refusal is printed by one."""
        return "\n".join(self.outputs[rank].read_text()[-6000:] for rank in ranks or (0, 1))


def test_disks_must_match_save_on_each_node_before_loading(machines, folder):
    apart = Run(folder, "zero2_cpu", ("one", "two"), "refused")
    assert any(apart.ended())
    assert "Processes do not share" in apart.said()
    together = Run(folder, "zero2_cpu", ("shared", "shared"), "twice", save_on_each_node=True)
    assert any(together.ended())
    assert "Processes share" in together.said()
    for said in (apart.said(), together.said()):
        assert "Traceback" not in said
        assert "Loading weights" not in said
    assert not list(folder.glob("*/*/.*")), "no mark is left behind"


@pytest.mark.parametrize("config", ["zero2_cpu", "zero3_cpu"])
def test_run_resumes_from_checkpoint_that_both_machines_have(machines, folder, config):
    own = {"save_on_each_node": True}
    whole = Run(folder, config, ("one", "two"), f"whole_{config}", **own)
    assert whole.ended() == [0, 0], whole.said()

    torn = Run(folder, config, ("one", "two"), f"torn_{config}", **own)
    latest = folder / "two" / f"torn_{config}" / "checkpoint-4"
    while not latest.is_dir():
        assert torn.processes[1].poll() is None, torn.said(1)
        time.sleep(0.02)
    for process in subprocess.run(["ip", "netns", "pids", NAMES[1]], capture_output=True, text=True).stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)
    assert torn.processes[0].wait(SECONDS) != 0
    assert "pass `resume_from_checkpoint=True`" in torn.said(0)

    (latest / "trainer_state.json").unlink()  # as if it had died while it wrote
    resumed = Run(folder, config, ("one", "two"), f"torn_{config}", resume_from_checkpoint=True, **own)
    assert resumed.ended() == [0, 0], resumed.said()
    assert "2 done" in resumed.said(0)
    files = (folder / "one" / f"{name}_{config}" / "model.safetensors" for name in ("whole", "torn"))
    expected, found = map(load_file, files)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
