"""Type checks of configuration dataclasses, with errors that name the field, its value and the fix."""

import dataclasses
import difflib
import sys
import types
import typing
from typing import Literal

from k3jax.errors import UserError


class ConfigError(UserError):
    """A setting that cannot work: one line naming the field, its value and what to do."""


def require(ok: bool, config: object, field: str, fix: str) -> None:
    """Raises ConfigError about one field, unless `ok`; `fix` says what would do."""
    if not ok:
        name = type(config).__name__
        raise ConfigError(f"{name}.{field} = {getattr(config, field)!r}: {fix}")


def check_types(config: object) -> None:
    """Checks every field of a dataclass against its annotation.

    Args:
        config: an instance of a dataclass.
    Raises:
        ConfigError: a value of another type, or outside of a Literal; an int may stand for a float.
    """
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        hint = hints[field.name]
        if not _matches(value, hint):
            require(False, config, field.name, f"expected {_describe_type(hint)}{_remedy(value, hint)}")


def _matches(value: object, hint: object) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return value in args and type(value) in {type(a) for a in args}
    if origin in (typing.Union, types.UnionType):
        return any(_matches(value, a) for a in args)
    if origin is tuple:
        return isinstance(value, tuple) and all(_matches(v, args[0]) for v in value)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _describe_type(hint: object) -> str:
    """A type annotation in the words of an error message, such as "an integer or None"."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(repr(a) for a in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe_type(a) for a in args)
    if origin is tuple:
        return {int: "a tuple of integers", str: "a tuple of strings"}[args[0]]
    names = {int: "an integer", float: "a finite number", str: "a string", bool: "True or False"}
    return names.get(hint, "None")


def _remedy(value: object, hint: object) -> str:
    """What was probably meant by a value that does not fit, or nothing."""
    choices = [c for h in (hint, *typing.get_args(hint)) for c in typing.get_args(h) if isinstance(c, str)]
    near = difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else []
    if near:
        return f"; did you mean {near[0]!r}?"
    if isinstance(value, float) and value.is_integer() and _matches(int(value), hint):
        return f"; write {int(value)}"
    if isinstance(value, (int, str)) and _matches((value,), hint):
        return f"; write {(value,)!r}"
    return ""
