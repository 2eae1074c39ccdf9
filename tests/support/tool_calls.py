"""A rollout that calls a tool, and a tokenizer whose template has tools."""

from __future__ import annotations

from support import tiny
from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import qwen3_chat_template

from trl_opsd import RolloutBackend

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call><|im_end|>'


def words() -> PreTrainedTokenizerFast:
    made = tiny.tokenizer()
    made.chat_template = qwen3_chat_template
    return made


class CallsOnce(RolloutBackend):
    """Calls the tool, then answers; a prompt that holds a tool's answer is the second turn."""

    def bind(self, trainer):
        self.tokenizer = trainer.processing_class

    def complete(self, prompt_ids, step):
        turns = ["four<|im_end|>" if "<tool_response>" in self.tokenizer.decode(ids) else CALL for ids in prompt_ids]
        return self.tokenizer(turns)["input_ids"]
