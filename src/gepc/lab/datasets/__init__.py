"""Data sets in the form in which they are distributed, read from a local folder. Nothing is ever downloaded.

from gepc.lab.datasets import list_datasets, open_dataset

images = open_dataset("cifar10", "data", "test", limit=1000, seed=0)
"""

from gepc.lab.datasets.registry import DatasetSpec, find_dataset, list_datasets, open_dataset, register

__all__ = ["DatasetSpec", "find_dataset", "list_datasets", "open_dataset", "register"]
