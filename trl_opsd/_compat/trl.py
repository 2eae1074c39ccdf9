"""The names that this package imports from TRL; no other file imports it."""

from trl import (
    DatasetMixtureConfig,
    DistillationConfig,
    DistillationTrainer,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    chat_template_utils,
    get_dataset,
    get_peft_config,
    get_quantization_config,
)
from trl.chat_template_utils import parse_response
from trl.data_utils import apply_chat_template
from trl.generation.vllm_client import VLLMClient
from trl.import_utils import is_vllm_available
from trl.models.utils import unwrap_model_for_generation
from trl.trainer import distillation_trainer
from trl.trainer.utils import (
    create_model_from_path,
    get_callable_name,
    get_config_model_id,
    is_async_callable,
    maybe_gather_lm_head_ctx,
    nanstd,
    pad,
    repeat_iterable_dataset,
    start_event_loop_in_daemon,
)
