"""A teacher behind a real vLLM server teaches what the same checkpoint teaches in the process."""

from __future__ import annotations

import pytest
import torch
from served_lab import check_equal, rows, states_teacher
from support import serving, tiny
from transformers import AutoConfig, AutoModelForCausalLM

from trl_opsd.errors import ServerError
from trl_opsd.teacher import FrozenTeacher, Resident

ModelRegistry = pytest.importorskip("vllm").ModelRegistry

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    "divergence", [*(pytest.param(name, marks=pytest.mark.long) for name in ("forward_kl", "reverse_kl")), "jsd"]
)
def test_training_equals_that_with_a_local_teacher(trained, untied, divergence):
    path, url = untied
    given = {"teacher_model": path, "divergence": divergence, "max_steps": 2, "learning_rate": 1e-3}
    local, served = trained(**given), trained(**given, teacher_server_url=url)
    assert url in str(served.teacher)
    assert served.teacher.context == 193
    assert (tiny.weights(local) - tiny.weights(served)).abs().max() < 1e-5
    assert (tiny.weights(local) - torch.cat([one.flatten() for one in tiny.qwen2().parameters()])).abs().max() > 1e-3


@pytest.mark.long
def test_served_bfloat16_is_as_close_to_float32_as_local(half, caplog):
    path, url = half
    cpu = torch.device("cpu")
    ids = torch.randint(3, tiny.VOCABULARY, (6, 150), generator=torch.Generator().manual_seed(0))
    rollout = tiny.rollout(ids[:, :30], ids[:, 30:], torch.ones_like(ids[:, 30:]))

    def log_probs(teacher):
        states = torch.cat([row.hidden for row in teacher.targets(rollout).rows])
        return (states.double() @ teacher.head.weight.double().T).log_softmax(-1)

    truth = log_probs(FrozenTeacher(Resident(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), cpu)))

    def kl(teacher):
        return float((truth.exp() * (truth - log_probs(teacher))).sum(-1).mean())

    served = states_teacher(path, url, deadline=100.0)
    assert "128 bytes per token in bfloat16" in str(served)
    assert served.head.weight.dtype == torch.bfloat16
    assert not caplog.text
    here = FrozenTeacher(Resident(AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16), cpu))
    print(f"\nKL to float32: {kl(served):.2e} served, {kl(here):.2e} in the process")
    assert 0 < kl(served) < 1.5 * kl(here)


@pytest.mark.long
def test_vllm_serves_unknown_families_through_transformers(tmp_path):
    def helium(width):
        return tiny.model(AutoConfig.for_model("helium", **{**tiny.sizes(width), "head_dim": 32}), seed=1)

    path = serving.save_teacher(tmp_path / "helium", helium)
    model = AutoModelForCausalLM.from_pretrained(path)
    assert type(model).__name__ not in ModelRegistry.get_supported_archs()
    # On a CPU nothing is moved: weights are in host memory.
    flags = ["--dtype", "float32", "--model-impl", "transformers", "--cpu-offload-gb", "1"]
    with serving.pooling(path, tmp_path / "log", *flags) as url:
        check_equal(states_teacher(path, url, deadline=100.0), model, rows())


def test_a_server_of_another_checkpoint_is_refused(untied, tmp_path):
    other = serving.save_teacher(
        tmp_path / "untied",
        make=lambda width, **given: serving.spread_norms(tiny.qwen2(width, **given), by=0.7),
        seed=1,
    )
    with pytest.raises(ServerError, match=r"from the checkpoint .* another model, revision, dtype or layer"):
        states_teacher(other, untied[1], deadline=100.0)
    wider = serving.save_teacher(tmp_path / "wider", make=lambda _, **given: tiny.qwen2(96, **given))
    with pytest.raises(ServerError, match="returned 2048 bytes for 8 tokens, expected 3072"):
        states_teacher(wider, untied[1], deadline=100.0)
