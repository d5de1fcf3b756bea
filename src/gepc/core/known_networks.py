"""Where the networks of this user lie: a file in the user's own state folder, from the digest of weights to a path.

A saved detector names its network by a path and by the digest of its weights. The path is not followed, since the
folder may come from anyone. The digest can be looked up here, because only detectors that this user has saved are
recorded.
"""

import contextlib
import os
from pathlib import Path

from filelock import FileLock

from gepc.core.errors import GepcError
from gepc.core.files import read_json, write_json

MOST = 1000  # entries; the oldest are forgotten


def state_file() -> Path:
    """`networks.json` in GEPC_STATE, or in the folder `gepc` of the user's state folder."""
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - Path.home raises an error for a user without a home
    state = Path(os.environ.get("XDG_STATE_HOME") or home / ".local" / "state")
    return Path(os.environ.get("GEPC_STATE") or state / "gepc") / "networks.json"


def remember_network(sha256: str, path: Path) -> None:
    """Record where the network with these weights lies; a state folder that cannot be written is not an error."""
    with contextlib.suppress(OSError, GepcError):
        file = state_file()
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock", timeout=5):
            known = _read(file)
            known.pop(sha256, None)
            known[sha256] = str(path.resolve())
            write_json(file, dict(list(known.items())[-MOST:]))


def find_network(sha256: str) -> Path | None:
    """The path of the network with these weights, if it is known and still there."""
    path = _read(state_file()).get(sha256)
    return Path(path) if isinstance(path, str) and Path(path).exists() else None


def _read(file: Path) -> dict[str, str]:
    with contextlib.suppress(OSError, GepcError):
        known = read_json(file)
        return known if isinstance(known, dict) else {}
    return {}
