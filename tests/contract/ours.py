"""Finds the names of other libraries' objects in our source, by its syntax."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import trl_opsd

PACKAGE = Path(trl_opsd.__file__).resolve().parent
"""Where it is imported from, which may be an installed wheel."""

READ, WRITTEN, OVERRIDDEN, CONTINUED, LISTED = "read", "written", "overridden", "continued", "listed"
"""How a name is used.

`WRITTEN` is assigned, or changed in place; `CONTINUED` is called through `super()`; `LISTED` stands in a constant.
"""

ANYWHERE = "anywhere"
"""The kind of an object of unknown origin: its private names are taken to be another library's."""

_PRIVATE = re.compile(r"_(?!_)\w")
_CHANGERS = ("add", "append", "clear", "extend", "manual_seed", "pop", "remove", "update")
"""Methods that change an object in place, which counts as writing it."""


@dataclass(frozen=True)
class Use:
    """A name in our source."""

    kind: str
    """The kind of object it belongs to: a value of one of the tables in `Reading`, or `ANYWHERE`."""
    name: str
    role: str
    place: str
    """`file:line`."""


@dataclass(frozen=True)
class Reading:
    """How to read the source: the kind of object behind a name.

    Args:
        extended (`Mapping[str, str]`):
            Classes of other libraries and protocols of ours, by name; subclasses of ours are of that kind too.
        held (`Mapping[str, str]`):
            Variables, attributes and modules.
        dicts (`Mapping[str, str]`):
            Variables and attributes that hold a dict.
        listed (`Mapping[str, str]`):
            Constants that list names.
    """

    extended: Mapping[str, str]
    held: Mapping[str, str]
    dicts: Mapping[str, str]
    listed: Mapping[str, str]

    def uses(self, package: Path = PACKAGE) -> list[Use]:
        """All names that are used in a package, in the order of its files."""
        files = sorted(package.rglob("*.py"))
        trees = {str(file.relative_to(package)): ast.parse(file.read_text(encoding="utf-8")) for file in files}
        kinds = self._kinds([node for tree in trees.values() for node in ast.walk(tree)])
        return [use for file, tree in trees.items() for use in _Walk(self, kinds, file).over(tree)]

    def _kinds(self, nodes: list[ast.AST]) -> dict[str, str]:
        """The kind of each of our classes, from the classes it extends, directly or not, and those that mix it in."""
        bases = {node.name: [_last(base) for base in node.bases] for node in nodes if isinstance(node, ast.ClassDef)}
        kinds, before = dict(self.extended), 0
        while len(kinds) > before:
            before = len(kinds)
            for name, above in bases.items():
                kinds.update((name, kinds[base]) for base in above if base in kinds)
                if name in kinds:
                    kinds.update((base, kinds[name]) for base in above if base in bases)
        return kinds


class _Walk(ast.NodeVisitor):
    def __init__(self, reading: Reading, kinds: Mapping[str, str], file: str) -> None:
        self.reading, self.kinds, self.file = reading, kinds, file
        self.kind_of_self: str | None = None
        self.arguments: dict[str, str] = {}
        self.found: list[Use] = []

    def over(self, tree: ast.Module) -> list[Use]:
        self.visit(tree)
        return self.found

    def use(self, kind: str, name: str, role: str, node: ast.AST) -> None:
        if not (name.startswith("__") and name.endswith("__")):
            self.found.append(Use(kind, name, role, f"{self.file}:{node.lineno}"))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before, self.kind_of_self = self.kind_of_self, self.kinds.get(node.name)
        if self.kind_of_self is not None:
            self._body(node, self.kind_of_self)
        self.generic_visit(node)
        self.kind_of_self = before

    def _body(self, node: ast.ClassDef, kind: str) -> None:
        is_protocol = node.name in self.reading.extended  # it declares what we read
        for one in node.body:
            match one:
                case ast.FunctionDef(name=name):
                    self.use(kind, name, READ if is_protocol else OVERRIDDEN, one)
                case (
                    ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr())
                ):
                    self.use(kind, name, OVERRIDDEN, one)
                case ast.AnnAssign(target=ast.Name(id=name)) if is_protocol:
                    self.use(kind, name, READ, one)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        before, self.arguments = self.arguments, dict(self.arguments)
        for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            for name in ast.walk(one.annotation) if one.annotation else ():
                if isinstance(name, ast.Name) and name.id in self.kinds:
                    self.arguments[one.arg] = self.kinds[name.id]
        self.generic_visit(node)
        self.arguments = before

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._attribute(node.value, node.attr, READ if isinstance(node.ctx, ast.Load) else WRITTEN, node)
        self.generic_visit(node)

    def _attribute(self, of: ast.expr, name: str, role: str, node: ast.AST) -> None:
        match of:
            case ast.Name(id="self" | "cls"):
                if self.kind_of_self is not None:
                    self.use(self.kind_of_self, name, role, node)
                return
            case ast.Call(func=ast.Name(id="super")):
                if self.kind_of_self is not None:
                    self.use(self.kind_of_self, name, CONTINUED, node)
                    return
            case ast.Name(id=variable) if variable in self.arguments:
                self.use(self.arguments[variable], name, role, node)
                return
        kind = self.reading.held.get(_last(of)) or self.reading.extended.get(_last(of))
        if kind is not None:
            self.use(kind, name, role, node)
        elif is_private(name):
            self.use(ANYWHERE, name, role, node)

    def visit_Call(self, node: ast.Call) -> None:
        match node:
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[of, ast.Constant(value=str(name)), *_]):
                self._attribute(of, name, READ, node)
            case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[of, ast.Constant(value=str(name)), *_]):
                self._attribute(of, name, WRITTEN, node)
            case ast.Call(func=ast.Name(id="set_known"), args=[of], keywords=keywords):
                for one in keywords:
                    self._attribute(of, str(one.arg), WRITTEN, node)
            case ast.Call(func=ast.Attribute(value=of, attr="get" | "pop"), args=[ast.Constant(value=str(key)), *_]):
                self._key(of, key, READ, node)
        match node.func:
            case ast.Attribute(value=changed, attr=method) if method in _CHANGERS:
                while isinstance(changed, ast.Subscript):
                    changed = changed.value
                if isinstance(changed, ast.Attribute):
                    self._attribute(changed.value, changed.attr, WRITTEN, node)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        match node.slice:
            case ast.Constant(value=str(key)):
                self._key(node.value, key, READ if isinstance(node.ctx, ast.Load) else WRITTEN, node)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        match node:
            case ast.Compare(left=ast.Constant(value=str(key)), ops=[ast.In() | ast.NotIn()], comparators=[of]):
                self._key(of, key, READ, node)
        self.generic_visit(node)

    def _key(self, of: ast.expr, key: str, role: str, node: ast.AST) -> None:
        if not isinstance(of, ast.Subscript) and (kind := self.reading.dicts.get(_last(of))):
            self.use(kind, key, role, node)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if kind := self.reading.listed.get(_last(target)):
                for one in ast.walk(node.value):
                    if isinstance(one, ast.Constant) and isinstance(one.value, str):
                        self.use(kind, one.value, LISTED, one)
        self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if (node.module or "").partition(".")[0] not in ("__future__", PACKAGE.name):
            for one in node.names:
                if is_private(one.name):
                    self.use(ANYWHERE, one.name, READ, node)


def is_private(name: str) -> bool:
    """Whether a name is private by its underscore; `__names__` are Python's."""
    return _PRIVATE.match(name) is not None


def _last(node: ast.expr) -> str:
    """`c` of `a.b.c`, `C` of `C[T]`."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=value):
            return _last(value)
    return ""
