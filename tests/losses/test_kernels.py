"""The fused kernel equals the oracle in Triton's interpreter, compiles for GPUs, and is taken only where it works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.version import Version

from trl_opsd.losses import ForwardKL, GeneralizedJSD, ReverseKL
from trl_opsd.losses.elementwise import eager_
from trl_opsd.losses.kernels import step_for
from trl_opsd.losses.target import target_, target_step

triton = pytest.importorskip("triton", reason="Triton is not made for this system")

OLD_TRITON = Version(triton.__version__) < Version("3.7")
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


@pytest.fixture(scope="module", params=[pytest.param(one, marks=pytest.mark.long) for one in ("short", "all")])
def measured(request):
    """The benchmark, on rows that end within the second block; or also on rows shorter than one, for every target."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    import kernel

    short = request.param == "short"
    architectures = [90] if short else list(kernel.ARCHITECTURES)
    options = SimpleNamespace(
        rows=2 if short else 3, widths=[2049] if short else [37, 2049], architectures=architectures
    )
    result = kernel.measure(options)
    assert "registers" in kernel.table(result)
    assert len(result["errors"]) == (8 + 3 + 7) * 5 * len(options.widths)
    assert len(result["targets"]) == 4 * len(options.widths)
    assert len(result["compiled"]) == 9 * 2 * len(architectures)
    assert {row["architecture"] for row in result["compiled"]} == {kernel.ARCHITECTURES[one] for one in architectures}
    return result


def test_kernel_errors_are_those_of_the_eager_steps(measured):
    rows = measured["errors"]
    assert {row["kind"] for row in rows} == {"far", "near", "huge", "rich", "capped"}
    assert len({row["divergence"] for row in rows}) == 8 + 3 + 7
    for row in rows:
        near, clipped = row["kind"] == "near", "clipped" in row["divergence"]
        for name in ("kernel float32", "eager float32"):
            assert row[name]["value"] < (1e-3 if near else 1e-5 if clipped else 2e-6), row
            assert row[name]["clipped"] == row[name]["firsts"] == 0, row
            assert max(*(row[name][one] for one in ("nll", "importance", "sampled"))) < 2e-6, row
            assert row[name]["gradient"] < (2e-3 if near else 5e-5), row
            assert max(row[name]["entropies"], row[name]["ratio"]) < 2e-6, row
        assert row["kernel bfloat16"]["gradient"] < 8e-3, row
        assert row["kernel bfloat16"]["value"] == row["kernel float32"]["value"]


def test_logits_are_read_once_per_pass(measured):
    for row in measured["errors"]:
        if row["kind"] == "far" and row["width"] == 2049:
            passes = 2 if row["divergence"].startswith(("ForwardKL()", "ReverseKL()", "SampledReverseKL")) else 3
            passes += "clipped" in row["divergence"] and passes == 2
            padded = 2112 / 2049  # rows are stored, and read, in multiples of 64 columns
            for dtype, size in (("float32", 4), ("bfloat16", 2)):
                expected = padded * (passes * 8 + size)
                assert row[f"kernel {dtype}"]["bytes"] == pytest.approx(expected, rel=2e-3)  # and five statistics


def test_targets_of_several_models_read_each_twice_and_write_one(measured):
    for row in measured["targets"]:
        assert row["kernel"] < 5e-7, row
        assert row["eager"] < 5e-7, row
        assert row["kernel keeps"], row
        assert row["eager keeps"], row
        if row["target"] in ("bounded", "in its place") and row["width"] == 2049:  # without biases, which a cache has
            assert row["kernel bytes"] == pytest.approx(2112 / 2049 * (8 * row["models"] + 4), rel=1e-6), row


def test_kernel_spills_no_register_and_accesses_memory_in_wide_pieces(measured):
    for row in measured["compiled"]:
        rich, policy, target = row["rich"], row["divergence"] == "SampledReverseKL", row["divergence"] == "the target"
        # The compiler of Triton 3.6 spills four bytes in one kernel, at its bound of 64 registers; later ones none.
        assert row["spilled"] <= (4 if OLD_TRITON else 0), row
        assert row["loops"] >= 2, row
        assert row["waits"] == 0, row  # for other threads, which come once per row, after the loops
        assert row["registers"] <= 80, row  # three blocks of 256 threads fit a processor
        # A row's ten statistics, its sampled token and both logits there; its weight and pull, and both biases; for the
        # policy gradient a log-probability.
        assert row["narrow"] == (0 if target else 13 + rich * (4 + policy)), row


# All settings of a head, shared vocabularies, weights, chunks, and gradients that are asked for in any combination;
# what a head is made of does not depend on the divergence; all of them once, and clipped.
ALL = (
    "(each_setting or weights or freezing or excluded or second_backward or PaddedVocabularies)"
    " and not (Skewed or Total)"
    " or weights_multiply or clipped_divergence and 0.005 and temperature"
    " or sampled_tokens and not refused or equal_the_oracle"
)
SOME = (
    "freezing or second_backward or weights_multiply"
    " or temperature and ReverseKL and not Skewed and (PaddedVocabularies or sampled_tokens and given3)"
    " or equal_the_oracle and ForwardKL and not Skewed and (bounded or place)"
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("chosen", "least", "targets"),
    [pytest.param(SOME, 15, 4, id="some"), pytest.param(ALL, 60, 40, id="all", marks=pytest.mark.long)],
)
def test_streamed_divergence_passes_its_tests_with_the_kernel(chosen, least, targets):
    files = [str(Path(__file__).with_name(name)) for name in ("test_streamed.py", "test_sampled.py", "test_beside.py")]
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    given = ["-k", chosen, "--confcutdir", str(Path(__file__).parent)]  # that of all tests imports trainers
    run = subprocess.run(
        [sys.executable, "-c", COUNTED, *files, *given], env=env, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    assert int(re.findall(r"(\d+) passed", run.stdout)[-1]) > least
    of_steps, of_targets = map(int, re.findall(r"kernel calls: (\d+) (\d+)", run.stdout)[-1])
    assert of_steps > least
    assert of_targets >= targets


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

    def test_kernel_that_fails_to_compile_warns_and_is_unused(self, kernel):
        def fails(*args):
            raise RuntimeError("Failed to find C compiler.")

        kernel(fails)
        with pytest.warns(UserWarning, match=r"kernel of ForwardKL\(\) failed with RuntimeError: Failed to find C"):
            assert step_for(ForwardKL(), None, CPU) is eager_

    def test_a_kernel_with_other_numbers_warns_and_is_not_chosen(self, kernel):
        def lies(*args):
            statistics = eager_(*args)
            args[-1].mul_(1.01)
            return statistics

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
