"""Typed parameters from plain values: what loses nothing is taken, everything else is refused by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gepc.cli.options import parse_settings
from gepc.core.errors import InputError, OptionError, check_choice, check_names, first_line, nearest
from gepc.core.options import build, coerce, parse_yaml, read_yaml


@dataclass(frozen=True)
class Inner:
    rate: float = 1.0


@dataclass(frozen=True)
class Settings:
    steps: int
    rate: float = 0.1
    name: str | None = None
    sizes: tuple[int, ...] = ()
    pair: tuple[float, float] = (0.0, 1.0)
    inner: Inner = field(default_factory=Inner)


def test_values_become_their_annotated_types() -> None:
    """1 for 1.0, YAML's "1e-3" for a float, a list for a tuple, a mapping for a dataclass."""
    values = {"steps": 3, "rate": "1e-3", "sizes": [1, 2], "pair": [0, 2], "inner": {"rate": 2}}
    found = build(Settings, values, "recipe")
    assert found == Settings(3, 0.001, None, (1, 2), (0.0, 2.0), Inner(2.0))
    assert isinstance(found.pair[0], float)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 3, "rte": 1.0}, "recipe has no option 'rte'; did you mean 'rate'"),
        ({"rate": 1.0}, "recipe needs steps"),
        ({"steps": 1.5}, "recipe: steps must be int, got 1.5"),
        ({"steps": True}, "recipe: steps must be int, got True"),
        ({"steps": 1, "rate": "fast"}, "recipe: rate must be float, got 'fast'"),
        ({"steps": 1, "rate": True}, "recipe: rate must be float"),
        ({"steps": 1, "rate": None}, "recipe: rate must be float"),
        ({"steps": 1, "name": 4}, "recipe: name must be str"),
        ({"steps": 1, "sizes": "12"}, "recipe: sizes must be a list"),
        ({"steps": 1, "sizes": [1, "a"]}, "recipe: sizes must be int"),
        ({"steps": 1, "pair": [1, 2, 3]}, "recipe: pair must have 2 values, got 3"),
        ({"steps": 1, "inner": {"rat": 1}}, "recipe: inner has no option 'rat'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        build(Settings, values, "recipe")


def test_unions_try_their_members_in_order() -> None:
    assert coerce(int | str, "a", "x") == "a"
    assert coerce(int | None, None, "x") is None
    assert coerce(int | tuple[int, int], [1, 2], "x") == (1, 2)
    with pytest.raises(OptionError, match="x must be int"):
        coerce(int | None, "a", "x")


def test_yaml_files(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("steps: 3\nrate: 1e-3\n")
    assert read_yaml(path) == {"steps": 3, "rate": "1e-3"}
    with pytest.raises(InputError, match="does not exist"):
        read_yaml(tmp_path / "b.yaml")
    for text in ("- 1\n- 2\n", "a: [", "\x00", ""):
        path.write_text(text)
        with pytest.raises(InputError, match=r"a\.yaml.*$") as refused:
            read_yaml(path)
        assert "\n" not in str(refused.value)
    path.write_text("a: !!python/object/apply:os.getcwd []")
    with pytest.raises(InputError, match="not a readable YAML file"):
        read_yaml(path)


def test_near_names() -> None:
    assert nearest("kd", ["kde", "mvn"]) == "did you mean 'kde'? (valid: kde, mvn)"
    assert nearest("zzz", ["kde", "mvn"]) == "valid: kde, mvn"
    check_choice("calibration", "kde", ["kde"])
    check_names("method", ["a", "b"], ["b", "a"])
    with pytest.raises(OptionError, match="unknown calibration None"):
        check_choice("calibration", None, ["kde"])


def test_a_mapping_is_converted_value_by_value_and_anything_else_is_refused() -> None:
    assert coerce(dict[str, float], {"a": 1, "b": "1e-3"}, "rates") == {"a": 1.0, "b": 0.001}
    with pytest.raises(OptionError, match=r"rates must be a mapping, got 3"):
        coerce(dict[str, float], 3, "rates")
    with pytest.raises(OptionError, match=r"rates\.a must be float, got 'x'"):
        coerce(dict[str, float], {"a": "x"}, "rates")


def test_a_union_takes_the_first_type_that_fits_and_names_it_if_none_does() -> None:
    assert coerce(int | str, "x", "size") == "x"
    with pytest.raises(OptionError, match=r"size must be int, got 1\.5"):
        coerce(int | str, 1.5, "size")


def test_what_may_be_anything_stays_as_it_is() -> None:
    for value in (1, "x", None, [1, "x"]):
        assert coerce(Any, value, "x") is value


def test_the_first_line_of_an_error_is_its_text_or_its_name() -> None:
    assert first_line(ValueError("  one\ntwo")) == "one"
    assert first_line(ValueError()) == first_line(ValueError(" \n")) == "ValueError"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("on", "on"),
        ("yes", "yes"),
        ("true", True),
        ("False", False),
        ("trueish", "trueish"),
        ("[1, 2]", [1, 2]),
    ],
)
def test_only_true_and_false_are_booleans_in_yaml(text: str, value: object) -> None:
    assert parse_yaml(text) == value


def test_words_of_settings_stay_words() -> None:
    """The recipes of `gepc train` advise `--set mixed_precision=no`."""
    assert build(Settings, parse_settings(["steps=3", "name=no"]), "recipe").name == "no"
