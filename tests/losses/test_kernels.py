"""The fused kernel equals the oracle in Triton's interpreter, and is taken only where it works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trl_opsd.losses import ForwardKL, GeneralizedJSD, ReverseKL
from trl_opsd.losses.elementwise import eager_
from trl_opsd.losses.kernels import step_for
from trl_opsd.losses.target import target_, target_step

pytest.importorskip("triton", reason="Triton is not made for this system")

CPU = torch.device("cpu")
COUNTED = """
import sys, pytest, triton
from trl_opsd.losses import fused
calls = {"fused_": 0, "fused_target_": 0}
def counting(name, original):
    def call(*args):
        calls[name] += 1
        return original(*args)
    return call
for name in calls:
    setattr(fused, name, counting(name, getattr(fused, name)))
code = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore", *sys.argv[1:]])
print("kernel calls:", *calls.values())
sys.exit(code)
"""


# All settings of a head, shared vocabularies, weights, chunks, and gradients that are asked for in any combination;
# what a head is made of does not depend on the divergence; all of them once, and clipped.
CHOSEN = (
    "(each_setting or weights or freezing or excluded or second_backward or PaddedVocabularies)"
    " and not (Skewed or Total)"
    " or mean-weighted or clipped_divergence and 0.005 and temperature"
    " or sampled_tokens and not refused or equal_the_oracle"
)


@pytest.mark.long
def test_streamed_divergence_passes_its_tests_with_the_kernel():
    files = [str(Path(__file__).with_name(name)) for name in ("test_streamed.py", "test_sampled.py", "test_beside.py")]
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    given = ["-k", CHOSEN, "--confcutdir", str(Path(__file__).parent)]  # that of all tests imports trainers
    run = subprocess.run(
        [sys.executable, "-c", COUNTED, *files, *given], env=env, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    assert int(re.findall(r"(\d+) passed", run.stdout)[-1]) > 60
    of_steps, of_targets = map(int, re.findall(r"kernel calls: (\d+) (\d+)", run.stdout)[-1])
    assert of_steps > 60
    assert of_targets >= 40


class TestChoice:
    """What is taken where a kernel exists; the kernels here are stand-ins that fail or lie."""

    @pytest.fixture
    def kernel(self, monkeypatch):
        """Has `step_for` find this function as the kernel of all divergences, as on a GPU."""

        def use(step):
            module = SimpleNamespace(fused_=step, fused_target_=step, KERNELS={ForwardKL: None, ReverseKL: None})
            monkeypatch.setenv("TRITON_INTERPRET", "1")
            monkeypatch.setattr("trl_opsd.losses.kernels.import_module", lambda name: module)
            return step

        return use

    def test_on_a_cpu_triton_is_not_even_imported(self, monkeypatch):
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        monkeypatch.setattr("trl_opsd.losses.kernels.import_module", lambda name: pytest.fail(name))
        assert step_for(ForwardKL(), None, CPU) is eager_

    def test_a_kernel_with_the_eager_numbers_is_chosen(self, kernel):
        right = kernel(lambda *args: eager_(*args))
        assert step_for(ForwardKL(), None, CPU) is right
        assert step_for(GeneralizedJSD(0.5), None, CPU) is eager_  # it has no kernel here

    def test_without_triton_the_eager_steps_are_chosen(self, kernel, monkeypatch):
        kernel(lambda *args: pytest.fail("called"))
        monkeypatch.setattr("trl_opsd.losses.kernels.find_spec", lambda name: None)
        assert step_for(ForwardKL(), None, CPU) is eager_

    def test_kernel_that_fails_or_lies_warns_and_is_unused(self, kernel):
        def fails(*args):
            raise RuntimeError("Failed to find C compiler.")

        def lies(*args):
            statistics = eager_(*args)
            args[-1].mul_(1.01)
            return statistics

        kernel(fails)
        with pytest.warns(UserWarning, match=r"kernel of ForwardKL\(\) failed with RuntimeError"):
            assert step_for(ForwardKL(), None, CPU) is eager_
        kernel(lies)
        with pytest.warns(UserWarning, match=r"kernel of ReverseKL\(\) differs by 1\.0e-02"):
            assert step_for(ReverseKL(), None, CPU) is eager_

    def test_a_target_has_a_choice_of_its_own(self, kernel):
        def lies(finishes, products, pushes):
            target_(finishes, products, pushes)
            products[0][:, 0] += 1

        kernel(lies)
        target_step.cache_clear()
        with pytest.warns(UserWarning, match=r"kernel of the target differs by"):
            assert target_step(CPU) is target_
        target_step.cache_clear()
