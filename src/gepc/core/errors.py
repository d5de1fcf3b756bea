"""Errors. A message says which input was wrong, what was wrong with it, and what to do about it."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

Errors = type[Exception] | tuple[type[Exception], ...]


class GepcError(Exception):
    """Base of every error this library raises on purpose; the command line prints it without a traceback.

    `options` has the names of the parameters that the message asks the user to change. The command line adds how it
    spells them.
    """

    def __init__(self, *arguments: object, options: Iterable[str] = ()) -> None:
        super().__init__(*arguments)
        self.options = tuple(options)


class InputError(GepcError, ValueError):
    """An image, a folder or a file is not what was expected."""


class OptionError(GepcError, TypeError):
    """An option is unknown, misspelt or has a value that makes no sense."""


class TooFewImagesError(OptionError):
    """The calibration images are too few for the rate that was asked for.

    `needed` says how many it takes, and `smallest` is the smallest alpha that the present ones allow.
    """

    def __init__(self, message: str, needed: int = 0, smallest: float = 1.0) -> None:
        super().__init__(message)
        self.needed, self.smallest = needed, smallest


class NotFittedError(GepcError, RuntimeError):
    """A detector was asked for a score before `fit`."""


class BackboneError(GepcError, RuntimeError):
    """A network cannot be loaded, or its output is not a noise prediction."""


class StorageError(GepcError, OSError):
    """A file could not be written; the previous file, if any, is unchanged."""


class AdviceWarning(UserWarning):
    """A warning with advice; `options` has the names of the parameters that it asks the user to change."""

    def __init__(self, message: str, options: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.options = tuple(options)


class ValueRangeWarning(AdviceWarning):
    """A float array looks as if it were not in [-1, 1]."""


@contextmanager
def raising(
    kind: type[GepcError], message: str, *causes: type[Exception], passing: Errors = (), options: Iterable[str] = ()
) -> Iterator[None]:
    """Turn the errors `causes` of the block, except `passing`, into one of that kind.

    In the message, `{error}` is the text of the cause in one line, `{line}` its first line, `{kind}` the name of its
    class, and `{reason}` what the operating system says. The new error names the options that its cause names, or else
    `options`.
    """
    try:
        yield
    except passing:
        raise
    except causes as error:
        reason = getattr(error, "strerror", None) or str(error)
        whole = " ".join(line.strip() for line in str(error).splitlines())
        texts = {"error": whole, "line": first_line(error), "kind": type(error).__name__, "reason": reason}
        for name, text in texts.items():
            message = message.replace(f"{{{name}}}", text)
        raise kind(message, options=getattr(error, "options", options)) from error


def first_line(error: Exception) -> str:
    """The first line of an error's text, or the name of its class if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def nearest(name: object, valid: Iterable[str]) -> str:
    """The end of an error message: the closest valid name, if any, and all of them."""
    names = sorted(valid)
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    known = f"valid: {', '.join(names)}"
    return f"did you mean {close[0]!r}? ({known})" if close else known


def check_choice(option: str, value: object, valid: Iterable[str]) -> None:
    """Raise `OptionError` unless `value` is one of `valid`."""
    names = list(valid)
    if value not in names:
        raise OptionError(f"unknown {option} {value!r}; {nearest(value, names)}")


def check_names(what: str, given: Iterable[str], valid: Iterable[str]) -> None:
    """Raise `OptionError` naming the first of `given` that is not in `valid`."""
    names = list(valid)
    for name in given:
        if name not in names:
            raise OptionError(f"{what} has no option {name!r}; {nearest(name, names)}")


def check_least(least: int, **counts: int | None) -> None:
    """Raise `OptionError` naming the first count that is below `least`; None passes."""
    for name, value in counts.items():
        if value is not None and value < least:
            raise OptionError(f"{name} must be at least {least}, got {value}")
