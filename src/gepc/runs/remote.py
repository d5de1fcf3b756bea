"""Images behind an address: whatever fsspec opens, s3:// and gs:// with the packages s3fs and gcsfs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from gepc.core.errors import InputError, OptionError
from gepc.images.sources import EXTENSIONS, FileImages, Record, read_pixels


class UrlImages(FileImages):
    """Image files at addresses, read when asked for. One that cannot be read is a record with a reason."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = list(urls)

    @classmethod
    def at(cls, url: str) -> UrlImages:
        """All image files at and below an address, in sorted order."""
        system, place = _open(url)
        try:
            found = [place] if system.isfile(place) else system.find(place)
        except Exception as error:  # every file system has errors of its own
            raise InputError(f"{url} cannot be listed: {error}") from error
        urls = sorted(str(system.unstrip_protocol(path)) for path in found if _is_image(path))
        if not urls:
            raise InputError(f"{url} does not exist or holds no image file ({', '.join(EXTENSIONS)})")
        return cls(urls)

    @cached_property
    def paths(self) -> list[Path]:  # type: ignore[override]
        """The addresses as paths, for the names of their folders."""
        return [Path(PurePosixPath(url)) for url in self.urls]

    @property
    def names(self) -> list[str]:
        """The addresses; as paths they would lead nowhere."""
        return self.urls

    def between(self, start: int, stop: int) -> UrlImages:
        """Those of a range."""
        return UrlImages(self.urls[start:stop])

    def __len__(self) -> int:
        return len(self.urls)

    def __getitem__(self, index: int) -> Record:
        url = self.urls[index]
        try:
            return Record(url, _read(url))
        except InputError as error:
            return Record(url, error=str(error))


def _read(url: str) -> Any:
    system, place = _open(url)
    try:
        handle = system.open(place, "rb")
    except FileNotFoundError as error:
        raise InputError(f"{url} does not exist") from error
    except Exception as error:  # every file system has errors of its own
        raise InputError(f"{url} cannot be read: {error}") from error
    with handle:
        return read_pixels(url, handle)


def _open(url: str) -> tuple[Any, str]:
    try:
        import fsspec.core
    except ImportError as error:
        raise OptionError(f"{url} needs fsspec: pip install fsspec") from error
    try:
        system, place = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise OptionError(f"{url} cannot be opened: {error}") from error
    return system, str(place)


def _is_image(path: str) -> bool:
    return PurePosixPath(path).suffix.lower() in EXTENSIONS
