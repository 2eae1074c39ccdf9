"""The names that this package imports from TRL; no other file imports it."""

from trl import DistillationConfig, DistillationTrainer
from trl.generation.vllm_client import VLLMClient
from trl.models.utils import unwrap_model_for_generation
from trl.trainer import distillation_trainer
from trl.trainer.utils import (
    create_model_from_path,
    get_config_model_id,
    maybe_gather_lm_head_ctx,
    pad,
    repeat_iterable_dataset,
)

__all__ = [
    "DistillationConfig",
    "DistillationTrainer",
    "VLLMClient",
    "create_model_from_path",
    "distillation_trainer",
    "get_config_model_id",
    "maybe_gather_lm_head_ctx",
    "pad",
    "repeat_iterable_dataset",
    "unwrap_model_for_generation",
]
