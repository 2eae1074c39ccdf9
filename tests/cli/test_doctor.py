"""`trl-opsd doctor` passes healthy pairs of many families, and names what is wrong with another, and nothing else."""

from __future__ import annotations

import copy
import importlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import tiny, vision_language
from support.byte_languages import byte_pairs
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from trl_opsd import RolloutBackend
from trl_opsd.cli.doctor import checks
from trl_opsd.cli.doctor.pair import Pair, Side, load_pair, loading, models_of, read_settings, shrunk
from trl_opsd.cli.main import app
from trl_opsd.cli.plan.shapes import Live
from trl_opsd.models.weights import without_weights

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
    return Pair(
        Side("student", student.eval(), of_student or words()), Side("teacher", teacher.eval(), of_teacher or words())
    )


def verdicts(found) -> dict[str, list[str]]:
    return {kind: [one.name for one in found if one.verdict == kind] for kind in ("failed", "warning", "skipped")}


@pytest.mark.quick
@pytest.mark.parametrize("family", FAMILIES)
def test_a_healthy_pair_passes_every_check(family):
    found = checks.examine(pair(FAMILIES[family](32), FAMILIES[family](48, seed=1)))
    assert verdicts(found) == {"failed": [], "warning": [], "skipped": []}, [
        one for one in found if one.verdict != "ok"
    ]
    said = {one.name: one.said for one in found}
    assert said["vocabularies"] == "Both heads have 259 rows."
    assert said["end token"] == "'<|im_end|>', id 2."
    assert "'<|im_start|>assistant\\n'" in said["chat template"]
    assert int(said["transformers rollout"].split()[0]) > 3


def test_self_teacher_is_compared_with_itself_given_more_context():
    found = checks.examine(Pair(*(Side("mine", tiny.qwen2(32).eval(), words()) for _ in range(2))))
    assert verdicts(found)["failed"] == [], found
    said = next(one.said for one in found if one.name == "loss")
    assert float(said.split("forward_kl ")[1].split(",")[0]) > 1e-3


@pytest.mark.parametrize("kind", ["words", "letters"])
def test_vocabulary_without_english_passes(kind):
    known = [f"gene{number}" for number in range(40)] if kind == "words" else [*"ACDEFGHIKLMNPQRSTVWY"]  # amino acids
    vocabulary = {token: place for place, token in enumerate(["<s>", "<|im_start|>", "<|im_end|>", "<unk>", *known])}
    of_words = kind == "words"  # these make one token of all that is unknown; letters leave it out
    backend = Tokenizer(models.WordLevel(vocabulary, "<unk>") if of_words else models.BPE(vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    domain = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="<|im_end|>", pad_token="<|im_start|>"
    )
    domain.chat_template = TEMPLATE
    sized = {"vocab_size": len(vocabulary)}
    found = checks.examine(pair(tiny.qwen2(32, **sized), tiny.qwen2(48, seed=1, **sized), domain, domain))
    assert verdicts(found) == {"failed": [], "warning": [], "skipped": []}, found


def permuted() -> Pair:
    swapped = json.loads(words().backend_tokenizer.to_str())
    table = swapped["model"]["vocab"]
    first, second = [token for token, number in table.items() if number in (100, 101)]
    table[first], table[second] = table[second], table[first]
    other = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(swapped)), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    other.chat_template = TEMPLATE
    return pair(of_teacher=other)


def too_small() -> Pair:
    return pair(teacher=tiny.qwen2(48, seed=1, vocab_size=200))


def odd_logits() -> Pair:
    made = pair()
    head = made.teacher.model.lm_head
    head.register_forward_hook(lambda _, __, logits: logits.sin())
    return made


def nan_weights() -> Pair:
    made = pair()
    torch.nn.init.constant_(made.teacher.model.model.layers[0].mlp.up_proj.weight, float("nan"))
    return made


def ignores_its_input() -> Pair:
    made = pair()
    table = made.teacher.model.model.embed_tokens.weight
    with torch.no_grad():
        table.copy_(table[5].clone().expand_as(table))
    return made


def no_generation_prompt() -> Pair:
    return pair(
        of_student=words(TEMPLATE.partition("{% if add")[0]), of_teacher=words(TEMPLATE.partition("{% if add")[0])
    )


def drops_the_last_message() -> Pair:
    short = words(TEMPLATE.replace("in messages", "in messages[:-1]"))
    return pair(of_student=short, of_teacher=short)


def no_end_token() -> Pair:
    made = pair()
    made.student.tokenizer.eos_token = None
    return made


@pytest.mark.parametrize(
    ("make", "failing", "said"),
    [
        (permuted, "tokenizers", "id 100 is"),
        (too_small, "vocabularies", "The head of the teacher has 200 rows, but the tokenizer has 259 tokens"),
        (odd_logits, "teacher's head", "does not compute its logits as"),
        (nan_weights, "teacher's head", "NaN"),
        (ignores_its_input, "teacher input", "has the same hidden state at all"),
        (no_generation_prompt, "chat template", "ignores `add_generation_prompt`"),
        (
            drops_the_last_message,
            "chat template",
            "A conversation: the tokenizer's chat template drops message 3 of 3",
        ),
        (no_end_token, "end token", "The end token None"),
    ],
)
def test_only_the_broken_part_fails(make, failing, said):
    found = checks.examine(make())
    of = verdicts(found)
    assert of["failed"] == [failing], found
    assert of["warning"] == []
    assert said in next(one.said for one in found if one.name == failing)
    needs = {one.name: one.needs for one in checks.CHECKS}
    for name in of["skipped"]:
        assert {failing, *of["skipped"]} & set(needs[name]), f"{name} has nothing to do with {failing}"


def test_both_models_read_images_as_their_own_forward_does(tmp_path):
    for role, family, width in (("student", "gemma3", 32), ("teacher", "gemma3", 48)):
        vision_language.model(family, width, width, sees=True).save_pretrained(tmp_path / role)
        vision_language.processor(family).save_pretrained(tmp_path / role)
    made = load_pair(str(tmp_path / "student"), str(tmp_path / "teacher"))
    found = {one.name: one for one in checks.examine(made)}
    said = [found.pop(f"{role}'s images").said for role in ("student", "teacher")]
    assert all(
        "a prompt with one of 96 x 64 pixels has 30 tokens, and the vision tower reads 5 " in one for one in said
    )
    assert verdicts(found.values())["failed"] == []
    for weight in made.teacher.model.model.multi_modal_projector.parameters():
        torch.nn.init.zeros_(weight)
    made.student.processing.chat_template = TEMPLATE
    found = checks.examine(made)
    assert verdicts(found)["failed"] == ["teacher's images"]
    said = {one.name: (one.verdict, one.said) for one in found}
    assert "it does not see them" in said["teacher's images"][1]
    assert said["student's images"][0] == "warning"
    assert "Prompts have to be text" in said["student's images"][1]


class Stale(RolloutBackend):
    """Writes what another model finds likeliest."""

    def bind(self, trainer):
        self.tokens, self.model = trainer.args.max_completion_length, tiny.qwen2(32, seed=7)

    def complete(self, prompt_ids, step):
        return [
            self.model.generate(torch.tensor([ids]), max_new_tokens=5, do_sample=False, eos_token_id=None)[
                0, len(ids) :
            ].tolist()
            for ids in prompt_ids
        ]


def test_an_engine_with_other_weights_is_found():
    with pytest.raises(
        ValueError, match=r"Stale, decoding greedily, generated a token that is [\d.]+ nats less likely"
    ):
        checks.reproduces(pair(), rollout=Stale())


@pytest.mark.parametrize("check", [checks.zero_with_itself, checks.equals_reference])
def test_nan_in_a_gradient_alone_fails(check, monkeypatch):
    monkeypatch.setattr(checks, "_compared", lambda mine, *_: (torch.zeros(1), torch.full((1,), torch.nan)))
    monkeypatch.setattr(checks, "_reference", lambda *_: (torch.zeros(1), torch.zeros(1)))
    with pytest.raises(ValueError, match="nan"):
        check(pair())


def test_nan_in_a_later_row_of_a_rollout_fails(monkeypatch):
    found = iter([0.0, float("nan"), 0.0])
    monkeypatch.setattr(checks, "_shortfall", lambda *_: next(found))
    with pytest.raises(ValueError, match="generated a token that is nan nats less likely"):
        checks.reproduces(pair())


def test_a_teacher_that_draws_random_numbers_is_found():
    made = pair()
    layer = made.teacher.model.model.layers[1].mlp
    layer.register_forward_hook(lambda _, __, out: out + 0.01 * torch.rand_like(out))
    found = {one.name: one for one in checks.examine(made)}
    assert [one.name for one in found.values() if one.verdict == "failed"] == ["teacher determinism"]
    assert "draws random numbers" in found["teacher determinism"].said


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "has no chat template"),
        (TEMPLATE.replace("<|im_end|>", "\n"), "which contains no end token (<|im_end|>)"),
    ],
)
def test_unusual_chat_template_warns(template, said):
    found = checks.examine(pair(of_student=words(template), of_teacher=words(template)))
    assert verdicts(found) == {"failed": [], "warning": ["chat template"], "skipped": []}
    assert said in next(one.said for one in found if one.verdict == "warning")


def test_padded_heads_are_compared_up_to_the_tokenizers_last_token():
    found = checks.examine(pair(teacher=tiny.qwen2(48, seed=1, vocab_size=320)))
    assert verdicts(found)["failed"] == [], found
    assert "Heads of 259 and 320 rows; the 259 ids" in next(one.said for one in found if one.name == "vocabularies")


@pytest.fixture
def folders(tmp_path):
    for name, model in (("student", tiny.qwen2(32)), ("teacher", tiny.qwen2(48, seed=1))):
        model.save_pretrained(tmp_path / name)
        words().save_pretrained(tmp_path / name)
    return tmp_path


def doctor(*arguments):
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


@pytest.mark.quick
def test_the_command_prints_a_table_and_a_verdict(folders):
    done = doctor(folders / "student", folders / "teacher")
    assert done.exit_code == 0, done.output
    assert "Ready: 17 of 17 checks passed" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "tokenizers ..." in done.stderr


def test_command_prints_only_json_and_fails_for_broken_models(folders):
    broken = nan_weights().teacher.model
    broken.save_pretrained(folders / "teacher")
    done = doctor(folders / "student", folders / "teacher", "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert found["ready"] is False
    assert found["verdict"].startswith("Not ready: 1 of 17 checks failed (teacher's head)")
    assert [one["name"] for one in found["checks"] if one["verdict"] == "failed"] == ["teacher's head"]


def test_tiny_keeps_heads_and_tokenizers_and_reads_no_weights(folders):
    deep = tiny.qwen2(32, num_hidden_layers=6, intermediate_size=700)
    deep.config.save_pretrained(folders / "student")
    (folders / "student" / "model.safetensors").unlink()
    found = load_pair(str(folders / "student"), str(folders / "teacher"), tiny=True)
    assert len(found.student.model.model.layers) == 2
    assert found.student.model.lm_head.weight.shape == deep.lm_head.weight.shape
    assert found.student.model.config.intermediate_size == 256
    done = doctor(folders / "student", folders / "teacher", "--tiny")
    assert done.exit_code == 0, done.output
    assert "2 random layers" in " ".join(done.stdout.split())


@pytest.mark.long
def test_reference_holds_no_head_copy_and_gradients_once():
    made = pair(tiny.qwen2(512, vocab_size=8192), tiny.qwen2(2048, seed=1, vocab_size=8192))
    mine, yours = (checks._logits_after(made, role) for role in ("student", "teacher"))
    with Live() as live:
        checks._reference(mine, yours, checks._DIVERGENCES["jsd"], 259)
    assert live.peak < 20 * 8 * 8192 * len(mine.hidden), "what has the vocabulary and the tokens, none with the states"
    weights = [*made.student.model.parameters()]
    with Live([*weights, *made.teacher.model.parameters()]) as live:
        checks.same_in_parts(made)
    assert live.peak < 2 * sum(one.nbytes for one in weights)


def test_a_tiny_model_keeps_layers_of_both_kinds():
    config = shrunk(tiny.gemma2(num_hidden_layers=6).config)
    assert config.layer_types == ["sliding_attention", "full_attention"]
    assert AutoModelForCausalLM.from_config(config).config.final_logit_softcapping == 5.0


@pytest.mark.parametrize(
    ("lines", "verdict", "said"),
    [
        ({"divergence": "jsd", "max_steps": 5}, "ok", "All settings are known"),
        ({"learning_rte": 1e-3}, "failed", "learning_rate"),
        ({"teacher_model_name_or_path": "another"}, "warning", "sets the teacher 'another'"),
    ],
)
def test_settings_file_is_checked(folders, lines, verdict, said):
    file = folders / "run.yaml"
    file.write_text("".join(f"{name}: {value}\n" for name, value in {**lines, "output_dir": folders}.items()))
    try:
        settings = read_settings(str(file))
    except ValueError as error:
        settings = error
    found = checks.examine(load_pair(str(folders / "student"), str(folders / "teacher")), settings)
    one = next(one for one in found if one.name == "settings")
    assert (one.verdict, said in one.said) == (verdict, True), one


def test_config_file_gives_models_and_loading_options(folders):
    file = folders / "run.yaml"
    options = {
        "model_name_or_path": f"{folders / 'student'}", "teacher_model_name_or_path": f"{folders / 'teacher'}",
        "attn_implementation": "eager", "output_dir": f"{folders}", "model_init_kwargs": {"local_files_only": True},
    }  # fmt: skip
    file.write_text(json.dumps(options))
    settings = read_settings(str(file))
    assert [one.get("attn_implementation") for one in loading(settings)] == ["eager", "eager"]
    assert [one.get("local_files_only") for one in loading(settings)] == [True, None]
    found = load_pair(*models_of(settings), settings=settings)
    assert [one.model.config._attn_implementation for one in (found.student, found.teacher)] == ["eager", "eager"]
    done = doctor("--config", file)
    assert done.exit_code == 0, done.output
    assert "Ready: 18 of 18 checks passed" in done.stdout

    del options["teacher_model_name_or_path"]
    file.write_text(json.dumps({**options, "teacher_model_kind": "live"}))
    assert models_of(read_settings(str(file))) == (options["model_name_or_path"],) * 2
    file.write_text(json.dumps({"output_dir": f"{folders}"}))
    done = doctor("--config", file)
    assert done.exit_code == 2
    assert "expected STUDENT and TEACHER, or a --config FILE that sets both" in " ".join(done.stderr.split())


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl"])
def test_multimodal_checkpoints_are_examined_as_a_training_loads_them(family, tmp_path):
    model = vision_language.model(family, 32, 0)
    model.save_pretrained(tmp_path)
    words().save_pretrained(tmp_path)
    for is_tiny in (False, True):
        found = load_pair(str(tmp_path), str(tmp_path), tiny=is_tiny)
        assert [type(one.model) for one in (found.student, found.teacher)] == [type(model)] * 2
        assert len(found.student.tokenizer.get_vocab()) == tiny.VOCABULARY
        of = verdicts(all_found := checks.examine(found))
        assert (of["failed"], of["skipped"], of["warning"]) == ([], [], []), all_found


def test_teacher_without_tokenizer_warns(folders):
    for file in (folders / "teacher").glob("*token*"):
        file.unlink()
    done = doctor(folders / "student", folders / "teacher", "--json")
    odd = {one["name"]: one["said"] for one in json.loads(done.stdout)["checks"] if one["verdict"] != "ok"}
    assert (done.exit_code, list(odd)) == (0, ["tokenizers"])
    assert "has no tokenizer to compare" in odd["tokenizers"]


def test_equal_models_pass_the_loss_check():
    student = tiny.qwen2(32)
    found = {one.name: one for one in checks.examine(pair(student, copy.deepcopy(student)))}
    assert found["loss"].verdict == "ok"
    assert float(found["loss"].said.split("forward_kl ")[1].split(",")[0]) < 1e-6


@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text", "mamba"])
def test_tiny_models_of_families_whose_layers_differ_are_built(family, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    config = importlib.import_module("toys").config_of(family, 259)
    assert config.num_hidden_layers == 4
    made = without_weights(shrunk(config), torch.float32)
    assert made.config.num_hidden_layers == 2
    assert torch.isfinite(made(input_ids=torch.arange(3, 9)[None]).logits).all()


def test_a_missing_model_is_bad_usage(folders):
    done = doctor(folders / "nowhere", folders / "teacher")
    assert done.exit_code == 2
    assert "trl-opsd doctor: " in done.stderr
    assert "Traceback" not in done.stderr


def test_weights_that_a_checkpoint_lacks_are_named(folders):
    for role in ("student", "teacher"):
        made = tiny.qwen2(32 if role == "student" else 48)
        whole = made.state_dict()
        made.save_pretrained(
            folders / role, state_dict={name: whole[name] for name in whole if "layers.1.mlp" not in name}
        )
        done = doctor(folders / "student", folders / "teacher")
        made.save_pretrained(folders / role)
        said = " ".join(done.stderr.split())
        assert (done.exit_code, f"`{role}='{folders / role}'`: the checkpoint lacks" in said) == (2, True)
        assert "model.layers.1.mlp.down_proj.weight, model.layers.1.mlp.gate_proj.weight, model.layers.1.mlp.up" in said


def test_checks_go_on_after_one_that_raises_anything(monkeypatch):
    def broken(_):
        raise RuntimeError("no such kernel")

    first, *others = checks.CHECKS
    monkeypatch.setattr(checks, "CHECKS", (replace(first, run=broken), *others))
    found = checks.examine(pair())
    assert (found[0].verdict, found[0].said) == ("failed", "no such kernel")
    assert len(found) == len(others) + 2


def test_comparable_part_of_another_tokenizers_teacher_is_said(folders):
    words = byte_pairs(60)
    tiny.qwen2(48, 1, vocab_size=len(words)).save_pretrained(folders / "teacher")
    words.save_pretrained(folders / "teacher")
    done = doctor(folders / "student", folders / "teacher")
    assert done.exit_code == 1
    assert "set `cross_tokenizer='bytes'`" in " ".join(done.stdout.split())
    file = folders / "run.yaml"
    paths = {"model_name_or_path": folders / "student", "teacher_model_name_or_path": folders / "teacher"}
    lines = {**paths, "output_dir": folders, "cross_tokenizer": "bytes"}
    file.write_text("".join(f"{name}: {value}\n" for name, value in lines.items()))
    done = doctor("--config", file)
    said = " ".join(done.stdout.split())
    assert done.exit_code == 0, said
    assert re.search(r"\d+% of the text of three rows can be compared", said), said
    assert "Ready" in said
