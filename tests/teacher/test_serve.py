"""The server of a teacher: the states of each row, whoever else asks, in each encoding."""

from __future__ import annotations

import base64
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from serve_lab import STATES, Gated, running, served, wait_for
from support import tiny
from transformers import BartConfig, MambaConfig, Phi3Config

from trl_opsd.models.backbone import backbone_of
from trl_opsd.teacher.offloaded import Hosted, Streamed
from trl_opsd.teacher.serve.server import DTYPES, Request, parts

LENGTHS = [1, 2, 3, 30, 1, 17, 64, 5, 200, 256, 16, 18]


def mamba():
    return tiny.model(MambaConfig(vocab_size=259, hidden_size=32, num_hidden_layers=2, state_size=8))


def bart():
    """Counts padding as positions."""
    sizes = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 64, "dropout": 0.0}
    return tiny.model(BartConfig(vocab_size=259, is_decoder=True, max_position_embeddings=512, **sizes))


def longrope():
    """Rotary frequencies of all rows change with the longest one, beyond 16 positions."""
    border = {"original_max_position_embeddings": 16}
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [8.0] * 8, "rope_theta": 10000.0}
    return tiny.model(Phi3Config(**tiny._sizes(32), **border, rope_parameters={**rope, **border}))


def rows(lengths=LENGTHS, seed=0):
    """Random rows, the last but one twice."""
    torch.manual_seed(seed)
    made = [torch.randint(3, tiny.VOCABULARY, (length,)).tolist() for length in lengths]
    return [*made, made[-2 % len(made)]]


def alone(model, row):
    """[L, H], from the model's own backbone."""
    with torch.no_grad():
        return backbone_of(model.eval())(input_ids=torch.tensor([row]), use_cache=False).last_hidden_state[0]


def gap(found, expected):
    return max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))


class TestStates:
    @pytest.mark.parametrize(
        ("make", "reading"),
        [
            pytest.param(lambda: tiny.qwen2(48, 1), "padded", marks=pytest.mark.quick),
            (lambda: tiny.gpt2(48, 1), "padded"),
            (lambda: tiny.gemma2(48, 1), "padded"),
            (longrope, "padded up to 16 tokens, beyond rows of the same length together"),
            (bart, "rows of the same length together"),
            (mamba, "padded"),
        ],
        ids=["qwen2", "gpt2", "gemma2", "longrope", "bart", "mamba"],
    )
    def test_each_row_gets_the_states_it_has_alone(self, make, reading):
        model = make()
        expected = [alone(model, row) for row in rows()]
        with running(model) as server:
            assert str(server.teacher.reading) == reading
            together = server.states(rows())
            with ThreadPoolExecutor(8) as pool:
                apart = [one for (one,) in pool.map(lambda row: server.states([row]), rows())]
            assert server.reader.counts.rows == 2 * len(rows())
            assert server.reader.counts.tokens == 2 * sum(map(len, rows()))
        assert gap(together, expected) < 1e-5
        assert gap(apart, expected) < 1e-5

    @pytest.mark.parametrize("placement", [Hosted, Streamed])
    def test_placements_give_the_same_bytes(self, placement):
        with running(tiny.qwen2(48, 1, num_hidden_layers=5)) as server:
            expected = server.states(rows())
        with running(tiny.qwen2(48, 1, num_hidden_layers=5), placement) as server:
            for _ in range(2):
                assert gap(server.states(rows()), expected) < 1e-5

    def test_rows_are_scored_packed_without_padding(self):
        model = tiny.qwen2(48, 1)
        with running(model, padding_free=True) as server:
            assert server.teacher.reading.packed
            assert gap(server.states(rows()), [alone(model, row) for row in rows()]) < 1e-5

    def test_waiting_rows_share_passes(self):
        with running(tiny.qwen2(48, 1), Gated) as server, ThreadPoolExecutor(24) as pool:
            server.teacher.placement.shut()
            before = server.reader.counts.passes
            asked = [pool.submit(server.states, [[5] * 20]) for _ in range(24)]
            wait_for(lambda: server.reader.waiting.tokens == 480)
            server.teacher.placement.gate.set()
            for one in asked:
                one.result(60)
            assert server.reader.counts.passes - before <= 2
            assert server.reader.counts.rows == 24

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_bfloat16_states_arrive_as_they_are_computed(self, dtype):
        model = tiny.qwen2(48, 1).to(torch.bfloat16)
        (row,) = rows([40])[:1]
        expected = alone(model, row)
        with running(model) as server:
            assert server.send("GET", "/v1/models").json()["data"][0]["dtype"] == "bfloat16"
            (found,) = server.states([row], dtype)
        assert found.dtype == DTYPES[dtype]
        assert torch.equal(found.to(torch.float32), expected.to(DTYPES[dtype]).to(torch.float32))


class TestEncodings:
    def test_all_encodings_have_the_same_numbers(self):
        asked = rows([3, 7])
        with running(tiny.qwen2(48, 1)) as server:
            expected = server.states(asked)
            big = server.post({"input": asked, **STATES, "endianness": "big"})
            numbers = server.post({"input": asked, "use_activation": False}).json()
            text = server.post({"input": asked, "use_activation": False, "encoding_format": "base64"}).json()
        swapped = torch.frombuffer(bytearray(big.content), dtype=torch.uint8).view(-1, 4).flip(1).flatten()
        assert torch.equal(swapped.view(torch.float32).view(-1, 48), torch.cat(expected))
        for answer in (numbers, text):
            assert [one["index"] for one in answer["data"]] == [0, 1, 2]
            assert (answer["model"], answer["object"]) == ("a/teacher", "list")
            assert answer["usage"] == {"prompt_tokens": 13, "total_tokens": 13, "completion_tokens": 0}
        for number, states in enumerate(expected):
            assert torch.equal(torch.tensor(numbers["data"][number]["data"]), states)
            content = bytearray(base64.b64decode(text["data"][number]["data"], validate=True))
            assert torch.equal(torch.frombuffer(content, dtype=torch.float32).view(-1, 48), states)

    @pytest.mark.parametrize("encoding", ["float", "base64", "bytes_only"])
    def test_long_answers_are_sent_in_pieces(self, encoding):
        states = torch.randn(4500, 101)
        wanted = Request(input=[[5] * 4500], encoding_format=encoding)
        pieces = [bytes(one) for one in parts(wanted, served(width=101), [states])]
        assert max(map(len, pieces)) < len(b"".join(pieces)) * 0.9
        whole = b"".join(pieces)
        if encoding != "bytes_only":
            (found,) = json.loads(whole)["data"]
            whole = base64.b64decode(found["data"], validate=True) if encoding == "base64" else found["data"]
        found = torch.tensor(whole) if encoding == "float" else torch.frombuffer(bytearray(whole), dtype=torch.float32)
        assert torch.equal(found.view(-1, 101), states)

    @pytest.mark.vllm
    def test_requests_and_answers_are_those_of_vllm(self):
        protocol = pytest.importorskip("vllm.entrypoints.pooling.pooling.protocol")
        from vllm.entrypoints.serve.engine.protocol import ModelCard
        from vllm.utils.serial_utils import tensor2binary

        body = {"model": "a/teacher", "input": rows([3]), "task": "token_embed", **STATES, "embed_dtype": "bfloat16"}
        assert protocol.PoolingCompletionRequest.model_validate(body).to_pooling_params().task == "token_embed"
        states = torch.randn(7, 48)
        for dtype, kind in DTYPES.items():
            for endianness in ("native", "little", "big"):
                wanted = Request(input=[5], encoding_format="bytes_only", embed_dtype=dtype, endianness=endianness)
                found = b"".join(map(bytes, parts(wanted, served(), [states.to(kind)])))
                assert found == tensor2binary(states, dtype, endianness)
        wanted = Request(input=[5] * 7)
        answer = json.loads(b"".join(map(bytes, parts(wanted, served(), [states]))))
        assert protocol.PoolingResponse.model_validate(answer).model_dump(exclude_none=True) == answer
        assert set(ModelCard.model_fields) - set(served().card()["data"][0]) == {"permission"}
