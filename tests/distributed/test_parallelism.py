"""One process and several with a `parallelism_config` learn the same."""

from __future__ import annotations

import pytest
import train_parallel
import variants
from support import forks, tiny

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(forks.SECONDS + 60)]

TOLERANCE = 1e-5
"""A tenth of one step of AdamW at a learning rate of 1e-4."""
EXPECTED = {
    "hsdp": ("4, FSDP2, on cpu", {"(Replicate(), Shard(dim=0))"}),
    "sp": ("2, DeepSpeed ZeRO-3, 2 per row in training, on cpu", {"whole"}),
}
"""How a trainer describes each launch, and how the student's tensors are placed, in a full one."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    variants.save_models(folder)
    return folder


@pytest.mark.parametrize("launch", ["sp", pytest.param("hsdp", marks=pytest.mark.long)])
def test_processes_learn_what_one_learns(launch, models):
    of_launch = train_parallel.LAUNCHES[launch]
    found = forks.results(of_launch.config, train_parallel.train, models, launch, processes=of_launch.processes)[0]
    named = of_launch.variants
    differences = {}
    for name in named:
        alone = variants.build(models, variants.ALONE[name], processes=1)
        before = {key: array.copy() for key, array in variants.arrays(alone).items()}
        read = train_parallel.tokens_read(alone)
        alone.train()
        learned = variants.arrays(alone)
        losses = tiny.logged(alone, "loss")
        assert variants.largest_difference(before, learned) > 20 * TOLERANCE, f"{name} learns nothing"
        for same in (name, train_parallel.RESUMED) if name == named[0] else (name,):
            differences[same] = variants.largest_difference(found["trained"][same], learned)
            assert found["losses"][same] == pytest.approx(losses, abs=TOLERANCE), same
        if launch == "sp":
            _check_divided(found["tokens"][name], read)
    print(f"\n{launch}", *(f"{value:.1e}  {name}" for name, value in differences.items()), sep="\n")
    assert max(differences.values()) <= TOLERANCE, differences
    described, placed = EXPECTED[launch]
    assert described in found["described"]
    assert set(found["placed"]) == placed


def _check_divided(found, alone):
    """One process reads both micro-batches of a step whole; each of two the halves of four, of a row each."""
    assert found.pop(0) == [1, 8], "ZeRO-3 examines the student by eight tokens, in each process by itself"
    steps = len(alone) // 2
    assert [rows for rows, _ in found] == [1] * 4 * steps
    for step in range(steps):
        longest = max(length for _, length in alone[2 * step : 2 * step + 2])
        lengths = [length for _, length in found[4 * step : 4 * step + 4]]
        assert max(lengths) <= -(-(longest - 1) // 2), "a process reads more than its half of a row"
