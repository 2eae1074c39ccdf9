"""Drops the decoder layers of a causal language model that change its own hidden states least.

    python examples/prune.py MODEL OUTPUT --texts rows.jsonl --drop 5            # single layers
    python examples/prune.py MODEL OUTPUT --texts rows.jsonl --drop 5 --block    # five that follow each other
    python examples/prune.py MODEL OUTPUT --texts rows.jsonl --layers 24 25 26   # these, as a control

How much layers change the states is 1 - cos of the states before and after them, a mean over the tokens of the texts:
for a layer the "Block Influence" of ShortGPT (arXiv 2403.03853), for a block the cosine of the angle in arXiv
2403.17887. OUTPUT is what `AutoModelForCausalLM.from_pretrained` loads: the student of `recipes/pruned.yaml`, with
MODEL as its teacher. No family is known here: layers are found by their number, lists of the config with a value for
each are cut, and what is saved is loaded again and compared with MODEL, in which the same layers are skipped.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

TOKENS = 512
"""Most tokens of a text."""
CLOSE = 1e-3
"""Of the largest logit: how far apart the saved model and the other may be, which do the same in the same order."""


def load(model: str) -> PreTrainedModel:
    """The model, in the dtype of its checkpoint."""
    if getattr(AutoConfig.from_pretrained(model), "quantization_config", None) is not None:
        raise ValueError(f"{model} is quantised, expected whole weights: prune the original, and quantise that.")
    return AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()


def layers_of(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The name and the decoder layers: the one list of `num_hidden_layers` modules that is in no other."""
    count, found = model.config.get_text_config(decoder=True).num_hidden_layers, dict[str, nn.ModuleList]()
    for name, module in model.named_modules():
        is_within = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.ModuleList) and len(module) == count and not is_within:
            found[name] = module
    if len(found) != 1:
        raise ValueError(
            f"{type(model).__name__}: lists of `num_hidden_layers`={count} modules are {[*found]}, expected one, the "
            "decoder layers. Choose another model, or cut this one by hand."
        )
    return next(iter(found.items()))


@contextmanager
def hooked(layers: nn.ModuleList, skipped: Collection[int], states: list[Tensor] | None = None) -> Iterator[None]:
    """Has `skipped` return what they are given; `states` gets the states before each layer, and after the last."""

    def hook(layer: nn.Module, args: tuple[Any, ...], named: dict[str, Any], out: Any) -> Any:
        before, after = args[0] if args else named["hidden_states"], out[0] if isinstance(out, tuple) else out
        if states is not None:
            states.extend([before, after] if layer is layers[-1] else [before])
        if layer not in without:
            return out
        return (before, *out[1:]) if isinstance(out, tuple) else before

    without = {layers[number] for number in skipped}
    handles = [layer.register_forward_hook(hook, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def changes(model: PreTrainedModel, texts: Sequence[Tensor], size: int = 1) -> list[float]:
    """1 - cos of the states before and after each block of `size` layers, by its first: a mean over all tokens."""
    layers = layers_of(model)[1]
    total = torch.zeros(len(layers) - size + 1, dtype=torch.float64)
    for ids in texts:
        states: list[Tensor] = []
        with hooked(layers, (), states):
            model(ids[None].to(model.device), use_cache=False)
        for first, (before, after) in enumerate(zip(states[:-size], states[size:], strict=True)):
            total[first] += (1 - torch.cosine_similarity(before.double(), after.double(), dim=-1)).sum().cpu()
    return (total / sum(map(len, texts))).tolist()


def chosen(model: PreTrainedModel, texts: Sequence[Tensor], drop: int, block: bool = False) -> list[int]:
    """So many layers that change the states least: each by itself, or all as one block."""
    count = len(layers_of(model)[1])
    if not 0 < drop < count:
        raise ValueError(f"`drop` is {drop}, expected 1 to {count - 1}: of {count} layers one has to stay.")
    found = changes(model, texts, drop if block else 1)
    least = sorted(range(len(found)), key=found.__getitem__)
    return [*range(least[0], least[0] + drop)] if block else sorted(least[:drop])


@torch.no_grad()
def answers(model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, list[int]]:
    """Logits after each token, and the text with a greedy completion, generated with a cache."""
    batch = ids[None].to(model.device)
    whole = model.generate(batch, attention_mask=torch.ones_like(batch), max_new_tokens=16, do_sample=False)
    return model(batch, use_cache=False).logits.float(), whole[0].tolist()


def prune(model: PreTrainedModel, dropped: Collection[int], output: Path, ids: Tensor) -> PreTrainedModel:
    """Saves the model without these layers, and returns what is loaded from there; the one that is passed is changed.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Any causal language model that is not quantised.
        dropped (`Collection[int]`), output (`Path`):
            Layers, the first is 0, and a new folder, which is there only if the saved model has been compared.
        ids (`Tensor`):
            The text to compare on, [tokens]; longer than a sliding window, if there is one.

    Raises:
        ValueError: for layers that do not exist, if none would be left, for a folder that exists, and if the saved
            model differs: something else than a list in its config depends on the number of a layer.
    """
    (name, layers), config = layers_of(model), model.config.get_text_config(decoder=True)
    kept = [number for number in range(len(layers)) if number not in dropped]
    if not dropped or not kept or not set(dropped) <= set(range(len(layers))):
        raise ValueError(f"Layers {sorted(dropped)} to drop, expected some of 0 to {len(layers) - 1}; one has to stay.")
    if output.exists():
        raise ValueError(f"{output} exists, expected a new folder.")
    model.eval()
    with hooked(layers, dropped):
        expected, continued = answers(model, ids)
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, nn.ModuleList(layers[number] for number in kept))
    lists = {key: of for key, of in vars(config).items() if isinstance(of, list | tuple) and len(of) == len(layers)}
    config.num_hidden_layers = len(kept)
    for key in lists.keys() - {"eos_token_id"}:
        setattr(config, key, [lists[key][number] for number in kept])
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        saved = Path(folder, "model")
        model.save_pretrained(saved)
        pruned = AutoModelForCausalLM.from_pretrained(saved, dtype=model.dtype).to(model.device).eval()
        found, written = answers(pruned, ids)
        gap, limit = (found - expected).abs().max().item(), CLOSE * expected.abs().max().item()
        if written != continued or not gap <= limit:
            raise ValueError(
                f"{type(model).__name__} without layers {sorted(dropped)} has logits up to {gap:.2g} away from what "
                f"skipping them gives, expected at most {limit:.2g}: its layers depend on their number. Drop other "
                "`--layers`: a whole period of its pattern, or the last ones."
            )
        saved.rename(output)
    return pruned


def tokens_of(rows: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase) -> list[Tensor]:
    """Token ids of `text`, or of `prompt` with the `completion` that a row may have: text, or messages."""
    found = []
    for row in rows:
        whole = row["text"] if "text" in row else row["prompt"] + row.get("completion", type(row["prompt"])())
        ids = tokenizer(whole) if isinstance(whole, str) else tokenizer.apply_chat_template(whole, return_dict=True)
        found.append(torch.tensor(ids["input_ids"][:TOKENS]))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, or a name on the Hub")
    parser.add_argument("output", type=Path, help="a new folder")
    parser.add_argument("--texts", type=Path, required=True, help="JSON lines: `text`, or `prompt` and `completion`")
    parser.add_argument("--drop", type=int, default=1, help="how many layers")
    parser.add_argument("--block", action="store_true", help="layers that follow each other")
    parser.add_argument("--layers", type=int, nargs="+", help="in place of `--drop`: these, the first is 0")
    asked = parser.parse_args(arguments)
    model, tokenizer = load(asked.model), AutoTokenizer.from_pretrained(asked.model)
    texts = tokens_of([json.loads(line) for line in asked.texts.read_text().splitlines()], tokenizer)
    if not texts:
        raise ValueError(f"{asked.texts} is empty, expected a row in each line: some dozens will do.")
    dropped, before = asked.layers or chosen(model, texts, asked.drop, asked.block), model.num_parameters()
    pruned = prune(model, dropped, asked.output, max(texts, key=len))
    tokenizer.save_pretrained(asked.output)
    print(f"without layers {dropped}: {before:,} parameters, {pruned.num_parameters():,} are left, in {asked.output}")


if __name__ == "__main__":
    main()
