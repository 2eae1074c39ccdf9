"""Models as TRL's own tests make them: thousands of times more token ids than hidden units."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import tiny
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of two checkpoints in bfloat16: `tiny`, whose head is Xavier uniform, so that its logits are spread by
    about 0.01, and `wider`, by the defaults of `transformers`.
    """
    made: dict[str, str] = {}
    shape = {"vocab_size": 151_669, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    ends = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0, "intermediate_size": 32}
    configs = {
        "tiny": Qwen2Config(hidden_size=8, **shape, **ends),
        "wider": Qwen3Config(hidden_size=16, head_dim=4, **shape, **ends),
    }
    for name, config in configs.items():
        torch.manual_seed(len(made))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        if name == "tiny":
            for layer in model.modules():
                if isinstance(layer, nn.Linear):
                    nn.init.xavier_uniform_(layer.weight)
        made[name] = str(tmp_path_factory.mktemp("hub") / name)
        model.save_pretrained(made[name])
        tiny.tokenizer().save_pretrained(Path(made[name]))
    return made
