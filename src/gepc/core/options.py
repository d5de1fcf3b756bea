"""Typed parameters from plain mappings (YAML, JSON, `key=value`). An unknown key is an error with the closest name."""

import contextlib
import dataclasses
import math
import numbers
import re
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from gepc.core.errors import InputError, OptionError, check_choice, check_names, nearest, raising

T = TypeVar("T")
DEFAULT_BACKBONE = "photos-small"


def build(cls: type[T], values: Mapping[str, Any], what: str) -> T:
    """Build the dataclass `cls` from a mapping; `what` names the mapping in error messages.

    Unknown and missing keys are an `OptionError`, as is a value that does not fit its annotation.
    """
    dataclass_type: Any = cls
    fields = {field.name: field for field in dataclasses.fields(dataclass_type)}
    check_names(what, values, fields)
    unset = (dataclasses.MISSING, dataclasses.MISSING)
    needed = [name for name, field in fields.items() if (field.default, field.default_factory) == unset]
    if not values.keys() >= set(needed):
        raise OptionError(f"{what} needs {', '.join(name for name in needed if name not in values)}")
    hints = typing.get_type_hints(cls)
    return cls(**{name: coerce(hints[name], value, f"{what}: {name}") for name, value in values.items()})


def coerce(hint: Any, value: Any, where: str) -> Any:
    """Convert `value` to the type `hint`: 1 to 1.0, a list to a tuple, "1e-3" to a float, NumPy numbers to Python's.

    An `OptionError`, which names `where`, says what does not fit.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _coerce_union(arguments, value, where)
    if origin is tuple:
        if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__"):
            raise OptionError(f"{where} must be a list, got {value!r}")
        items = list(value)
        inner = arguments[:1] * len(items) if arguments[1:] == (Ellipsis,) else arguments
        if len(inner) != len(items):
            raise OptionError(f"{where} must have {len(inner)} values, got {len(items)}")
        return tuple(coerce(kind, item, where) for kind, item in zip(inner, items, strict=True))
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise OptionError(f"{where} must be a mapping, got {value!r}")
        return {key: coerce(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return build(typing.cast(type[Any], hint), value, where)
    return _coerce_plain(hint, value, where)


def is_scalar(hint: Any) -> bool:
    """Whether the annotation is int, float, str, bool, None or a union of these."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return set(kinds) <= {int, float, str, bool, type(None)}


def _coerce_union(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    for kind in kinds:
        with contextlib.suppress(OptionError):
            return coerce(kind, value, where)
    return coerce(kinds[0], value, where)


def _coerce_plain(hint: Any, value: Any, where: str) -> Any:
    if hint is Any or not isinstance(hint, type):
        return value
    if isinstance(value, numbers.Number) and hasattr(value, "item"):
        value = value.item()
    if hint is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            return float(value)  # YAML reads 1e-3 as text
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise OptionError(f"{where} must be {hint.__name__}, got {value!r}")
    return value


def coerce_fields(values: Any) -> None:
    """Convert every field of a dataclass, which may be frozen, to its annotated type."""
    for name, hint in typing.get_type_hints(type(values)).items():
        object.__setattr__(values, name, coerce(hint, getattr(values, name), name))


def checked(default: Any, is_valid: Callable[[Any], bool], wanted: str) -> Any:
    """A field of a dataclass that `check_fields` checks unless it is None; the error says that it must be `wanted`."""
    return dataclasses.field(default=default, metadata={"check": (is_valid, wanted)})


def at_least(least: int, default: int | None) -> Any:
    """A field of a dataclass that is a whole number from `least` on, or None."""
    return checked(default, lambda value: bool(value >= least), f"at least {least}")


def positive(default: float | None) -> Any:
    """A field of a dataclass that is a finite number above 0, or None."""
    return checked(default, lambda value: 0 < value < math.inf, "positive")


def not_negative(default: float | None) -> Any:
    """A field of a dataclass that is a finite number from 0 on, or None."""
    return checked(default, lambda value: 0 <= value < math.inf, "0 or more")


def share(default: float) -> Any:
    """A field of a dataclass that is a number from 0 to 1."""
    return checked(default, lambda value: 0 <= value <= 1, "between 0 and 1")


def one_of(default: str, *others: str) -> Any:
    """A field of a dataclass that is one of these words, the first by default; `check_fields` checks it."""
    return dataclasses.field(default=default, metadata={"words": (default, *others)})


def check_fields(values: Any, what: str = "") -> None:
    """Raise `OptionError`, which begins with `what`, for a field of the dataclass that is not what it declares."""
    for field in dataclasses.fields(values):
        value = getattr(values, field.name, None)  # a field that fitting sets has no value yet
        is_valid, wanted = field.metadata.get("check", (None, ""))
        if is_valid is not None and value is not None and not is_valid(value):
            raise OptionError(f"{what}{field.name} must be {wanted}, got {value}")
        if "words" in field.metadata:
            check_choice(field.name, value, field.metadata["words"])


def parse_yaml(text: str) -> Any:
    """Read YAML in which only `true` and `false` are booleans, as in YAML 1.2: `mixed_precision=no` is a word."""
    import yaml

    boolean = "tag:yaml.org,2002:bool"

    class Loader(yaml.SafeLoader):
        """A loader with its own table of words that are not text."""

    Loader.yaml_implicit_resolvers = {
        letter: [(tag, pattern) for tag, pattern in resolvers if tag != boolean]
        for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver(boolean, re.compile("^(true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
    return yaml.load(text, Loader)  # noqa: S506


def shipped_files(folder: Path) -> dict[str, Path]:
    """The YAML files in a folder of the package, by name."""
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def read_named(config: str | Path, known: Mapping[str, Path], what: str) -> dict[str, Any]:
    """Read a YAML file, or one of the `known` files by its name; errors call it `what`."""
    path = Path(config)
    if not path.is_file() and path.stem not in known:
        raise InputError(f"{config} is neither a YAML file nor a {what} of gepc; {nearest(path.stem, known)}")
    return read_yaml(path if path.is_file() else known[path.stem])


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML file that holds one mapping; a missing or invalid file is an `InputError`."""
    import yaml

    broken = raising(InputError, f"{path} is not a readable YAML file: {{error}}", yaml.YAMLError, UnicodeDecodeError)
    with broken, raising(InputError, f"{path} does not exist", FileNotFoundError):
        values = parse_yaml(Path(path).read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise InputError(f"{path} must hold `key: value` lines")
    return values
