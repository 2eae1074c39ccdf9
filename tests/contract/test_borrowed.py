"""Names that our source borrows from TRL and its neighbours are in one table, and stand in those libraries' source."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from borrowed import BORROWED, ENTRIES, NOT_BORROWED, OVERRIDDEN
from trl import DistillationTrainer
from trl.generation.vllm_client import VLLMClient

import trl_opsd
from trl_opsd.loop.hooks import TrainerHooks
from trl_opsd.loop.members import TrainerMembers
from trl_opsd.loop.upstream_fixes import UpstreamFixes

_Sender = pytest.importorskip("trl_opsd.rollout.vllm_server", exc_type=ImportError)._Sender
pytestmark = pytest.mark.quick
CLASSES = (TrainerHooks, TrainerMembers, UpstreamFixes)
"""Those that override methods of TRL's trainer."""
DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
OURS = [ast.parse(file.read_text(encoding="utf-8")) for file in Path(trl_opsd.__file__).parent.rglob("*.py")]


def parameters(function):
    """Names, but for those of `*args` and `**kwargs`."""
    of = inspect.signature(function).parameters.values()
    return tuple(one.name if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY) else one.kind for one in of)


def test_every_override_is_in_the_table_and_still_overrides():
    names = {name for cls in CLASSES for name in vars(cls) if not name.startswith("__")}
    assert {name for name in names if hasattr(DistillationTrainer, name)} == OVERRIDDEN
    classes = [one for one in DistillationTrainer.__mro__ if one.__module__.startswith(("trl", "transformers"))]
    source = "".join(map(inspect.getsource, classes))
    uncalled = [name for name in OVERRIDDEN if not re.search(rf"(self|cls)\.{name}\b", source)]
    assert {*uncalled} <= ENTRIES, "ours would go unnoticed"


def test_overrides_have_the_parameters_of_their_originals():
    pairs = [(cls, DistillationTrainer) for cls in CLASSES] + [(_Sender, VLLMClient)]
    overridden = {
        f"{cls.__name__}.{name}": (parameters(ours), parameters(original))
        for cls, theirs in pairs
        for name, ours in vars(cls).items()
        if inspect.isfunction(ours) and not name.startswith("__")
        if (original := getattr(theirs, name, None)) is not None and "args" not in inspect.signature(ours).parameters
    }
    assert len(overridden) > 25
    assert {name: both for name, both in overridden.items() if both[0] != both[1]} == {}


@pytest.mark.parametrize("file", BORROWED)
def test_borrowed_names_stand_in_their_library(file):
    package, _, rest = file.partition("/")
    if (found := importlib.util.find_spec(package)) is None or not found.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    text = Path(found.submodule_search_locations[0], rest).read_text(encoding="utf-8")
    assert [name for name in BORROWED[file].split() if not re.search(rf"\b{name}\b", text)] == []


def private(nodes: Iterator[str]) -> set[str]:
    return {name for name in nodes if re.match(r"_(?!_)\w", name)}


def test_every_private_name_of_others_in_our_source_is_in_the_table():
    nodes = [node for tree in OURS for node in ast.walk(tree)]
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    read = private(node.attr for node in attributes if isinstance(node.ctx, ast.Load))
    own = private(node.name for node in nodes if isinstance(node, DEFINED))
    own |= private(node.attr for node in attributes if isinstance(node.ctx, ast.Store))
    own |= private(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    listed = OVERRIDDEN | NOT_BORROWED | {name for names in BORROWED.values() for name in names.split()}
    assert read - own - listed == set()
    everything = {word for tree in OURS for word in re.findall(r"\w+", ast.unparse(tree))}
    assert listed - everything == set(), "not used any more"
