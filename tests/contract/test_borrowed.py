"""Names that our source borrows from TRL and its neighbours are in one table, and those libraries use them as we do."""

from __future__ import annotations

import sys

import pytest
from borrowed import OWNERS, READING
from breaches import INSTALLED, breach, unlisted, unused
from ours import ANYWHERE, CONTINUED, LISTED, OVERRIDDEN, READ, WRITTEN
from theirs import Sources
from trl import DistillationTrainer

import trl_opsd
import trl_opsd.trainer


def test_borrowed_names_are_defined_and_read_by_their_libraries():
    found = [said for owner in INSTALLED for name in owner.names if (said := breach(owner, name))]
    assert not found, "\n".join(found)


def test_every_borrowed_name_in_our_source_is_in_the_table():
    assert list(unlisted()) == []


def test_every_name_in_the_table_is_used_by_our_source():
    assert list(unused()) == []


def test_every_kind_of_borrowed_name_has_an_owner():
    ways = (READING.extended, READING.held, READING.dicts, READING.listed)
    assert {kind for way in ways for kind in way.values()} == {owner.kind for owner in OWNERS} - {ANYWHERE}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("trainer", "_forward_redirection"),
        ("trainer", "_init_training_state"),
        ("row", "image"),
        ("metrics", "train"),
        ("module", "get_peft_model"),
        ("config", "_VALID_DICT_FIELDS"),
        ("client", "get_world_size"),
    ],
)
def test_a_renamed_name_is_reported_with_what_depends_on_it(kind, name):
    owner = next(one for one in OWNERS if one.kind == kind)
    said = breach(owner, name, Sources(renamed=("trl", name)))
    assert said.startswith(f"`{name}` of {owner.title}")
    assert "in trl_opsd/" in said


@pytest.mark.parametrize(
    ("body", "kind", "name", "role"),
    [
        ("self._held", "trainer", "_held", READ),
        ("self._held = None", "trainer", "_held", WRITTEN),
        ("self.model, self._held = 1, 2", "trainer", "_held", WRITTEN),
        ("self._held += 1", "trainer", "_held", WRITTEN),
        ("del self._held", "trainer", "_held", WRITTEN),
        ("set_known(self, _held=None)", "trainer", "_held", WRITTEN),
        ("self._held['train']['a'].append(1)", "trainer", "_held", WRITTEN),
        ("getattr(self, '_held', None)", "trainer", "_held", READ),
        ("setattr(self, '_held', None)", "trainer", "_held", WRITTEN),
        ("super()._held()", "trainer", "_held", CONTINUED),
        ("trainer.is_in_train = False", "trainer", "is_in_train", WRITTEN),
        ("self._dist.is_fsdp", "backend", "is_fsdp", READ),
        ("self.host.generator.manual_seed(0)", "trainer", "generator", WRITTEN),
        ("distillation_trainer.pad = None", "module", "pad", WRITTEN),
        ("logs['a']", "logs", "a", READ),
        ("logs.get('a')", "logs", "a", READ),
        ("'a' in logs", "logs", "a", READ),
        ("logs['a'] = 0", "logs", "a", WRITTEN),
        ("COLUMNS = ('a',)", "row", "a", LISTED),
        ("trainer.optimizer._held = 0", ANYWHERE, "_held", WRITTEN),
        ("from torch import _held", ANYWHERE, "_held", READ),
    ],
)
def test_every_form_of_using_a_name_is_recognised(tmp_path, body, kind, name, role):
    source = f"class A(Trainer): ...\nclass B(A):\n    def run(self, trainer: A | None):\n        {body}\n"
    (tmp_path / "one.py").write_text(source, encoding="utf-8")
    assert (kind, name, role, "one.py:4") in [
        (use.kind, use.name, use.role, use.place) for use in READING.uses(tmp_path)
    ]


def test_mixin_classes_are_read_too(tmp_path):
    source = "class Mixed:\n    def run(self): self._held\nclass A(Mixed, Trainer): ...\n"
    (tmp_path / "one.py").write_text(source, encoding="utf-8")
    assert [(use.kind, use.name) for use in READING.uses(tmp_path)] == [("trainer", "run"), ("trainer", "_held")]


@pytest.mark.parametrize("body", ["_held = 1", "_held: int = 1", "def _held(self): ..."])
def test_every_form_of_overriding_a_name_is_recognised(tmp_path, body):
    (tmp_path / "one.py").write_text(f"class A(VLLMClient):\n    {body}\n", encoding="utf-8")
    assert [(use.kind, use.name, use.role) for use in READING.uses(tmp_path)] == [("client", "_held", OVERRIDDEN)]


def test_import_error_names_a_class_attribute_missing_from_trl(monkeypatch):
    for one in (DistillationTrainer, DistillationTrainer.__base__):
        monkeypatch.delattr(one, "_tag_names")
    for room in ("loop", "trainer"):
        monkeypatch.setattr(trl_opsd, room, getattr(trl_opsd, room))  # set again afterwards
        for module in [name for name in sys.modules if name.startswith(f"trl_opsd.{room}")]:
            monkeypatch.delitem(sys.modules, module)
    with pytest.raises(ImportError, match=r"^OPSDTrainer cannot be loaded from trl_opsd\.trainer.*'_tag_names'"):
        _ = trl_opsd.OPSDTrainer
