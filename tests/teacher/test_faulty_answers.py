"""Whatever a server answers wrongly, states or tokens, from the start or later, is noticed and never trained on."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from served_lab import CPU, proposed, states_teacher
from support import serving, tiny
from support.failing_server import Pretended, Scoring, hang_up, pretended
from transformers import AutoModelForCausalLM

from trl_opsd.errors import ServerError
from trl_opsd.teacher import servers
from trl_opsd.teacher.served import ServedTeacher, answers_of
from trl_opsd.teacher.servers import TeacherServer

V, K = tiny.VOCABULARY, 8
KINDS = {"states": (Pretended, {}), "vLLM": (Scoring, {"api": "vllm"}), "SGLang": (Scoring, {"api": "sglang"})}


@pytest.fixture(scope="module")
def models(checkpoint: tuple[str, Any]) -> dict[str, Any]:
    """Other models of the teacher's shape; a fine-tune has its norms and its head."""
    tuned = AutoModelForCausalLM.from_pretrained(checkpoint[0]).eval()
    with torch.no_grad():
        tuned.model.layers[0].mlp.up_proj.weight.mul_(-1)
    return {"tuned": tuned, "another": serving.spread_norms(tiny.qwen2(64, seed=1), by=0.7).eval()}


def no_mask(server: Pretended, _: Any, __: Any) -> torch.Tensor:
    ids = server.row.ids
    return server.computed(ids, attention_mask={"full_attention": torch.zeros(1, 1, len(ids), len(ids))})


def inside(server: Pretended, _: Any, __: Any) -> torch.Tensor:
    """The states before the final norm."""
    kept: list[torch.Tensor] = []
    with server.lock:
        hook = server.model.model.norm.register_forward_pre_hook(lambda _, given: kept.append(given[0]))
        server.computed(server.row.ids)
        hook.remove()
    return kept[0][0]


# From a server, its right answer [L, H] or [L, V], and other models, to a wrong one.
BOTH = {
    "ahead": lambda _, x, __: x.roll(-1, 0),
    "behind": lambda _, x, __: torch.cat([x[:1], x[:-1]]),
    "reversed": lambda _, x, __: x.flip(0),
    "both ways": no_mask,
    "one for all tokens": lambda _, x, __: x[1:2].expand_as(x),
    "zeros": lambda _, x, __: torch.zeros_like(x),
    "NaN": lambda _, x, __: torch.full_like(x, torch.nan),
    "another model": lambda server, _, models: server.computed(server.row.ids, models["another"]),
    "fine-tune": lambda server, _, models: server.computed(server.row.ids, models["tuned"]),
    "another row": lambda server, _, __: server.computed([(one + 7) % V for one in server.row.ids]),
    "scaled": lambda _, x, __: 2 * x,
}
STATES = {
    "hardly scaled": lambda _, x, __: 1.05 * x,
    "normalised": lambda _, x, __: x / x.norm(dim=-1, keepdim=True).clamp(min=1e-9),
    "not normalised": inside,
    "one NaN": lambda _, x, __: x.index_fill(0, torch.tensor([1]), torch.nan),
    "too few": lambda _, x, __: x[1:],
    "last only": lambda _, x, __: x[-1:],
    "strange extra": lambda _, x, __: torch.cat([x.flip(0), x]),
}
TOKENS = {
    "another temperature": lambda _, x, __: (x / 2).log_softmax(-1),
    "halved": lambda _, x, __: x / 2,
    "uniform": lambda _, x, __: torch.full_like(x, 1 / V).log(),
    "logits": lambda _, x, __: 30 + 3 * x,
    "other ids": lambda _, x, __: x.roll(1, 1),
}


def changed(change: Any) -> Any:
    """A lie of vLLM's in JSON."""

    def lie(server: Scoring, logs_LV: torch.Tensor, _: Any) -> bytes:
        ids = server.row.ids
        asked = {"prompt_logprob_token_ids": [[*range(K)]] * 3, "prompt_logprob_start": len(ids) - 4}
        return json.dumps(change(json.loads(server.body(ids, asked, {"token_ids": ids}, logs_LV)))).encode()

    return lie


OF_VLLM = {
    "no scores": changed(lambda answer: {**answer, "prompt_token_id_logprobs": None}),
    "no array": changed(lambda answer: {**answer, "prompt_token_id_logprobs": "gASVAAAA"}),
    "too few": changed(lambda answer: answer),
}
ANY = {
    "dies": lambda *_: hang_up(*_[:2]),
    "garbage": lambda *_: b"\x00\x01garbage",
    "cut": lambda *_: b'{"choices": [{"index": 0',
    "another answer": lambda *_: b"[]",
    "oversize": lambda *_: b" " * 20_000_000,
    "compressed": lambda *_: (200, b"x", {"Content-Encoding": "gzip"}),
    "redirect": lambda *_: (302, b"", {"Location": "http://example.com"}),
    "gone": lambda *_: (404, b"{}", {}),
    "another task": lambda *_: (400, b'{"error":{"message":"Try switching the model\'s pooling_task"}}', {}),
    "token": lambda *_: (401, b"{}", {}),
    "fails": lambda *_: (500, b"out of memory", {}),
}
OF_KIND = {"states": STATES, "vLLM": {**TOKENS, **OF_VLLM}, "SGLang": TOKENS}
CASES = [
    pytest.param(
        kind,
        lie,
        when,
        id=f"{kind}, {when}: {name}",
        marks=[pytest.mark.long] * (kind == "SGLang" or name in ANY or (when == "later" and name != "fine-tune")),
    )
    for kind in KINDS
    for name, lie in {**BOTH, **OF_KIND[kind], **ANY}.items()
    for when in ("start", "later")
    if when == "later" or name not in OF_VLLM  # which have a batch's shape
]


@pytest.mark.parametrize(("kind", "lie", "when"), CASES)
def test_a_faulty_answer_is_never_learned_from(checkpoint, models, monkeypatch, kind, lie, when):
    monkeypatch.setattr(servers, "PAUSE", 0.01)
    path, (pretend, given) = checkpoint[0], KINDS[kind]
    given = {"words": tiny.tokenizer(), **given} if given else {}
    with pretended(checkpoint[1], kind=pretend, **given) as server:

        def build() -> ServedTeacher:
            if kind == "states":
                return states_teacher(path, server.url)
            asked = TeacherServer(server.url, 20.0, 0.0)
            asked.look(tiny.tokenizer())
            targets = "both_top_k" if kind == "vLLM" else "teacher_top_k"
            teacher = ServedTeacher(path, asked, answers_of(asked, targets, path, {}, CPU, V, K))
            teacher.compare({})
            return teacher

        def fault(server: Any, right: torch.Tensor) -> Any:
            return lie(server, right, models)

        if when == "start":
            server.fault = fault
            with pytest.raises((ServerError, ValueError)):
                build()
            return
        teacher = build()
        teacher.targets(proposed())
        server.fault = fault
        with pytest.raises(ServerError, match=f"The teacher's server at {server.url}"):
            teacher.targets(proposed())
