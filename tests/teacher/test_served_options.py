"""`teacher_server_url`: what is refused before a model is loaded, and what a checkpoint remembers of it."""

from __future__ import annotations

import re

import pytest
from support import serving, tiny
from support.failing_server import pretended
from transformers import AutoModelForCausalLM

from trl_opsd import OPSDConfig
from trl_opsd._compat.urls import server_urls

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
SEVERAL = ([URL, "http://b:1"], f"{URL}, http://b:1", [URL])


@pytest.mark.quick
@pytest.mark.refusal
@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        *(("teacher_server_url", one, f"`teacher_server_url='{one}'`: expected an address") for one in NO_ADDRESS),
        ("teacher_server_url", 8000, "expected a valid dict"),
        ("teacher_server_url", {"math": 3}, "`teacher_server_url['math']='3'`: expected an address"),
        *(
            (name, one, f"`{name}` has several addresses: expected one")
            for name in ("teacher_server_url", "sglang_server_url", "vllm_server_base_url")
            for one in SEVERAL
        ),
        *(
            ("teacher_server_url", {"math": one, "code": URL}, "`teacher_server_url['math']` has several addresses")
            for one in SEVERAL[:2]
        ),
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


def test_one_of_several_teachers_may_be_behind_a_server(trained, tmp_path):
    path = serving.save_teacher(tmp_path / "untied", seed=1)
    rows = tiny.rows().add_column("teacher", ["big", "small"] * 4)
    losses = []
    with pretended(AutoModelForCausalLM.from_pretrained(path)) as server:
        for options in ({}, {"teacher_server_url": {"big": server.url}, "teacher_offload": "cpu"}):
            trainer = trained(
                teacher_model={"big": path, "small": tiny.qwen2(48, seed=2)}, train_dataset=rows, **options
            )
            losses.append(tiny.logged(trainer, "loss"))
        assert len(server.asked) > 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
