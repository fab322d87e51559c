"""Bytes into ``RawPolicy`` or ``ManagedFile``. Whatever the bytes are, the only error is PolicyError."""

from __future__ import annotations

import re
from typing import TypeVar, cast

import msgspec

from casemate.errors import PolicyError
from casemate.policy.lines import find, nesting
from casemate.policy.model import ManagedFile, RawPolicy
from casemate.policy.source import Source, suggestion

__all__ = ["managed", "policy"]

# Our own format needs 3; the rest is room for mistakes that deserve their own message.
_DEEPEST = 16

_T = TypeVar("_T", bound=msgspec.Struct)


def policy(data: bytes, file: str, *, name: str) -> tuple[Source, RawPolicy]:
    """Parse a user's, a project's or a named file. Raises PolicyError."""
    source = Source(name=name, file=file, text=_text(data, file))
    return source, _convert(_tree(source), source, RawPolicy)


def managed(data: bytes, file: str) -> tuple[Source, ManagedFile]:
    """Parse the administrator's file. Raises PolicyError."""
    source = Source(name="managed", file=file, text=_text(data, file))
    return source, _convert(_tree(source), source, ManagedFile)


def _text(data: bytes, file: str) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _broken(file, line, "is not UTF-8 text") from None
    at = text.find("\0")
    if at >= 0:
        raise _broken(file, text.count("\n", 0, at) + 1, "holds a NUL byte")
    return text


def _broken(file: str, line: int | None, reason: str) -> PolicyError:
    where = file if line is None else f"{file}:{line}"
    error = PolicyError(f"{where}: {reason}", code="policy-syntax", file=file)
    if line is not None:
        error.details["line"] = line
    return error


def _tree(source: Source) -> dict[str, object]:
    tree = _json(source) if source.file.endswith(".json") else _toml(source)
    if "version" not in tree:
        raise _broken(source.file, None, 'has no "version"; write version = 1 at the top')
    if type(tree["version"]) is not int or tree["version"] != 1:
        line = find(source.text, "version", json=source.file.endswith(".json"))
        raise _broken(source.file, line, f"version {_show(tree['version'])} is not known; this is version 1")
    return tree


def _toml(source: Source) -> dict[str, object]:
    import tomllib

    if nesting(source.text) > _DEEPEST:
        raise _broken(source.file, None, "has a key of too many parts")
    try:
        return tomllib.loads(source.text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        at = re.search(r" \(at line ([0-9]+), column [0-9]+\)$", message)
        line = int(at[1]) if at else None
        if at is None and message.endswith("(at end of document)"):
            line = source.text.rstrip("\n").count("\n") + 1
        reason = message[: at.start()] if at else message
        raise _broken(source.file, line, f"is not TOML: {ascii(reason)[1:-1]}") from None
    except RecursionError:
        raise _broken(source.file, None, "is nested too deeply") from None
    except (ValueError, OverflowError) as error:
        raise _broken(source.file, None, f"is not TOML: {_reason(error)}") from None


def _json(source: Source) -> dict[str, object]:
    import json

    def pairs(items: list[tuple[str, object]]) -> dict[str, object]:
        found: dict[str, object] = {}
        for key, value in items:
            if key in found:
                raise _Twice(key)
            found[key] = value
        return found

    def constant(word: str) -> object:
        raise ValueError(f"{word} is not a number")

    try:
        tree = json.loads(source.text, object_pairs_hook=pairs, parse_constant=constant)
    except _Twice as error:
        raise _broken(source.file, None, f"names the key {_show(error.args[0])} twice") from None
    except json.JSONDecodeError as error:
        raise _broken(source.file, error.lineno, f"is not JSON: {error.msg}") from None
    except RecursionError:
        raise _broken(source.file, None, "is nested too deeply") from None
    except (ValueError, OverflowError) as error:
        raise _broken(source.file, None, f"is not JSON: {_reason(error)}") from None
    if not isinstance(tree, dict):
        raise _broken(source.file, 1, "must be one JSON object")
    return cast("dict[str, object]", tree)


class _Twice(Exception):
    """A key that stands twice in one object."""


def _convert(tree: dict[str, object], source: Source, kind: type[_T]) -> _T:
    try:
        return msgspec.convert(tree, kind)
    except (msgspec.ValidationError, ValueError, OverflowError, RecursionError) as error:
        _check_keys(tree, source, kind)
        message, _, at = str(error).partition(" - at `$")
        field = at.rstrip("`").lstrip(".")
        raise source.error(field or "the file", _plain(message)) from None


def _check_keys(
    tree: dict[str, object], source: Source, kind: type[msgspec.Struct], prefix: str = ""
) -> None:
    """Name an unknown key before anything else: a misspelt field explains what follows."""
    known = [field.encode_name for field in msgspec.structs.fields(kind)]
    parts, named = _parts(kind)
    for key, value in tree.items():
        field = f"{prefix}{key}"
        if key not in known:
            shown = ascii(field)[1:-1] if len(field) <= 120 else ascii(field[:117])[1:-1] + "..."
            raise source.error(
                shown, f"unknown field{suggestion(key, known)}", hint=f"known here: {', '.join(known)}"
            )
        part = parts.get(key)
        if part is not None:
            if not isinstance(value, dict):
                raise source.error(field, f"must be a table, not {_kind(value)}")
            _check_keys(cast("dict[str, object]", value), source, part, f"{field}.")
        elif key in named and isinstance(value, dict):
            for name, item in cast("dict[str, object]", value).items():
                if isinstance(item, dict):
                    inside = f"{field}.{_bare(name)}."
                    _check_keys(cast("dict[str, object]", item), source, named[key], inside)
                    missing = [at.encode_name for at in msgspec.structs.fields(named[key]) if at.required]
                    if absent := [name for name in missing if name not in item]:
                        raise source.error(inside[:-1], f"the field {absent[0]} is missing")


def _bare(name: str) -> str:
    return ascii(name if len(name) <= 60 else name[:57] + "...")[1:-1]


_Kinds = dict[str, type[msgspec.Struct]]


def _parts(kind: type[msgspec.Struct]) -> tuple[_Kinds, _Kinds]:
    """The keys of ``kind`` that hold a table of their own, and those that hold tables by a person's names."""
    found: _Kinds = {}
    named: _Kinds = {}
    for field in cast("msgspec.inspect.StructType", msgspec.inspect.type_info(kind)).fields:
        kinds = field.type.types if isinstance(field.type, msgspec.inspect.UnionType) else (field.type,)
        for option in kinds:
            while isinstance(option, msgspec.inspect.Metadata):
                option = option.type
            if isinstance(option, msgspec.inspect.StructType):
                found[field.encode_name] = option.cls
            if isinstance(option, msgspec.inspect.DictType) and isinstance(
                option.value_type, msgspec.inspect.StructType
            ):
                named[field.encode_name] = option.value_type.cls
    return found, named


def _plain(message: str) -> str:
    # msgspec speaks of Python's types; a person wrote TOML.
    for theirs, ours in (
        ("`array`", "a list"), ("`str`", "text"), ("`int`", "a whole number"), ("`float`", "a number"),
        ("`bool`", "true or false"), ("`object`", "a table"), ("`null`", "nothing"),
    ):  # fmt: skip
        message = message.replace(theirs, ours)
    message = message.replace("`int | float | str`", "a number or text")
    message = message.replace("`int | str`", "a whole number or text")
    return ascii(message)[1:-1]


def _kind(value: object) -> str:
    names = {"str": "text", "int": "a whole number", "float": "a number", "list": "a list"}
    return "true or false" if isinstance(value, bool) else names.get(type(value).__name__, "this")


def _reason(error: Exception) -> str:
    # The interpreter's hint about its own digit limit would only confuse.
    return ascii(str(error).partition(";")[0])[1:-1]


def _show(value: object) -> str:
    try:
        text = str(value)
    except ValueError:  # a number of too many digits
        text = "this number"
    return ascii(text if len(text) <= 60 else text[:57] + "...")
