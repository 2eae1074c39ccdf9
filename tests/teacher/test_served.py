"""A teacher behind a real vLLM server teaches what the same checkpoint teaches in the process."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_training_equals_that_with_a_local_teacher(make_trainer, untied, divergence):
    path, url = untied
    given = {"teacher_model": path, "divergence": divergence, "max_steps": 4, "learning_rate": 1e-3}
    trained = []
    for options in ({}, {"teacher_server_url": url}):
        trainer = make_trainer(**given, **options)
        before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
        trainer.train()
        trained.append(trainer.model)
        assert max(float((before[n] - w).detach().abs().max()) for n, w in trainer.model.named_parameters()) > 1e-3
    assert url in str(trainer.teacher)
    assert trainer.teacher.context == 193
    pairs = zip(*(model.parameters() for model in trained), strict=True)
    largest = max(float((one - other).detach().abs().max()) for one, other in pairs)
    print(f"\n{divergence}: {largest:.1e}")
    assert largest < 1e-5
