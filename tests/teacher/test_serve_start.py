"""`python -m trl_opsd.teacher.serve`: what is refused before a model is loaded, and a server from start to end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from serve_lab import STATES, Running
from support import tiny

from trl_opsd.http.urls import TEACHER_TOKEN as TOKEN
from trl_opsd.teacher.serve.__main__ import PROG, bound, commit, main

SECONDS = 120


@pytest.fixture
def without_weights(tmp_path):
    """The folder of a model whose weights are missing."""
    config = tiny.qwen2(48).config
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(tmp_path)
    return tmp_path


def changed(folder, **values):
    """Changes its config."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_revision_of_a_hub_model_is_a_commit(without_weights, tmp_path, monkeypatch):
    model, main_is, older = tmp_path / "hub/models--lab--teacher", "1234567890" * 4, "abcdef0123" * 4
    for one in (main_is, older):
        (model / "snapshots" / one).mkdir(parents=True)
        (model / "snapshots" / one / "config.json").write_bytes((without_weights / "config.json").read_bytes())
    (model / "refs").mkdir()
    (model / "refs/main").write_text(main_is)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert commit("lab/teacher", None) == commit("lab/teacher", "main") == main_is
    assert commit("lab/teacher", older) == older
    assert commit(str(without_weights), None) is None


@pytest.mark.refusal
@pytest.mark.before_loading
class TestRefusals:
    @pytest.fixture(autouse=True)
    def _no_token(self, monkeypatch):
        monkeypatch.delenv(TOKEN, raising=False)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            pytest.param(["--port", "70000"], "`port=70000`: expected a number in [0, 65535]", marks=pytest.mark.quick),
            (["--port", "http"], "argument --port: invalid int value: 'http'"),
            (["--dtype", "bf16"], "`dtype='bf16'`: expected one of 'auto', 'float32', 'bfloat16', 'float16'."),
            (["--offload", "zero3"], "`offload='zero3'`: expected one of 'none', 'cpu', 'stream'"),
            (["--max-model-len", "0"], "`max_model_len=0`: expected an integer of at least 1"),
            (["--max_waiting_tokens", "-1"], "`max_waiting_tokens=-1`: expected an integer of at least 1"),
            (
                ["--max-request-tokens", "9", "--max-waiting-tokens", "8"],
                "`max_request_tokens=9` exceeds `max_waiting_tokens=8`",
            ),
            (["--served-model-name", " "], "`served_model_name` is empty"),
            (["--token", "x"], "--token"),
            (["--tru", "x"], "--tru"),
            (["another"], "another"),
        ],
    )
    def test_wrong_option_exits_with_2_and_names_the_expected(self, capsys, arguments, message):
        with pytest.raises(SystemExit) as ended:
            main(["model", *arguments])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err

    def test_the_help_names_every_option(self, capsys):
        with pytest.raises(SystemExit) as ended:
            main(["--help"])
        assert ended.value.code == 0
        said = capsys.readouterr().out
        for name in ("--host", "--port", "--dtype", "--revision", "--trust-remote-code", "--offload", "--padding-free"):
            assert name in said
        for name in ("--served-model-name", "--max-model-len", "--max-request-tokens", "--max-waiting-tokens"):
            assert name in said

    def refused(self, capsys, path, *arguments):
        with pytest.raises(SystemExit) as ended:
            main([str(path), *arguments])
        assert ended.value.code == 2
        (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith(f"{PROG}: error: ")]
        return said

    def test_other_hosts_need_a_token(self, capsys, without_weights, monkeypatch):
        for host in ("0.0.0.0", "::", "192.0.2.1", "gpu7.lab"):
            said = self.refused(capsys, without_weights, "--host", host)
            assert f"`host='{host}'` is reachable from other machines, but {TOKEN} is not set" in said
            assert f"export {TOKEN}=$(openssl rand -hex 32)" in said
        monkeypatch.setenv(TOKEN, "s3cret")
        assert "192.0.2.1" in (said := self.refused(capsys, without_weights, "--host", "192.0.2.1"))
        assert "Cannot listen on" in said
        for token in ("two words", "line\n", "schlüssel"):
            monkeypatch.setenv(TOKEN, token)
            said = self.refused(capsys, without_weights)
            assert f"{TOKEN} contains spaces, line breaks or non-ASCII characters" in said
            assert token not in said

    def test_options_that_do_not_fit_the_models_config_are_refused(self, capsys, without_weights, tmp_path):
        port = ("--port", "0")
        said = self.refused(capsys, tmp_path / "nowhere", *port)
        assert "nowhere" in said
        said = self.refused(capsys, without_weights, *port, "--max-model-len", "257")
        assert "`max_model_len=257` exceeds the model's context of 256 tokens" in said
        changed(without_weights, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
        said = self.refused(capsys, without_weights, *port, "--offload", "stream")
        assert "`offload='stream'` with a quantised teacher" in said
        assert "teacher_offload" not in said
        changed(without_weights, auto_map={"AutoConfig": "code.Config"}, model_type="own")
        said = self.refused(capsys, without_weights, *port)
        assert "which runs only if you allow it: read that code, then set `trust_remote_code=True` here." in said
        changed(without_weights, auto_map={}, model_type="bart", is_encoder_decoder=True)
        assert "does not generate text token by token" in self.refused(capsys, without_weights, *port)

    def test_a_port_in_use_is_refused(self, capsys, without_weights):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            said = self.refused(capsys, without_weights, "--port", str(taken.getsockname()[1]))
        assert "Cannot listen on" in said
        assert "choose another port (0 for a free one)" in said


def test_weights_are_read_from_safetensors_only(capsys, tmp_path):
    model = tiny.qwen2(48)
    model.config.architectures = ["Qwen2ForCausalLM"]
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path), "--port", "0"])
    assert ended.value.code == 2
    assert "model.safetensors" in capsys.readouterr().err


def test_a_bound_socket_does_not_listen_yet():
    with bound("127.0.0.1", 0) as held, pytest.raises(ConnectionRefusedError):
        socket.create_connection(held.getsockname())


def test_the_server_command_starts_answers_and_ends_on_sigterm(tmp_path):
    """The command: says when it is ready, answers many at once, and ends with status 0 when told to."""
    model = tiny.gpt2(48, 1)
    model.save_pretrained(tmp_path)
    command = [sys.executable, "-m", "trl_opsd.teacher.serve", str(tmp_path), "--port", "0", "--offload", "stream"]
    process = subprocess.Popen(
        [*command, "--dtype", "bfloat16", "--served-model-name", "gpt"],
        env={**os.environ, TOKEN: "s3cret"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        ready = process.stdout.readline()
        found = re.fullmatch(r"Ready: http://127.0.0.1:(\d+) serves 'gpt': (.*)\n", ready)
        assert found, ready + process.stderr.read()
        assert "GPT2LMHeadModel" in found[2]
        assert "in host memory, copied to cpu layer by layer; states in bfloat16 of rows of up to 256" in found[2]
        server = Running(int(found[1]), 48, headers=(("Authorization", "Bearer s3cret"),))
        (card,) = server.send("GET", "/v1/models").json()["data"]
        assert (card["id"], card["root"], card["max_model_len"]) == ("gpt", str(tmp_path), 256)
        assert (card["dtype"], card["vocab_size"], card["hidden_size"]) == ("bfloat16", 259, 48)
        with torch.no_grad():
            expected = model.to(torch.bfloat16).eval().transformer(torch.tensor([[5, 6, 7]])).last_hidden_state[0]
        with ThreadPoolExecutor(16) as pool:
            for (states,) in pool.map(lambda _: server.states([[5, 6, 7]], "bfloat16", model="gpt"), range(64)):
                torch.testing.assert_close(states, expected, rtol=5e-2, atol=5e-2)
            late = [pool.submit(server.post, {"input": [[5] * 250] * 60, **STATES}) for _ in range(6)]
            for _ in range(3):  # as launchers pass them on
                process.send_signal(signal.SIGTERM)
            ended = [one.exception(SECONDS) or one.result() for one in late]
        for one in ended:  # each is answered whole, refused, or came when nobody listened
            assert isinstance(one, ConnectionError) or one.status in (200, 503), one
            assert not (getattr(one, "status", 0) == 200 and len(one.content) != 60 * 250 * 48 * 4)
        said, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, errors
        assert re.search(r"Stopped after \d+ requests, \d+ tokens", said)
        assert "Traceback" not in errors
    finally:
        process.kill()
        process.wait()
