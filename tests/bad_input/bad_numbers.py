"""Numbers of the training loop that mean nothing, numbers given as text, and JSON that is malformed."""

from __future__ import annotations

import re

from cases import Case, option

NAN = float("nan")

RATES = [
    option("learning_rate", "`learning_rate=-1e-05`: expected a finite number of at least 0", learning_rate=-1e-5),
    option("learning_rate", "`learning_rate=nan`", learning_rate=NAN),
    option("learning_rate", "`learning_rate='fast'`: expected a number", learning_rate="fast"),
    option("learning_rate", "`learning_rate=None`", learning_rate=None),
    option("learning_rate", r"`learning_rate=\(1e-05,\)`: expected a number", learning_rate=(1e-5,)),
    option("learning_rate", "`learning_rate=True`: expected a number", learning_rate=True),
    option("weight_decay", "`weight_decay=-0.1`", weight_decay=-0.1),
    option("weight_decay", r"`adam_beta1=1.5`: expected a number in \[0, 1\]", adam_beta1=1.5),
    option("weight_decay", "`max_grad_norm=-1`", max_grad_norm=-1),
]

STEPS = [
    option("batch size", "`per_device_train_batch_size=0`: expected an integer of", per_device_train_batch_size=0),
    option("batch size", "`per_device_train_batch_size=2.5`: expected an integer", per_device_train_batch_size=2.5),
    option("batch size", "`per_device_train_batch_size=True`", per_device_train_batch_size=True),
    option("batch size", "`per_device_eval_batch_size=0`", per_device_eval_batch_size=0),
    option("batch size", "`gradient_accumulation_steps=0`", gradient_accumulation_steps=0),
    option("batch size", "`eval_accumulation_steps=0`", eval_accumulation_steps=0),
    option("steps", "`max_steps=-7`: expected the number of optimizer steps, or -1", max_steps=-7),
    option("steps", "`max_steps=2.5`: expected an integer", max_steps=2.5),
    option("steps", "`num_train_epochs=-1`", num_train_epochs=-1),
    option("steps", "`num_train_epochs=nan`", num_train_epochs=NAN),
    option("steps", "`warmup_steps=-1`", warmup_steps=-1),
    option("steps", "`warmup_steps=nan`", warmup_steps=NAN),
    option("steps", "`logging_steps=-3`", logging_steps=-3),
    option("steps", "`logging_steps=0`: expected a finite number above 0", logging_steps=0),
    option("steps", "`save_steps=0`: expected a finite number above 0", save_steps=0, save_strategy="steps"),
    option("steps", "--save_steps must be an integer", save_steps=2.5, save_strategy="steps"),
    option("steps", "`eval_steps=-1`", eval_steps=-1, eval_strategy="steps"),
    option("steps", "`save_total_limit=-1`", save_total_limit=-1),
    option("steps", "`dataloader_num_workers=-1`", dataloader_num_workers=-1),
    option("seed", "`seed=-1`: expected an integer from 0 to 4294967295", seed=-1),
    option("seed", "`seed=4294967296`", seed=2**32),
    option("seed", "`seed=None`", seed=None),
]

GENERATIONS = [
    option("generations", r"`lmbda=1.5`: expected a number in \[0, 1\]", lmbda=1.5),
    option("generations", r"`lmbda=0.5` with `overlap='step'` is not supported", lmbda=0.5, overlap="step"),
    option("generations", "`num_generations=0`: expected an integer of at least 1", num_generations=0),
    option("generations", "`num_generations_eval=-1`: expected an integer", num_generations_eval=-1),
    option(
        "generations",
        "`num_generations=4`: a generation batch has 6 = 3 per device x 1 processes x 2 .* whole groups",
        num_generations=4,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
    ),
    option(
        "generations",
        "`num_generations=2` with .*: decoding is greedy, so all completions of a prompt would be identical",
        num_generations=2,
        generation_kwargs={"do_sample": False},
    ),
    option(
        "generations",
        "`num_generations_eval=2` with .*: each row is sampled with this seed",
        num_generations_eval=2,
        use_vllm=True,
        generation_kwargs={"seed": 3},
    ),
]

VLLM = [
    option("at least", r"`vllm_server_port=0`: expected a number in \[1, 65535\]", vllm_server_port=0),
    option("at least", "`vllm_server_timeout=-1.0`", vllm_server_timeout=-1.0),
    option("at least", "`vllm_tensor_parallel_size=0`", vllm_tensor_parallel_size=0),
]

TEXTS = [
    option("a word for a boolean", "`use_vllm='maybe'`: expected True or False", use_vllm="maybe"),
    option("a word for a number", "`temperature='hot'`: expected a number", temperature="hot"),
    option("a word for a number", "`max_steps='all'`: expected an integer", max_steps="all"),
    *(
        option("malformed JSON", rf"`{name}={re.escape(repr(text))}` is not JSON .* into double quotes", **{name: text})
        for name, text in [
            ("model_init_kwargs", "{bad"),
            ("teacher_model_init_kwargs", "{'dtype': 'float32'}"),
            ("generation_kwargs", '{"a": 1,}'),
            ("lr_scheduler_kwargs", "{bad"),
            ("accelerator_config", "{bad"),
        ]
    ),
    option(
        "malformed JSON", r"`teacher_model_init_kwargs='\[1\]'`: expected a dict of", teacher_model_init_kwargs="[1]"
    ),
]

CASES: list[Case] = [*RATES, *STEPS, *GENERATIONS, *VLLM, *TEXTS]
