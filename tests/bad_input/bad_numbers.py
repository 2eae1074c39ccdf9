"""Numbers that mean nothing; `test_config.py` has the bounds of each option."""

from __future__ import annotations

from cases import Case, option

CASES: list[Case] = [
    option("learning_rate", "`learning_rate='fast'`: expected a valid number", learning_rate="fast"),
    option("learning_rate", "`learning_rate=None`", learning_rate=None),
    option("learning_rate", r"`learning_rate=\(1e-05,\)`: expected a valid number", learning_rate=(1e-5,)),
    option("weight_decay", "`weight_decay=-0.1`", weight_decay=-0.1),
    option("batch size", "`per_device_train_batch_size=2.5`: expected a valid", per_device_train_batch_size=2.5),
    option("steps", "--save_steps must be an integer", save_steps=2.5, save_strategy="steps"),
    option("seed", "`seed=4294967296`", seed=2**32),
    option("generations", "`lmbda=0.5` with `overlap='step'`", lmbda=0.5, overlap="step"),
    option(
        "generations",
        "`num_generations=4` with 3 per device x 1 processes x 2 .* = 6 rows",
        num_generations=4,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
    ),
    option("generations", "the teacher would complete no row", seq_kd=True),
    option("generations", "needs its whole weights", seq_kd=True, lmbda=0, teacher_offload="stream"),
    option("generations", "needs its whole weights", seq_kd=True, lmbda=0, teacher_server_url="http://127.0.0.1:1"),
    option("at least", "steps in each backward", optim="lomo", max_tokens_per_microbatch=9),
    option("at least", "sleeps while", use_vllm=True, vllm_mode="colocate", overlap="ahead"),
    option("a word for a boolean", "`use_vllm='maybe'`: expected a valid boolean", use_vllm="maybe"),
    option("a word for a number", "`max_steps='all'`: expected a valid integer", max_steps="all"),
]
