"""Data sets from their owners' addresses: checked, continued after an interruption, laid out as the readers expect."""

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gepc.core.errors import InputError, StorageError, check_choice, raising
from gepc.core.options import build, read_yaml
from gepc.core.run_folder import storage_errors
from gepc.lab.datasets.registry import find_dataset, open_dataset

OnBytes = Callable[[int], None]
RETRIES, CHUNK, TIMEOUT = 3, 1 << 20, 60.0


@dataclass(frozen=True)
class RemoteFile:
    """A file of a data set."""

    url: str
    md5: str
    size: int
    holds: str | None = None  # the folder that an archive unpacks to; None for a file that is read as it is

    @property
    def name(self) -> str:
        """The name of the file."""
        return self.url.rsplit("/", 1)[1]


FILES = {
    name: tuple(build(RemoteFile, one, f"{name} in downloads.yaml") for one in files)
    for name, files in read_yaml(Path(__file__).with_name("downloads.yaml")).items()
}
"""Data set -> its files."""
MANUAL = {"celeba": ("img_align_celeba.zip", "list_eval_partition.txt")}
"""Data sets whose owners ask for consent to their terms -> the files to get by hand."""


def missing_files(name: str, folder: Path) -> list[RemoteFile]:
    """The files of a data set that `fetch` would download."""
    check_choice("data set", name, [*FILES, *MANUAL])
    files = (one for one in FILES.get(name, ()) if not (folder / one.name).is_file())
    return [one for one in files if not (one.holds and (folder / one.holds).is_dir())]


def fetch(name: str, folder: Path, mirror: str | None = None, on_bytes: OnBytes | None = None) -> dict[str, int]:
    """Download a data set of `FILES` or `MANUAL` and read it: split -> number of images.

    Files that are there are not downloaded again. A file appears under its name when it is complete and its checksum is
    right; until then its bytes are in a file that ends in `.part`, and the next call continues it. With `mirror`, all
    files are at that address, under their names. `on_bytes` is called with the number of bytes of every chunk.
    """
    wanted = missing_files(name, folder)
    needed = sum(one.size * (3 if one.holds else 1) for one in wanted)
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    if free < needed:
        raise StorageError(f"{folder} has {free / 1e9:.1f} GB free, but about {needed / 1e9:.1f} GB are needed")
    for one in wanted:
        _download(one, folder, one.url if mirror is None else f"{mirror.rstrip('/')}/{one.name}", on_bytes)
    for one in FILES.get(name, ()):
        if one.holds and not (folder / one.holds).is_dir():
            _unpack(folder / one.name, folder, one.holds)
    if name in MANUAL:
        archive, *others = MANUAL[name]
        holds = Path(archive).stem
        if not (folder / holds).is_dir() and (folder / archive).is_file():
            _unpack(folder / archive, folder, holds)
        if not all((folder / one).exists() for one in (holds, *others)):
            terms = f"after accepting its owners' terms: visit {find_dataset(name).home}"
            files = f"put {' and '.join(MANUAL[name])} into {folder}"
            raise InputError(f"{name} can be downloaded only {terms}, {files}, and run the command again")
    return {split: len(open_dataset(name, folder, split)) for split in ("train", "test")}


def _download(one: RemoteFile, folder: Path, url: str, on_bytes: OnBytes | None) -> None:
    with raising(InputError, "downloads need pooch; install it with: pip install 'gepc[data]'", ImportError):
        import pooch  # type: ignore[import-untyped,unused-ignore]
        import requests

    part = folder / f"{one.name}.part"
    reason = f"{url} cannot be downloaded: {{error}}; try again to continue, or give a `mirror`"
    failing = raising(InputError, reason, requests.RequestException, options=("mirror",))
    with storage_errors(folder), failing:
        _resume(part, url, on_bytes or (lambda _: None))
        if pooch.file_hash(str(part), alg="md5") != one.md5:
            part.unlink()
            wrong = f"{url} is not the expected file, its MD5 is not {one.md5}; it was removed"
            raise InputError(f"{wrong}: try again or give another `mirror`", options=("mirror",))
        os.replace(part, folder / one.name)


def _resume(part: Path, url: str, on_bytes: OnBytes) -> None:
    """Download a file of which some bytes may be in `part`."""
    import requests

    done = part.stat().st_size if part.exists() else 0
    headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={done}-"} if done else {})}
    with requests.Session() as session:
        for scheme in ("http://", "https://"):
            session.mount(scheme, requests.adapters.HTTPAdapter(max_retries=RETRIES))
        answer = session.get(url, stream=True, timeout=TIMEOUT, headers=headers)
        if answer.status_code == requests.codes.requested_range_not_satisfiable:
            return  # all bytes are there
        answer.raise_for_status()
        continued = answer.status_code == requests.codes.partial_content
        with part.open("ab" if continued else "wb") as target:
            for chunk in answer.iter_content(CHUNK):
                target.write(chunk)
                on_bytes(len(chunk))


def _unpack(archive: Path, folder: Path, holds: str) -> None:
    """Unpack to a temporary folder first: the result is never partial."""
    safely: dict[str, Any] = {} if archive.suffix == ".zip" else {"filter": "data"}
    try:
        with tempfile.TemporaryDirectory(prefix=f".{holds}.", suffix=".part", dir=folder) as draft:
            shutil.unpack_archive(archive, draft, **safely)
            if not Path(draft, holds).is_dir():
                raise InputError(f"{archive} contains no folder {holds}")
            os.replace(Path(draft, holds), folder / holds)
    except (shutil.ReadError, EOFError) as error:
        raise InputError(f"{archive} is damaged: {error}; remove it and run the command again") from error
    except OSError as error:
        raise StorageError(f"cannot unpack {archive}: {error.strerror or error}") from error
