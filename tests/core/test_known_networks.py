"""Networks of this user are found by the digest of their weights, and nothing else is."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest

from gepc.core import known_networks
from gepc.core.known_networks import find_network, remember_network, state_file


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEPC_STATE", str(tmp_path / "state"))


def test_a_network_is_found_by_its_digest_while_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = tmp_path / "net"
    network.mkdir()
    assert find_network("abc") is None
    monkeypatch.chdir(tmp_path)
    remember_network("abc", Path("net"))
    monkeypatch.chdir("/")
    assert find_network("abc") == network
    assert find_network("abd") is None
    network.rmdir()
    assert find_network("abc") is None


def test_a_network_that_moved_is_found_at_its_new_place(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        remember_network("abc", tmp_path / name)
    assert find_network("abc") == tmp_path / "new"


def test_the_oldest_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_networks, "MOST", 2)
    for digest in ("a", "b", "c"):
        remember_network(digest, tmp_path)
    assert [find_network(digest) for digest in ("a", "b", "c")] == [None, tmp_path, tmp_path]


@pytest.mark.parametrize("content", ["", "[1]", "{", '{"abc": 3}'])
def test_a_damaged_file_knows_nothing_and_is_replaced(tmp_path: Path, content: str) -> None:
    state_file().parent.mkdir()
    state_file().write_text(content)
    assert find_network("abc") is None
    remember_network("abc", tmp_path)
    assert find_network("abc") == tmp_path


def test_a_state_folder_that_cannot_be_written_is_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    remember_network("abc", tmp_path)
    assert find_network("abc") is None


def test_a_user_without_a_home_has_a_state_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a container that runs under an unknown number."""
    for name in ("HOME", "XDG_STATE_HOME", "GEPC_STATE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda number: (_ for _ in ()).throw(KeyError(number)))
    assert state_file().name == "networks.json"
    monkeypatch.setenv("GEPC_STATE", str(tmp_path))
    assert state_file() == tmp_path / "networks.json"
