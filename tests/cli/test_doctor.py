"""`trl-opsd doctor` passes healthy pairs of many families, and names what is wrong with another, and nothing else."""

from __future__ import annotations

import json
import re

import pytest
import torch
import yaml
from support import tiny, vision_language
from support.byte_languages import byte_pairs
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from trl_opsd.cli import doctor as checks
from trl_opsd.cli.doctor import Pair, pair_of
from trl_opsd.cli.main import app
from trl_opsd.cli.plan import Live

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}: {{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FAMILIES = {"qwen2": tiny.qwen2, "llama": tiny.llama, "gemma2": tiny.gemma2, "gpt2": tiny.gpt2}


def words(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    found = tiny.tokenizer()
    found.chat_template = template
    return found


def pair(student=None, teacher=None, of_student=None, of_teacher=None) -> Pair:
    student, teacher = student or tiny.qwen2(32), teacher or tiny.qwen2(48, seed=1)
    return Pair(student, teacher, of_student or words(), teacher_tokenizer=of_teacher or words())


def verdicts(found) -> dict[str, list[str]]:
    return {kind: [one.name for one in found if one.verdict == kind] for kind in ("failed", "warning", "skipped")}


HEALTHY = {"failed": [], "warning": [], "skipped": []}


def of_a_domain(kind: str) -> Pair:
    """A vocabulary without English words: of genes, or of amino acids."""
    known = [f"gene{number}" for number in range(40)] if kind == "words" else [*"ACDEFGHIKLMNPQRSTVWY"]
    vocabulary = {token: place for place, token in enumerate(["<s>", "<|im_start|>", "<|im_end|>", "<unk>", *known])}
    of_words = kind == "words"  # these make one token of all that is unknown; letters leave it out
    backend = Tokenizer(models.WordLevel(vocabulary, "<unk>") if of_words else models.BPE(vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    ends = {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<|im_start|>"}
    domain = PreTrainedTokenizerFast(tokenizer_object=backend, **ends)
    domain.chat_template = TEMPLATE
    sized = {"vocab_size": len(vocabulary)}
    return pair(tiny.qwen2(32, **sized), tiny.qwen2(48, seed=1, **sized), domain, domain)


PAIRS = {
    **{name: lambda make=make: pair(make(32), make(48, seed=1)) for name, make in FAMILIES.items()},
    "a padded head": lambda: pair(teacher=tiny.qwen2(48, seed=1, vocab_size=320)),
    "equal models": lambda: pair(tiny.qwen2(32), tiny.qwen2(32)),
    "words": lambda: of_a_domain("words"),
    "letters": lambda: of_a_domain("letters"),
}


@pytest.mark.parametrize("case", [pytest.param(one, marks=[pytest.mark.quick] * (one in FAMILIES)) for one in PAIRS])
def test_a_healthy_pair_passes_every_check(case):
    found = checks.examine(PAIRS[case]())
    assert verdicts(found) == HEALTHY, [one for one in found if one.verdict != "ok"]
    said = {one.name: one.said for one in found}
    sizes = {"a padded head": "259 and 320 rows; 259", "words": "44 and 44 rows; 44", "letters": "24 and 24 rows; 24"}
    assert said["start"] == f"Heads of {sizes.get(case, '259 and 259 rows; 259')} tokens."
    assert "'<|im_start|>assistant\\n'" in said["chat template"]
    assert (float(said["loss"].split("forward_kl ")[1].split(",")[0]) < 1e-6) == (case == "equal models")


def nan_weights() -> Pair:
    made = pair()
    torch.nn.init.constant_(made.teacher.model.layers[0].mlp.up_proj.weight, float("nan"))
    return made


def of_template(template: str | None) -> Pair:
    return pair(of_student=words(template), of_teacher=words(template))


@pytest.mark.parametrize(
    ("make", "failing", "said"),
    [
        (nan_weights, "start", "NaN"),  # as all that a training refuses when it starts
        (lambda: of_template(TEMPLATE.partition("{% if add")[0]), "chat template", "add_generation_prompt"),
        (lambda: of_template(TEMPLATE.replace("in messages", "in messages[:-1]")), "chat template", "drops message 3"),
    ],
)
def test_only_the_broken_part_fails(make, failing, said):
    found = checks.examine(make())
    assert verdicts(found)["failed"] == [failing], found
    assert said in next(one.said for one in found if one.name == failing)
    assert len(verdicts(found)["skipped"]) == (len(found) - 1) * (failing == "start"), "all others need it"


@pytest.fixture
def started(tmp_path):
    made = pair()
    checks.start(made, str(tmp_path))
    return made


def test_nan_in_a_gradient_alone_fails(started, monkeypatch):
    monkeypatch.setattr(checks, "_compared", lambda mine, *_: (torch.zeros(1), torch.full((1,), torch.nan)))
    monkeypatch.setattr(checks, "_reference", lambda *_: (torch.zeros(1), torch.zeros(1)))
    with pytest.raises(ValueError, match="nan"):
        checks.loss(started)


@pytest.mark.long
def test_reference_holds_no_head_copy(tmp_path):
    made = pair(tiny.qwen2(512, vocab_size=8192), tiny.qwen2(2048, seed=1, vocab_size=8192))
    checks.start(made, str(tmp_path))
    mine, yours = made.logits()
    with Live() as live:
        checks._reference(mine, yours, checks._DIVERGENCES["jsd"], 259)
    assert live.peak < 20 * 8 * 8192 * len(mine.hidden), "what has the vocabulary and the tokens, none with the states"


@pytest.fixture
def folders(tmp_path):
    tiny.save_pair(tmp_path)
    return tmp_path


def doctor(*arguments):
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def test_self_teacher_is_compared_with_itself_given_more_context(folders):
    found = checks.examine(pair_of(str(folders / "student"), str(folders / "student")))
    assert verdicts(found)["failed"] == [], found
    said = next(one.said for one in found if one.name == "loss")
    assert float(said.split("forward_kl ")[1].split(",")[0]) > 1e-3


@pytest.mark.quick
def test_the_command_prints_findings_and_a_verdict(folders):
    done = doctor(folders / "student", folders / "teacher")
    assert done.exit_code == 0, done.output
    found = yaml.safe_load(done.stdout)
    assert [one["verdict"] for one in found["checks"]] == ["ok"] * 4
    assert found["ready"] is True
    assert done.stderr.splitlines()[0] == "start"


def test_command_prints_only_yaml_and_fails_for_broken_models(folders):
    nan_weights().teacher.save_pretrained(folders / "teacher")
    done = doctor(folders / "student", folders / "teacher")
    assert done.exit_code == 1
    found = yaml.safe_load(done.stdout)
    assert found["ready"] is False
    assert [one["name"] for one in found["checks"] if one["verdict"] == "failed"] == ["start"]


def test_config_file_gives_models_and_loading_options(folders):
    file = folders / "run.yaml"
    options = {
        "model_name_or_path": f"{folders / 'student'}", "teacher_model_name_or_path": f"{folders / 'teacher'}",
        "attn_implementation": "eager", "output_dir": f"{folders}", "model_init_kwargs": {"local_files_only": True},
    }  # fmt: skip
    file.write_text(json.dumps(options))
    made = pair_of(None, None, file)
    loading = [made.options[f"{name}model_init_kwargs"] for name in ("", "teacher_")]
    assert [one.get("attn_implementation") for one in loading] == ["eager", "eager"]
    assert [one.get("local_files_only") for one in loading] == [True, None]
    assert (made.student, made.teacher) == (str(folders / "student"), str(folders / "teacher"))
    done = doctor("--config", file)
    assert done.exit_code == 0, done.output
    del options["teacher_model_name_or_path"]
    file.write_text(json.dumps({**options, "teacher_model_kind": "live"}))
    assert pair_of(None, None, file).teacher == options["model_name_or_path"]


def test_bad_usage_is_explained(folders):
    file, both = folders / "run.yaml", (folders / "student", folders / "teacher")
    file.write_text(f"model_name_or_path: {folders / 'student'}")
    (folders / "typo.yaml").write_text("learning_rte: 0.1")
    for given, named in (
        (("--config", file), "STUDENT and TEACHER"),
        ((*both, "--config", folders / "typo.yaml"), "learning_rate"),
        ((folders / "nowhere", folders / "teacher"), "nowhere"),
    ):
        done = doctor(*given)
        assert done.exit_code == 2
        assert named in done.stderr
        assert "Traceback" not in done.stderr


def test_multimodal_checkpoints_are_examined_as_a_training_loads_them(tmp_path):
    model = vision_language.model("gemma3", 32, 0)
    model.save_pretrained(tmp_path)
    words().save_pretrained(tmp_path)
    found = checks.examine(made := pair_of(str(tmp_path), str(tmp_path)))
    assert [type(one) for one in (made.trainer.model, made.trainer.teacher_model)] == [type(model)] * 2
    assert verdicts(found) == HEALTHY, found


def test_comparable_part_of_another_tokenizers_teacher_is_said(folders):
    words = byte_pairs(60)
    tiny.qwen2(48, 1, vocab_size=len(words)).save_pretrained(folders / "teacher")
    words.save_pretrained(folders / "teacher")
    done = doctor(folders / "student", folders / "teacher")
    assert done.exit_code == 1
    assert "which servers do not support (docs/tokenizers.md)" in " ".join(done.stdout.split())
    file = folders / "run.yaml"
    paths = {"model_name_or_path": folders / "student", "teacher_model_name_or_path": folders / "teacher"}
    lines = {**paths, "output_dir": folders, "cross_tokenizer": "bytes"}
    file.write_text("".join(f"{name}: {value}\n" for name, value in lines.items()))
    done = doctor("--config", file)
    said = " ".join(done.stdout.split())
    assert done.exit_code == 0, said
    assert re.search(r"\d+% of the text of three rows can be compared", said), said
    assert "ready: true" in said
