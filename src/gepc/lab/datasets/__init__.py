"""Data sets in the form in which their owners distribute them, read from a local folder.

`open_dataset` reads what is there and never downloads. `gepc data get` and `gepc reproduce` download missing data sets
with `gepc.lab.datasets.download`.

from gepc.lab.datasets import list_datasets, open_dataset

images = open_dataset("cifar10", "data", "test", limit=1000, seed=0)
"""

from gepc.lab.datasets.registry import DatasetSpec, find_dataset, list_datasets, open_dataset, register

__all__ = ["DatasetSpec", "find_dataset", "list_datasets", "open_dataset", "register"]
