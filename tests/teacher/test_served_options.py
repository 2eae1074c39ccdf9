"""`teacher_server_url`: what is refused before a model is loaded, what a checkpoint remembers of it, and which servers
several processes may reach.
"""

from __future__ import annotations

import re

import pytest
import torch
from support import forks, serving, tiny
from support.failing_server import pretended
from transformers import AutoModelForCausalLM

from trl_opsd import OPSDConfig
from trl_opsd._compat.urls import server_urls
from trl_opsd.errors import ServerError
from trl_opsd.losses import ForwardKL
from trl_opsd.teacher.build import served

URL = "http://127.0.0.1:8000"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (f"{URL}/", {"teacher": URL}),
        ("http://[::1]:8001", {"teacher": "http://[::1]:8001"}),
        ('{"math": "http://a:1", "code": "http://c:3/"}', {"math": "http://a:1", "code": "http://c:3"}),
    ],
)
def test_addresses_are_read_as_text_and_by_name(tmp_path, given, expected):
    config = OPSDConfig(str(tmp_path), teacher_server_url=given, use_cpu=True)
    assert server_urls("teacher_server_url", config.teacher_server_url) == expected


NO_ADDRESS = ("127.0.0.1:8000", "ftp://host", "http://", "http://host:port", "http://host:8000?a=b", "")


@pytest.mark.quick
@pytest.mark.refusal
@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        *(("teacher_server_url", one, f"`teacher_server_url='{one}'`: expected an address") for one in NO_ADDRESS),
        ("teacher_server_url", 8000, "expected a valid dict"),
        ("teacher_server_url", {"math": 3}, "`teacher_server_url['math']='3'`: expected an address"),
        ("teacher_server_url", [URL, "http://b:1"], "`teacher_server_url` has several addresses: expected one"),
        ("sglang_server_url", [URL], "`sglang_server_url` has several addresses"),
        ("vllm_server_base_url", f"{URL}, http://b:1", "`vllm_server_base_url` has several addresses"),
        ("teacher_server_url", {"math": [URL], "code": URL}, "`teacher_server_url['math']` has several addresses"),
        ("teacher_server_url", "http://me:s3cret@host:8000", "contains a user or a password"),
    ],
)
def test_invalid_addresses_are_refused(tmp_path, name, given, said):
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        OPSDConfig(str(tmp_path), **{name: given}, use_cpu=True)
    assert "s3cret" not in str(error.value)


@pytest.mark.refusal
@pytest.mark.before_loading
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"teacher_model": None, "teacher_model_kind": "live"}, "with teachers that are no paths, ['teacher']"),
        ({"teacher_model": tiny.qwen2(48, seed=1)}, "with teachers that are no paths, ['teacher']"),
        ({"teacher_server_url": {"math": URL}}, "has servers for ['math']: the teachers are ['teacher']"),
        ({}, "No teacher's server at http://127.0.0.1:9 after `teacher_server_timeout=0` seconds"),
    ],
)
def test_options_that_conflict_with_a_server_are_refused_before_loading(make_trainer, given, said):
    options = {"teacher_server_url": "http://127.0.0.1:9", "teacher_server_timeout": 0, **given}
    with pytest.raises(ValueError, match=re.escape(said)):
        make_trainer(**options)


def test_a_run_resumes_with_another_server_or_a_local_teacher(trained, tmp_path):
    path = serving.save_teacher(tmp_path / "untied", seed=1)
    model = AutoModelForCausalLM.from_pretrained(path)
    saving = {"save_strategy": "steps", "save_steps": 1, "teacher_model": path}
    resumed = {**saving, "max_steps": 2, "resume": str(tmp_path / "checkpoint-1")}
    with pretended(model) as one, pretended(model) as two:
        trained(**saving, max_steps=1, teacher_server_url=one.url)
        for options in ({"teacher_server_url": two.url}, {}):
            assert trained(**resumed, **options).state.global_step == 2
        serving.save_teacher(tmp_path / "untied", seed=2)
        with pytest.raises(ValueError, match=r"teacher_weights: \{'head of teacher': 'sha256"):
            trained(**resumed)


# ---- Processes whose servers differ ----------------------------------------------------------------------------------


def reach(path: str, case: str) -> str:
    """What a process finds, whose server is on a port of its own."""
    process = torch.distributed.get_rank()
    model = AutoModelForCausalLM.from_pretrained(path)
    if process and case == "another teacher":
        with torch.no_grad():
            model.model.embed_tokens.weight[::2] *= -1  # with the same final norm
    if process and case == "another dtype":
        model = model.bfloat16()
    listed = {"data": [{"id": "a teacher", "root": "untied", "max_model_len": 100 + process}]}
    with pretended(model, models=listed) as server:
        args = OPSDConfig("unused", report_to="none", use_cpu=True, teacher_server_url=server.url)
        try:
            found = f"context {served(path, server.url, args, ForwardKL(), model, tiny.tokenizer()).context}"
        except ServerError as error:
            found = f"{server.url} {error}"
        torch.distributed.barrier()  # the server is there until both have asked
    return found


def reach_each(path: str) -> dict[str, str]:
    """What came of it, by case."""
    OPSDConfig("unused", report_to="none", use_cpu=True)  # which connects the processes
    assert torch.distributed.get_world_size() == 2
    return {case: reach(path, case) for case in ("one teacher", "another teacher", "another dtype")}


@pytest.mark.distributed
@pytest.mark.timeout(forks.SECONDS + 60)
def test_processes_compare_the_answers_of_their_servers(tmp_path):
    path = serving.save_teacher(tmp_path / "untied", seed=1)
    first, second = forks.results("ddp", reach_each, path).values()
    assert first["one teacher"] == second["one teacher"] == "context 101", "the lowest of 101 and 102"
    for case, said in (
        ("another teacher", "256 bytes per token in float32) is"),
        ("another dtype", "128 bytes per token in bfloat16) is different from"),
    ):
        assert f"of process 1 ({second[case].split()[0]}; " in first[case]
        for found in (first, second):
            assert said in found[case]
