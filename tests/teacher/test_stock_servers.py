"""Teachers on stock servers that generate, vLLM 0.32 and SGLang: what they tell is what the model computes.

Run by `make test-servers`, which installs them apart; not part of `make test`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
import torch
from served_lab import CPU, V, check_known, proposed, tokens_teacher
from support import serving, tiny
from torch import Tensor

from trl_opsd.errors import ServerError
from trl_opsd.teacher.answers import Row, Tokens
from trl_opsd.teacher.servers import TeacherServer
from trl_opsd.types.known import KnownTokens

pytestmark = [pytest.mark.servers, pytest.mark.timeout(400)]

SCORING = ("--enable-scale-out", "--max-logprobs", "128")
"""Flags of a server that scores tokens."""
CROWDED = ("--max-num-batched-tokens", "256", "--long-prefill-token-threshold", "48", "--num-gpu-blocks-override", "5")
"""Flags of a server that reads a long row in parts, and has room for two of them."""


@pytest.fixture(scope="module")
def vllm(checkpoint: tuple[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving.generating(checkpoint[0], tmp_path_factory.mktemp("vllm") / "log", *SCORING, *CROWDED) as url:
        yield url


def asked(url: str) -> TeacherServer:
    server = TeacherServer(url, 60.0, 0.0)
    server.look(tiny.tokenizer())
    return server


def scores(server: TeacherServer, ids: list[int], places: list[int], wanted: Tensor | None, k: int) -> KnownTokens:
    targets = "teacher_top_k" if wanted is None else "both_top_k" if k else "student_top_k"
    answers = Tokens(server, targets, "nowhere", {}, CPU, V, k or None)
    row = Row(tuple(ids), tuple(places), () if wanted is None else tuple(map(tuple, wanted.tolist())))
    return KnownTokens.unpack(server.start(answers, row).result())


def gap(server: TeacherServer, model: Any, ids: list[int], places: list[int], wanted: Tensor | None, k: int) -> float:
    """The largest difference, in nats, between what the server tells and the model's log-probabilities."""
    ids_nM, logs_nM, _ = scores(server, ids, places, wanted, k)
    with torch.no_grad():
        logs_LV = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    return float((logs_LV[torch.tensor(places) - 1].gather(1, ids_nM) - logs_nM).abs().max())


@pytest.mark.parametrize("targets", ["student_top_k", "teacher_top_k", "both_top_k"])
def test_vllm_tells_what_its_model_computes(checkpoint, vllm, targets):
    teacher = tokens_teacher(checkpoint[0], vllm, targets)
    assert teacher.noise < 1e-6
    check_known(teacher, checkpoint[1], proposed(), targets)


def test_rows_are_scored_that_are_long_shared_or_full(checkpoint, vllm):
    server = asked(vllm)
    assert (server.api, server.limits.keys()) == ("vLLM", {"student_top_k", "teacher_top_k"})
    assert server.limits == {"student_top_k": 128, "teacher_top_k": 128}
    generator = torch.Generator().manual_seed(0)
    row = torch.randint(3, V, (server.context,), generator=generator).tolist()
    gaps = []
    for length in (len(row), 150, 65, 64, 2):  # in parts of 48, each the beginning of the one before
        ids, places = row[:length], [*range(max(1, length - 90), length, 3)]
        wanted = torch.stack([torch.randperm(V, generator=generator)[:128] for _ in places])
        wanted = torch.where((wanted == torch.tensor(ids)[places, None]).any(1, keepdim=True), wanted, -1)
        wanted[:, 0] = torch.tensor(ids)[places]
        for _ in range(2):
            gaps += [gap(server, checkpoint[1], ids, places, *how) for how in ((wanted, 0), (None, 128), (wanted, 9))]
    print(f"\nvLLM 0.32: {len(gaps)} rows, at most {max(gaps):.1e} nats apart from the model")
    assert max(gaps) < 1e-5
    with pytest.raises(ServerError, match=r"(?s)returned 400.*longer than the maximum model length of 192"):
        scores(server, [*row, 7], [5], torch.tensor([[row[5]]]), 0)


def test_preempted_rows_are_scored_alike(checkpoint, vllm):
    server, generator = asked(vllm), torch.Generator().manual_seed(0)
    rows = torch.randint(3, V, (10, 188), generator=generator)
    rows[1::2, :150] = rows[0, :150]
    wanted = [rows[row, 160::4, None] for row in range(10)]
    places = [*range(160, 188, 4)]
    with ThreadPoolExecutor(10) as pool:
        asks = [(server, checkpoint[1], rows[row].tolist(), places, wanted[row], 9) for row in range(10)]
        gaps = [*pool.map(lambda one: gap(*one), asks)]
    assert max(gaps) < 1e-5
    told = requests.get(f"{vllm}/metrics", timeout=60).text
    preempted = sum(float(line.split()[-1]) for line in told.splitlines() if "num_preemptions_total{" in line)
    print(f"\n{preempted:.0f} rows were preempted")
    assert preempted > 0


@pytest.mark.parametrize(("flags", "environment"), [((), {}), (SCORING, {"VLLM_USE_V2_MODEL_RUNNER": "0"})])
def test_a_server_that_cannot_score_the_students_tokens_scores_its_own(checkpoint, tmp_path, flags, environment):
    with serving.generating(checkpoint[0], tmp_path / "log", *flags, **environment) as url:
        server = asked(url)
        assert server.limits.keys() == {"teacher_top_k"}
        assert server.limits == {"teacher_top_k": 128 if flags else 20}
        with pytest.raises(ValueError, match=r"offers ..teacher_top_k.. only"):
            tokens_teacher(checkpoint[0], url, "student_top_k")
        check_known(tokens_teacher(checkpoint[0], url, "teacher_top_k"), checkpoint[1], proposed(), "teacher_top_k")


# ---- SGLang ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sglang(checkpoint: tuple[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    flags = ("--context-length", "192", "--max-total-tokens", "4096", "--chunked-prefill-size", "64")
    with serving.sglang(checkpoint[0], tmp_path_factory.mktemp("sglang") / "log", *flags) as (url, _):
        yield url


def test_sglang_tells_the_teachers_tokens_alone(checkpoint, sglang):
    server = asked(sglang)
    assert (server.api, server.limits.keys()) == ("SGLang", {"teacher_top_k"})
    with pytest.raises(ValueError, match=r"offers ..teacher_top_k.. only"):
        tokens_teacher(checkpoint[0], sglang, "student_top_k")
    teacher = tokens_teacher(checkpoint[0], sglang, "teacher_top_k")
    check_known(teacher, checkpoint[1], proposed(), "teacher_top_k")
    row = torch.randint(3, V, (server.context,), generator=torch.Generator().manual_seed(0)).tolist()
    gaps = []
    for length in (len(row), 150, 65, 64, 2):
        ids, places = row[:length], [*range(max(1, length - 90), length, 3)]
        gaps += [gap(server, checkpoint[1], ids, places, None, k) for k in (1, 128)]
    print(f"\nSGLang: {len(gaps)} rows, at most {max(gaps):.1e} nats apart from the model")
    assert max(gaps) < 1e-5
    with pytest.raises(ServerError, match=r"(?s)returned 400.*context length|maximum allowed length"):
        scores(server, [*row, 7, 7, 7], [5], None, 1)
