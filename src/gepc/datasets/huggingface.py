"""Hugging Face data sets that are on this machine already: `hf:NAME` or `hf:NAME:CONFIGURATION`.

The folder `NAME/` below the root comes first: written by `save_to_disk` (all splits, or one), or in a form that
`load_dataset` reads (Parquet files, an image folder, a clone from the hub). Otherwise the cache of the `datasets`
library is searched. The library is an optional dependency, and is used offline and without progress bars.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from gepc.core.errors import InputError
from gepc.datasets.registry import register
from gepc.images.sources import Images, Record, record_of_item

COLUMNS = ("image", "img", "pixel_values")
_SWITCHES = (
    ("datasets.config", "HF_DATASETS_OFFLINE"),
    ("datasets.config", "HF_HUB_OFFLINE"),
    ("huggingface_hub.constants", "HF_HUB_OFFLINE"),
)


@register(
    "hf",
    layout="a folder of that name, written by save_to_disk or in a form that load_dataset reads; or the data set in "
    "the cache of the datasets library, where its own load_dataset puts it",
    home="https://huggingface.co/datasets",
    by_name=True,
)
def hugging_face(root: Path, split: str, name: str) -> Images:
    """The split of that name; images are decoded when asked for."""
    try:
        library = import_module("datasets")
    except ImportError as error:
        raise InputError("hf needs the package `datasets`: pip install datasets") from error
    path, _, configuration = name.partition(":")
    try:
        with _offline(), _quiet(library):
            table = _load(library, root / path, path, configuration or None)
    except InputError:
        raise
    except Exception as error:  # whatever the reader of that data set raises
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"{path} is neither below {root} nor in the cache: {reason}") from error
    if split not in table:
        raise InputError(f"{path} has no {split} split but {', '.join(map(str, table)) or 'none'}")
    return _Rows(table[split], split)


def _load(library: Any, folder: Path, name: str, configuration: str | None) -> Any:
    """The mapping from splits to tables; a table that was saved alone, without the name of a split, is a test set."""
    saved = [name for name in ("dataset_dict.json", "state.json") if (folder / name).is_file()]
    if saved:
        if configuration is not None:
            raise InputError(f"a data set written by save_to_disk has no configurations; leave out {configuration!r}")
        found = library.load_from_disk(str(folder))
        return found if saved[0] == "dataset_dict.json" else {str(found.split or "test"): found}
    return library.load_dataset(str(folder) if folder.is_dir() else name, configuration)


@contextmanager
def _offline() -> Iterator[None]:
    """Turn the offline switches of the libraries on."""
    modules = [(sys.modules.get(module), switch) for module, switch in _SWITCHES]
    before = [(module, switch, getattr(module, switch)) for module, switch in modules if hasattr(module, switch)]
    try:
        for module, switch, _ in before:
            setattr(module, switch, True)
        yield
    finally:
        for module, switch, value in before:
            setattr(module, switch, value)


@contextmanager
def _quiet(library: Any) -> Iterator[None]:
    """Turn the progress bars of the library off."""
    hidden = library.are_progress_bars_disabled()
    library.disable_progress_bars()
    try:
        yield
    finally:
        if not hidden:
            library.enable_progress_bars()


class _Rows(Images):
    """The image column of a table; a row that cannot be decoded is a record with the reason."""

    def __init__(self, table: Any, split: str) -> None:
        columns = list(table.column_names)
        found = [column for column in COLUMNS if column in columns]
        if not found:
            raise InputError(f"no column is called {', '.join(COLUMNS)}; there are {', '.join(columns)}")
        self._table, self._column, self._split = table, found[0], split

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Record:
        index = range(len(self))[index]
        name = f"{self._split}/{index}"
        try:
            return record_of_item(name, self._table[index][self._column])
        except Exception as error:  # noqa: BLE001  (whatever the decoder raises)
            return Record(name, error=f"{name} cannot be decoded: {error}")
