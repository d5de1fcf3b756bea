"""What tells backbones apart: their weights, the settings they predict with, and how to load the same one again."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gepc.backbones.schedule import check_alphas_cumprod
from gepc.core.errors import check_least
from gepc.core.options import coerce

# The search for modules ends here: a closure over an object with a list of modules has depth 3.
MAX_DEPTH, MAX_ITEMS = 5, 1000


class Identity:
    """The part of a backbone that a saved detector, a pickle and the feature cache compare.

    `Backbone` documents the attributes.
    """

    family = "custom"

    def __init__(
        self,
        alphas_cumprod: npt.ArrayLike,
        channels: int,
        image_size: int | tuple[int, int] | None = None,
        size_multiple: int = 1,
    ) -> None:
        self.alphas_cumprod = check_alphas_cumprod(alphas_cumprod)
        self.channels: int = coerce(int, channels, "channels")
        self.size_multiple: int = coerce(int, size_multiple, "size_multiple")
        size = coerce(int | tuple[int, int] | None, image_size, "image_size")
        self.image_size: tuple[int, int] | None = (size, size) if isinstance(size, int) else size
        check_least(1, channels=self.channels, size_multiple=self.size_multiple, image_size=min(self.image_size or [1]))
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.parameters: int | None = None
        self.source: str | None = None
        self.location: str | None = None
        self.load_options: dict[str, Any] = {}
        self.load_again: Callable[..., Any] | None = None
        self.trained_on: npt.NDArray[np.uint64] | None = None
        self.conditioning: dict[str, npt.NDArray[np.float32]] = {}
        self._sha256: str | None = None

    @property
    def sha256(self) -> str | None:
        """SHA-256 of the weights: of the files that they were read from, otherwise of the torch modules in memory.

        Modules are searched in the attributes of the backbone and in the functions that it calls, see `modules_in`.
        Their digest is computed at every access, because the modules may be trained further. It is None where no
        module is found: the weights of such a backbone cannot be compared.
        """
        return self._sha256 or self._digest()

    @sha256.setter
    def sha256(self, sha256: str | None) -> None:
        self._sha256 = sha256

    def _digest(self) -> str | None:
        return digest_of(modules_in(vars(self)))

    @property
    def unchecked(self) -> list[str]:
        """The parts whose weights cannot be compared when a saved detector is loaded."""
        return [] if self._sha256 or modules_in(vars(self)) else ["network"]

    def settings(self) -> dict[str, Any]:
        """The choices that change a prediction in addition to weights and schedule (class label, precision, ...)."""
        return {}

    def identity(self) -> dict[str, Any]:
        """`settings`, with digests of the embeddings that the network is conditioned on."""
        settings = self.settings()
        if self.conditioning:
            digests = {name: hashlib.sha256(values.tobytes()) for name, values in self.conditioning.items()}
            settings["conditioning"] = {name: digest.hexdigest()[:16] for name, digest in digests.items()}
        return settings

    @property
    def fingerprint(self) -> str | None:
        """SHA-256 of weights, schedule and settings; it contains the precision but not the device.

        It is None for a backbone made in Python, even where `sha256` is known: the code of a function cannot be
        compared, so its features must not be taken from a cache.
        """
        if self._sha256 is None:
            return None
        digest = hashlib.sha256(self.alphas_cumprod.tobytes())
        digest.update(json.dumps([self.family, self._sha256, self.identity()], sort_keys=True).encode())
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        """Return plain values that say what the backbone is: a saved detector stores them, without the device.

        Returns
        -------
        dict
            Numbers, texts and lists by name.

        Examples
        --------
        >>> import gepc
        >>> facts = gepc.load_backbone("photos-small", device="cpu").describe()
        >>> facts["family"], facts["channels"], facts["timesteps"], facts["time_scale"]
        ('diffusers', 3, 4000, 1.0)
        """
        unchecked = self.unchecked
        return {
            "family": self.family,
            "source": self.source,
            "sha256": self.sha256,
            "load_options": self.load_options,
            "parameters": self.parameters,
            "channels": self.channels,
            "image_size": None if self.image_size is None else list(self.image_size),
            "size_multiple": self.size_multiple,
            "timesteps": len(self.alphas_cumprod),
            "first_abar": float(self.alphas_cumprod[0]),
            "last_abar": float(self.alphas_cumprod[-1]),
            "precision": str(self.dtype).removeprefix("torch."),
            **({"unchecked": unchecked} if unchecked else {}),
            **self.identity(),
        }

    def __repr__(self) -> str:
        size = "any size" if self.image_size is None else "x".join(map(str, self.image_size))
        name = f"{type(self).__name__} {self.source or self.family}"
        return f"<{name}: {self.channels} channels, {size}, {len(self.alphas_cumprod)} steps>"

    def __deepcopy__(self, memo: object) -> Identity:
        return self  # copies of a detector, and clones of an estimator, share the network

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A pickle names the weights instead of holding them, and loading checks that they are the same.
        if self.location is None or self.load_again is None:
            return super().__reduce_ex__(protocol)
        # With the embeddings, loading again needs no text encoder.
        embeddings = {"embeddings": self.conditioning} if self.conditioning else {}
        return self.load_again, (self.location, {**self.load_options, **embeddings}, self.sha256)


def digest_of(modules: Iterable[torch.nn.Module]) -> str | None:
    """SHA-256 of the parameters and buffers of all `modules`, in any order; None without modules.

    Names, types, shapes and bytes of the state dicts are hashed.
    """
    digests = []
    for module in modules:
        digest = hashlib.sha256()
        for name, value in module.state_dict().items():
            if isinstance(value, torch.Tensor) and not value.is_meta:
                digest.update(f"{name} {value.dtype} {tuple(value.shape)};".encode())
                digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        digests.append(digest.hexdigest())
    return hashlib.sha256("".join(sorted(digests)).encode()).hexdigest() if digests else None


def modules_in(holder: object) -> list[torch.nn.Module]:
    """The torch modules that a function or an object holds.

    These are the object itself, the object of a bound method, the arguments of a `functools.partial`, the variables
    that a function reads from its closure or its module, the items of lists and dictionaries, and the attributes of
    other objects.
    """
    modules: list[torch.nn.Module] = []
    visited: set[int] = set()
    waiting = [(holder, 0)]
    while waiting:
        value, depth = waiting.pop()
        if id(value) in visited or depth > MAX_DEPTH:
            continue
        visited.add(id(value))
        if isinstance(value, torch.nn.Module):
            modules.append(value)
        else:
            waiting += [(inner, depth + 1) for inner in _held_by(value)]
    return modules


def _read_by(function: Any) -> Iterator[object]:
    """The variables that a function reads from its closure and from its module."""
    try:
        names = inspect.getclosurevars(function)
    except ValueError:  # a variable of the closure has no value yet
        return
    yield from names.nonlocals.values()
    for value in names.globals.values():
        # functions of other libraries are code, not weights
        if not inspect.isfunction(value) or value.__globals__ is function.__globals__:
            yield value


def _held_by(value: Any) -> Iterator[object]:
    if isinstance(value, (type, str, bytes, torch.Tensor, np.ndarray)) or inspect.ismodule(value):
        return
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif inspect.ismethod(value):
        yield from (value.__self__, value.__func__)
    elif inspect.isfunction(value):
        yield from _read_by(value)
    elif isinstance(value, dict):
        yield from islice(value.values(), MAX_ITEMS)
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from islice(value, MAX_ITEMS)
    elif hasattr(value, "__dict__"):
        yield from vars(value).values()
