"""Writes the rows that a published recipe trains on, from its public dataset.

    python examples/published/prepare.py opsd out/opsd.jsonl
    python examples/published/prepare.py mopd out/mopd.jsonl

`opsd`: `prompt`, and the worked solution as `privileged_context`. `mopd`: `prompt`, and the domain as `teacher`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trl import DatasetMixtureConfig, ScriptArguments

from trl_opsd.cli.train import loaded

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
"""After each problem, in training as in the evaluation."""
HINT = "A correct solution, which only you can see:\n\n{}\n\nReason step by step to the same answer in your own words."
SOURCES = {
    "opsd": "siyanzhao/Openthoughts_math_30k_opsd",
    "mopd": "hf://datasets/BytedTsinghua-SIA/Open-MOPD-Data/rl_prompt_mix/train.parquet",
}


def asked(problem: str) -> list[dict[str, str]]:
    """The messages that ask for the answer to a problem."""
    return [{"role": "user", "content": f"{problem}\n\n{BOXED}"}]


def opsd(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"prompt": asked(row["problem"]), "privileged_context": HINT.format(row["solution"])}


def mopd(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"prompt": row["prompt"], "teacher": row.get("domain") or row["extra_info"]["domain"]}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=SOURCES)
    parser.add_argument("output", type=Path, help="a .jsonl file")
    parser.add_argument("--dataset", help="a name on the Hub or a file, in place of the published one")
    given = parser.parse_args(arguments)
    script = ScriptArguments(dataset_name=given.dataset or SOURCES[given.recipe])
    rows = loaded(script, DatasetMixtureConfig())["train"]
    rows = rows.map({"opsd": opsd, "mopd": mopd}[given.recipe], remove_columns=rows.column_names)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    rows.to_json(given.output)
    print(f"{len(rows)} rows in {given.output}")


if __name__ == "__main__":
    main()
