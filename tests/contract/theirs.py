"""Finds the names that a library's source defines and reads, by its syntax, so that it can check a changed copy too."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path

_NAMED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_remembered = lru_cache(maxsize=16)
"""Caches the last classes: each is asked for many names in a row."""


@dataclass(frozen=True)
class Sources:
    """The installed libraries, or what they would be with one name changed.

    Args:
        renamed (`tuple[str, str]`, *optional*):
            A package, and a name to spell differently in all its files.
    """

    renamed: tuple[str, str] | None = None

    def scope(self, where: str) -> ast.AST | None:
        """A module, class or function, given as `package/file.py` or `package/file.py:Class.method`; `None` if gone."""
        file, _, path = where.partition(":")
        node: ast.AST | None = self._tree(file)
        for part in filter(None, path.split(".")):
            inside = ast.walk(node) if node is not None else ()
            node = next((one for one in inside if isinstance(one, _NAMED) and one.name == part), None)
        return node

    def _tree(self, file: str) -> ast.Module:
        package, name = self.renamed or ("", "")
        if file.partition("/")[0] != package or name not in _text(file):
            return _installed(file)
        return ast.parse(with_name_changed(_text(file), package, name))


def with_name_changed(text: str, package: str, name: str) -> str:
    """A source of a package in which a name is another one wherever it stands, in strings too."""
    other = f"{name}_renamed"
    text = re.sub(rf"\b{re.escape(name)}\b", other, text)
    # What comes from another package keeps its name there.
    return re.sub(rf"(?m)^(\s*from (?!{package}\b)[a-z]\S* import .*)\b{other}\b", rf"\1{name} as {other}", text)


@cache
def folder_of(package: str) -> Path | None:
    """Where a package is installed, `None` if it is not; the package is not imported."""
    spec = find_spec(package)
    return Path(spec.origin).parent if spec and spec.origin else None


@_remembered
def defined(scope: ast.AST) -> set[str]:
    """Names that a class gives its objects, that a module has, or that a function puts on any object."""
    if isinstance(scope, ast.Module):
        return set(_bound(scope.body))
    of_self = isinstance(scope, ast.ClassDef)
    found = set(_bound(scope.body)) if isinstance(scope, ast.ClassDef) else set()
    for node in ast.walk(scope):
        match node:
            case ast.Assign(targets=targets):
                pass
            case ast.AnnAssign(target=target, value=ast.expr()):
                targets = [target]
            case _:
                continue
        for one in (one for target in targets for one in ast.walk(target)):
            if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store):
                found |= {one.attr} if not of_self or _last(one.value) == "self" else set()
    return found


@_remembered
def read(scope: ast.AST, of: tuple[str, ...], at_construction: bool = True) -> set[str]:
    """Names that a module looks up in itself, or that a class or function asks objects for.

    Args:
        scope (`ast.AST`):
            Where to look.
        of (`tuple[str, ...]`):
            Names of those objects, such as `self`.
        at_construction (`bool`, *optional*, defaults to `True`):
            Whether what `__init__` reads counts.
    """
    if isinstance(scope, ast.Module):
        return {node.id for node in ast.walk(scope) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    found = set()
    for node in _nodes(scope, at_construction):
        match node:
            case ast.Attribute(value=value, attr=name, ctx=ast.Load()) if _last(value) in of:
                found.add(name)
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[value, ast.Constant(value=str(name)), *_]):
                found |= {name} if _last(value) in of else set()
    return found


@_remembered
def keys_defined(scope: ast.AST) -> set[str]:
    """Keys under which a function puts something into a dict."""
    found = set()
    for node in ast.walk(scope):
        match node:
            case ast.Dict(keys=keys):
                found |= {one.value for one in keys if isinstance(one, ast.Constant)}
            case ast.Subscript(slice=ast.Constant(value=key), ctx=ast.Store()):
                found.add(key)
    return found


@_remembered
def keys_read(scope: ast.AST) -> set[str]:
    """Keys that a function looks up in a dict, or asks whether it has them."""
    found = set()
    for node in ast.walk(scope):
        match node:
            case ast.Subscript(slice=ast.Constant(value=key), ctx=ast.Load()):
                found.add(key)
            case ast.Call(func=ast.Attribute(attr="get" | "pop"), args=[ast.Constant(value=key), *_]):
                found.add(key)
            case ast.Compare(left=ast.Constant(value=key), ops=[ast.In() | ast.NotIn()]):
                found.add(key)
    return found


def _nodes(scope: ast.AST, at_construction: bool) -> Iterator[ast.AST]:
    if not at_construction and isinstance(scope, ast.FunctionDef) and scope.name == "__init__":
        return
    yield scope
    for child in ast.iter_child_nodes(scope):
        yield from _nodes(child, at_construction)


def _bound(body: list[ast.stmt]) -> Iterator[str]:
    """Names that the statements of a module or class bind, also under an `if`."""
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from (one.asname or one.name.partition(".")[0] for one in names)
            case ast.Assign(targets=targets):
                yield from (one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
                yield name
            case ast.If(body=inner, orelse=orelse) | ast.Try(body=inner, orelse=orelse):
                yield from _bound([*inner, *orelse])


def _last(node: ast.expr) -> str:
    """`c` of `a.b.c`."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


@cache
def _text(file: str) -> str:
    package, _, rest = file.partition("/")
    folder = folder_of(package)
    assert folder is not None, f"{package} is installed"
    return (folder / rest).read_text(encoding="utf-8")


@cache
def _installed(file: str) -> ast.Module:
    return ast.parse(_text(file))
