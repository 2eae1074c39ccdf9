"""Trains an agent that calls tools, with a teacher that reads what the agent has to find out.

    python examples/train_agent.py --output_dir out/agent                              # doors, small models
    python examples/train_agent.py --world sql --config examples/cases/agents.yaml     # databases, a chat model

It takes the options of `trl-opsd train`, and prints which share of held-out rows is solved before and after. For tasks
of your own pass your class as `environment_factory`, as below: docs/agents.md says which methods it has.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

import doors.world
import house.world
import sql.world
from trl import get_peft_config

from trl_opsd import OPSDTrainer
from trl_opsd.cli.options import OptionParser
from trl_opsd.cli.train import end, read

WORLDS = {
    "doors": (doors.world.Doors, doors.world),
    "house": (house.world.House, house.world),
    "sql": (sql.world.Database, sql.world),
}
"""The environment of each, and the module with its rows."""

OF_DOORS = {
    "model_name_or_path": str(doors.DOORS / "student"),  # has seen walks in which no door is closed
    "teacher_model_name_or_path": str(doors.DOORS / "teacher"),  # goes on from closed doors, and is told the right ones
    "divergence": "jsd",
    "max_completion_length": doors.world.MOST_TOKENS,
    "max_tool_calling_iterations": doors.world.MOST_CALLS,
    "max_steps": 300,
    "per_device_train_batch_size": 32,
    "learning_rate": 2e-3,  # for a model this small
    "lr_scheduler_type": "warmup_stable_decay",  # learns late: a rate that falls from the first step ends before
    "lr_scheduler_kwargs": {"num_decay_steps": 100},
    "warmup_steps": 10,
    "adam_beta2": 0.98,
    "logging_steps": 20,
    "eval_strategy": "steps",
    "eval_steps": 60,
    "eval_on_start": True,
    "per_device_eval_batch_size": 200,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "report_to": "none",
    "output_dir": "out/agent",
}
"""Options before any others."""


def main(arguments: Sequence[str], **more: Any) -> OPSDTrainer:
    own = ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--world", choices=WORLDS, default="doors")
    own.add_argument("--held_out", type=int, default=200)
    asked, rest = own.parse_known_args(arguments)
    parser = OptionParser()
    if asked.world == "doors":
        parser.set_defaults_with_config(**OF_DOORS)
    given, _ = read(rest, parser)
    environment, world = WORLDS[asked.world]
    trainer = OPSDTrainer(
        model=given.model.model_name_or_path,
        args=given.config,
        train_dataset=world.rows(7500),
        eval_dataset=world.rows(asked.held_out, held_out=True),
        environment_factory=environment,
        peft_config=get_peft_config(given.model),
        **more,
    )
    trainer.train(resume_from_checkpoint=given.config.resume_from_checkpoint)
    trainer.save_model()
    solved = f"eval_rewards/{environment.__name__}/mean"
    shares = [log[solved] for log in trainer.state.log_history if solved in log]
    trainer.accelerator.print(
        f"held-out rows solved: {shares[0]:.3f} before, {shares[-1]:.3f} after; the student: {given.config.output_dir}"
    )
    return trainer


if __name__ == "__main__":
    end(main(sys.argv[1:]))
