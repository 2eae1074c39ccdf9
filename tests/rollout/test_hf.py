"""Rollouts by `transformers`, as a trainer calls them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import tiny
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    CompileConfig,
    DynamicCache,
    GenerationMixin,
    Qwen2ForCausalLM,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

from trl_opsd import HFRollout, OPSDTrainer
from trl_opsd.types.rollout import cut_after_end

PROMPTS = ["2+2=", "The sky is", "a", "Count: one two"]


@pytest.fixture
def make_writing(make_trainer):
    """Builds a trainer of a student with many end tokens, so that rows leave the batch at different times."""

    def make(rollout: HFRollout | None = None, **given):
        student = given.pop("model", None) or tiny.qwen2()
        student.generation_config.eos_token_id = list(range(2, tiny.VOCABULARY, 12))
        return make_trainer(model=student, rollout=rollout or HFRollout(), **given)

    return make


def lora(student):
    return get_peft_model(student, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))


def seeded(write, *given):
    torch.manual_seed(0)
    return write(*given)


def by_trl(trainer, prompt_ids: list[list[int]]) -> list[list[int]]:
    """The completions of TRL: one padded batch, its own generation config."""
    inputs = trainer.pad_prompts(prompt_ids)
    with trainer.student_for_generation() as student:
        written = student.generate(**inputs, generation_config=trainer.generation_config)
    written = getattr(written, "sequences", written)
    return [cut_after_end(ids, trainer.eos_token_ids) for ids in written[:, inputs["input_ids"].size(1) :].tolist()]


@pytest.mark.quick
class TestTokens:
    @pytest.mark.parametrize(
        ("options", "of_checkpoint"),
        [
            ({"temperature": 0.7, "top_k": 40}, {}),
            ({"top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.2}, {}),
            ({"generation_kwargs": {"no_repeat_ngram_size": 2}, "cache_implementation": "static"}, {}),
            ({"generation_kwargs": {"do_sample": False, "num_beams": 2}}, {}),
            ({"generation_kwargs": {"min_new_tokens": 3, "typical_p": 0.9}}, {}),
            ({}, {"num_return_sequences": 2}),
            ({}, {"return_dict_in_generate": True, "output_scores": True}),
            ({}, {"suppress_tokens": [7, 9], "begin_suppress_tokens": [11], "bad_words_ids": [[5], [6, 7]]}),
            ({}, {"forced_eos_token_id": 2, "exponential_decay_length_penalty": (2, 1.1)}),
            ({}, {"watermarking_config": WatermarkingConfig(bias=4.0, seeding_scheme="selfhash", context_width=2)}),
            ({}, {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3])}),
            ({}, {"encoder_repetition_penalty": 1.5}),
            ({}, {"cache_implementation": "static", "prefill_chunk_size": 4}),
            ({}, {"num_beams": 2}),
        ],
        ids=lambda given: next(iter(given), ""),
    )
    def test_options_give_the_tokens_and_the_random_state_of_trl(self, make_writing, options, of_checkpoint):
        student = tiny.qwen2()
        vars(student.generation_config).update(of_checkpoint)
        trainer = make_writing(model=student, max_completion_length=32, **options)
        prompt_ids = trainer.tokenize(PROMPTS * 3)
        written, state = seeded(trainer.complete, prompt_ids), torch.get_rng_state()
        assert len({len(ids) for ids in written}) >= 3 or "forced_eos_token_id" in of_checkpoint
        student.generation_config.num_return_sequences, student.generation_config.return_dict_in_generate = 1, False
        assert written == seeded(by_trl, trainer, prompt_ids)
        assert torch.equal(torch.get_rng_state(), state)

    @pytest.mark.parametrize("generation_kwargs", [{}, {"do_sample": False}, {"num_beams": 2}])
    def test_an_id_that_no_tokenizer_knows_is_never_generated(self, make_writing, generation_kwargs):
        trainer = make_writing(generation_kwargs=generation_kwargs)
        assert trainer.limits.vocabulary == tiny.VOCABULARY
        trainer.teaching.readers = replace(
            trainer.readers, student_limits=replace(trainer.limits, vocabulary=130)
        )  # as if the head were padded with 129 rows
        with torch.no_grad():
            trainer.model.get_output_embeddings().weight[130:] *= 3
        written = [token for ids in trainer.rollout.complete([[5], [6, 7], [8]] * 4, 0) for token in ids]
        assert len(written) > 30
        assert max(written) < 130

    @pytest.mark.parametrize("plain", [{}, {"use_cache": False}, {"num_beams": 2}], ids=str)
    def test_a_row_whose_context_is_full_shortens_no_other(self, make_trainer, plain):
        trainer = make_trainer(
            model=tiny.gpt2(tie_word_embeddings=False),
            teacher_model=tiny.gpt2(48, 1),
            rollout=HFRollout(),
            generation_kwargs={"min_new_tokens": 24, "do_sample": False, **plain},
        )
        prompt_ids = [list(range(3, 253)), [5], list(range(3, 254)), [6, 7], list(range(3, 259))]
        written = trainer.complete(prompt_ids)
        assert [len(ids) for ids in written] == [6, 24, 5, 24, 0]
        assert written == [trainer.complete([ids])[0] for ids in prompt_ids]

    @pytest.mark.parametrize(
        ("make", "options"),
        [
            (tiny.qwen2, {}),
            (tiny.llama, {"generation_kwargs": {"do_sample": False}, "repetition_penalty": 1.3}),
            (tiny.gpt2, {}),
            (tiny.gpt2, {"cache_implementation": "static"}),
            (lambda: tiny.gemma2(sliding_window=8), {}),
            (lambda: tiny.gemma2(sliding_window=8), {"cache_implementation": "static"}),
            (lambda: lora(tiny.qwen2()), {}),
        ],
        ids=["qwen2", "llama, greedy", "gpt2", "gpt2, static", "gemma2", "gemma2, static", "LoRA"],
    )
    def test_each_pass_reads_the_rows_that_have_not_ended(self, make_writing, make, options):
        trainer = make_writing(model=make(), **options)
        trainer.rollout.prove()
        prompt_ids = trainer.tokenize(tiny.PROMPTS * 2)
        expected, reads = seeded(by_trl, trainer, prompt_ids), Reads(trainer.model)
        assert seeded(trainer.complete, prompt_ids) == expected
        lengths = list(map(len, expected))
        assert len(set(lengths)) >= 3
        assert reads.rows == [sum(length > token for length in lengths) for token in range(max(lengths))]


class Reads:
    """The rows of each forward pass of a student."""

    def __init__(self, student):
        self.rows: list[int] = []
        bare = getattr(student, "get_base_model", lambda: student)()
        bare.register_forward_pre_hook(lambda *given: self.rows.append(len(given[-1]["input_ids"])), with_kwargs=True)


class HeadProducts(TorchDispatchMode):
    """The operations that multiply by the head."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        name = function.__name__.split(".")[0]
        if name in ("mm", "bmm", "addmm", "mkldnn_linear") and made.size(-1) == tiny.VOCABULARY:
            self.names.add(name)
        return made


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (tiny.qwen2, {"peft_config": LoraConfig(r=4, target_modules="all-linear")}),
        (tiny.gemma2, {"peft_config": LoraConfig(r=4, target_modules="all-linear"), "bf16": True}),
        (tiny.llama, {"bf16": True}),
        (tiny.gpt2, {"peft_config": LoraConfig(r=4), "generation_kwargs": {"do_sample": False, "num_beams": 2}}),
        (tiny.gpt2, {"peft_config": LoraConfig(r=4, modules_to_save=["lm_head"])}),
    ],
    ids=["LoRA", "LoRA, tied, bf16", "full, bf16", "plain generate", "saved head"],
)
def test_no_copy_of_the_head_is_made_for_each_row(make_writing, shape, options):
    """torch multiplies a view that is not contiguous, as a prefill's last states are, by a frozen matrix row by row."""
    trainer = make_writing(model=shape(), teacher_model=shape(48, seed=1), **options)
    prompt_ids = trainer.tokenize(PROMPTS)
    expected = seeded(by_trl, trainer, prompt_ids)
    with HeadProducts() as ours:
        assert seeded(trainer.complete, prompt_ids) == expected
    assert "bmm" not in ours.names
    assert ours.names
    assert not trainer.model.get_output_embeddings()._forward_pre_hooks


class Overridden(Qwen2ForCausalLM):
    """Has a `generate` with a signature of its own, which takes no custom decoding loop."""

    def generate(self, input_ids, attention_mask, generation_config):
        return super().generate(input_ids, attention_mask=attention_mask, generation_config=generation_config)


def patched(student, ours):
    """Replaces `generate` on the instance, as remote code and patches for speed do."""
    theirs = student.generate
    student.generate = lambda **given: ours(theirs, **given)
    return student


def sequences(theirs, generation_config, **given):
    generation_config.return_dict_in_generate = True
    return theirs(generation_config=generation_config, **given)


def dropping_our_loop(self, custom_generate=None, *, theirs=GenerationMixin.generate, **given):
    return theirs(self, **given)


class TestFallback:
    """A model whose `generate` is not the one of `transformers`, or cannot do what our loop needs."""

    @pytest.mark.parametrize(
        ("make", "patch", "reason"),
        [
            (lambda: Overridden(tiny.qwen2().config), (), "Overridden has a `generate` of its own"),
            (lambda: patched(tiny.qwen2(), sequences), (), "the `generate` of this Qwen2ForCausalLM was replaced"),
            (lambda: lora(patched(tiny.qwen2(), sequences)), (), "`generate` of this Qwen2ForCausalLM was replaced"),
            (tiny.qwen2, (DynamicCache, "reorder_cache", lambda self, places: self.renamed), "raises AttributeError"),
            (tiny.qwen2, (DynamicCache, "reorder_cache", lambda self, places: None), "raises RuntimeError"),
            (tiny.qwen2, (GenerationMixin, "generate", dropping_our_loop), "its `generate` ignores `custom_generate`"),
        ],
        ids=["overridden", "patched", "lora", "another cache", "a cache that keeps rows", "a loop that is ignored"],
    )
    def test_a_loop_that_cannot_work_gives_way_to_the_same_tokens(
        self, make_writing, caplog, monkeypatch, make, patch, reason
    ):
        if patch:
            monkeypatch.setattr(*patch)
        trainer = make_writing(model=make())
        prompt_ids = trainer.tokenize(PROMPTS)
        assert seeded(trainer.complete, prompt_ids) == seeded(by_trl, trainer, prompt_ids)
        trainer.complete(prompt_ids)
        assert len(re.findall(f"plain `generate`.*{reason}", caplog.text)) == 1

    @pytest.mark.parametrize(
        "ours",
        [
            lambda theirs, **given: theirs(**given)[:, 14:],
            lambda theirs, **given: theirs(**given).flip(1),
            lambda theirs, **given: theirs(**given).repeat(2, 1),
            lambda theirs, **given: torch.nn.functional.pad(theirs(**given), (0, 99)),
        ],
        ids=["stripped", "no_prompt", "rows", "length"],
    )
    def test_returned_values_that_are_no_completions_are_refused(self, make_writing, ours):
        trainer = make_writing(model=patched(tiny.qwen2(), ours))
        with pytest.raises(ValueError, match="returned other rows than the prompts and at most 24 tokens"):
            trainer.rollout.complete(trainer.tokenize(PROMPTS), 0)


class Recordings:
    """A compiler backend that records as CUDA graphs do: again for each new address of an input marked as static."""

    def __init__(self) -> None:
        self.graphs: set[tuple[int, ...]] = set()
        """Rows and addresses."""
        self.compiled = 0

    def __deepcopy__(self, memo: dict) -> Recordings:
        return self  # `generate` copies its options

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: list, **options: str):
        self.compiled += 1

        def run(*inputs):
            marked = [one for one in inputs if hasattr(one, "_dynamo_static_input_type")]
            keys_and_values = [one for one in marked if one.dim() == 4]
            assert len(keys_and_values) == 4, "of two layers"
            self.graphs.add((len(keys_and_values[0]), *(one.data_ptr() for one in marked)))
            return graph(*inputs)

        return run


@pytest.mark.parametrize("make", [tiny.qwen2, tiny.gpt2], ids=["rotary", "a table of positions"])
def test_a_compiled_step_is_recorded_once_and_gives_the_same_tokens(make_writing, make):
    torch._dynamo.reset()
    recorded = Recordings()
    compiled = make_writing(HFRollout(compile=CompileConfig(backend=recorded)), model=make(), max_completion_length=24)
    for rows, length, seed, graphs in [(8, 3, 0, 1), (8, 9, 1, 1), (3, 5, 2, 2), (8, 40, 3, 3)]:
        prompt_ids = [[3 + (seed * 31 + row * 7 + i) % 250 for i in range(length + row)] for row in range(rows)]
        torch.manual_seed(seed)
        generated = compiled.complete(prompt_ids)
        torch.manual_seed(seed)
        assert generated == by_trl(compiled, prompt_ids)
        assert len(recorded.graphs) == graphs
        assert recorded.compiled <= graphs
        with torch.no_grad():  # as a step of training does
            for weight in compiled.model.parameters():
                weight.add_(0.01 * torch.randn_like(weight))


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.9, "top_k": 50, "min_p": 0.01}])
def test_evaluation_has_its_own_temperature(make_trainer, sampling):
    class Seen(OPSDTrainer):
        def teach(self, rollout, rows):
            self.seen.append(dict(zip([row["prompt"] for row in rows], rollout.completion_lists(), strict=True)))
            return super().teach(rollout, rows)

    rows = tiny.rows(4)
    trainer = make_trainer(
        Seen, rollout=HFRollout(), eval_dataset=rows, learning_rate=1e-12, eval_temperature=0.0, **sampling
    )
    likeliest = {}
    for row in rows:
        (ids,) = trainer.tokenize([row["prompt"]])
        written = trainer.model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :]
        likeliest[row["prompt"]] = cut_after_end(written.tolist(), trainer.eos_token_ids)
    for temperature, same in ((0.0, True), (1e-4, True), (None, False)):  # next to 0 the likeliest token is drawn
        trainer.args.eval_temperature, trainer.seen = temperature, []
        trainer.evaluate()
        trainer.predict(rows)
        assert [[batch[prompt] == likeliest[prompt] for prompt in likeliest] for batch in trainer.seen] == [
            [same] * 4
        ] * 2
    trainer.args.eval_temperature, trainer.seen = 0.0, []
    trainer.train()
    assert len(trainer.seen) == 3
    for batch in trainer.seen:
        assert all(ids != likeliest.get(prompt) for prompt, ids in batch.items()), "a training samples as it did"


@pytest.mark.refusal
@pytest.mark.parametrize(("name", "value"), [("suppress_tokens", [7]), ("min_p", 0.1), ("typical_p", 0.9)])
def test_a_policy_gradient_is_refused_with_altered_sampling(make_trainer, name, value):
    sampled = {"divergence": "sampled_reverse_kl", "rollout": HFRollout(), "temperature": 0.8}
    student = tiny.qwen2()
    setattr(student.generation_config, name, value)
    with pytest.raises(ValueError, match=rf"^`model\.generation_config\.{name} = .*` with 'sampled_reverse_kl'"):
        make_trainer(model=student, **sampled)
    unaltered = {"eos_token_id": [2, 3], "max_time": 60.0, "temperature": 0.8, "do_sample": True}
    later = make_trainer(generation_kwargs=unaltered, **sampled)
    later.complete([[5]])
    setattr(later.generation_config, name, value)
    with pytest.raises(ValueError, match=rf"^`trainer\.generation_config\.{name} = .*` with 'sampled_reverse_kl'"):
        later.complete([[5]])


@pytest.mark.refusal
@pytest.mark.parametrize(
    ("name", "value"),
    [("stop_strings", ["x"]), ("prompt_lookup_num_tokens", 2), ("assistant_early_exit", 1), ("token_healing", True)],
)
def test_unsupported_options_are_refused_in_every_config(make_trainer, name, value):
    student = tiny.qwen2()
    setattr(student.generation_config, name, value)
    with pytest.raises(
        ValueError, match=rf"^`model\.generation_config\.{name}` of the student is .*: it .*; set it to"
    ):
        make_trainer(model=student, rollout=HFRollout())
    with pytest.raises(ValueError, match=rf"`generation_kwargs=\{{'{name}': .*: it "):
        make_trainer(generation_kwargs={name: value})
    make_trainer(model=student)  # another engine does not read it
