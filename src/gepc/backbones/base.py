"""The contract of a backbone: the noise predicted in x_t at timestep t of a schedule; and backbones from functions."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pickle import PicklingError
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gepc.backbones.schedule import FloatArray, check_alphas_cumprod, log_variances
from gepc.core.errors import BackboneError, InputError, OptionError

if TYPE_CHECKING:
    import torch

    Denoiser = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Backbone(ABC):
    """A network, or any function, that predicts noise.

    A subclass implements `_predict(x, t)`: eps for images x (N, C, H, W) at schedule indices t (N,).

    Parameters
    ----------
    alphas_cumprod : the noise schedule abar_t for t = 0 ... T-1: decreasing, below 1, zero at most at its end.
    channels : image channels of the input and of the prediction; any positive number.
    image_size : side, or (height, width), of the images; None accepts every multiple of `size_multiple`.
    size_multiple : height and width must be multiples of this number.

    Attributes
    ----------
    alphas_cumprod : the schedule as a read-only float64 vector.
    image_size : (height, width), or None.
    rows : the largest number of images handed to the network at once; larger batches are split. None never splits.
    forward_count : images passed forward since the last `reset_counts` (F in the cost of a method).
    jvp_count : images differentiated in forward mode since the last `reset_counts` (J in the cost of a method).
    device : where inputs must be.
    dtype : the precision of inputs.
    learned_variance : whether the network also predicts the variance of the reverse step.
    parameters : the number of weights; None if unknown.
    source : the name or path given to `load_backbone`; None for an object made in Python.
    sha256 : hash of the weights; None for a function.
    trained_on : sorted 64-bit hashes of the images the network was trained on (`Record.content_hash`); None if unknown.
    load_options : plain values with which `load_backbone(source, **load_options)` loads the same backbone again.
    net : the network whose layers `eps_and_activations` records; None for a plain function.
    """

    family = "custom"
    learned_variance = False

    def __init__(
        self,
        alphas_cumprod: npt.ArrayLike,
        channels: int,
        image_size: int | tuple[int, int] | None = None,
        size_multiple: int = 1,
    ) -> None:
        import torch

        if not isinstance(channels, (int, np.integer)) or channels < 1:
            raise OptionError(f"channels must be a positive whole number, got {channels!r}")
        self.alphas_cumprod: FloatArray = check_alphas_cumprod(alphas_cumprod)
        self.channels = int(channels)
        self.image_size = (image_size, image_size) if isinstance(image_size, int) else image_size
        self.size_multiple = size_multiple
        self.device = torch.device("cpu")
        self.dtype: torch.dtype = torch.float32
        self.source: str | None = None
        self.sha256: str | None = None
        self.parameters: int | None = None
        self.trained_on: npt.NDArray[np.uint64] | None = None
        self.load_options: dict[str, Any] = {}
        self.net: Any = None
        self.rows: int | None = None
        self.forward_count = 0
        self.jvp_count = 0

    @abstractmethod
    def _predict(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """eps(x, t) for x (N, C, H, W) and schedule indices t (N,), both on the backbone's device."""

    def _predict_with_variance(self, x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._predict(x, t), self.per_image(log_variances(self.alphas_cumprod)[1], x, t).expand_as(x)

    @property
    def n_steps(self) -> int:
        """T, the number of timesteps of the schedule."""
        return len(self.alphas_cumprod)

    def reset_counts(self) -> None:
        """Set `forward_count` and `jvp_count` to zero."""
        self.forward_count = self.jvp_count = 0

    def eps(self, x: torch.Tensor, t: int | torch.Tensor) -> torch.Tensor:
        """Predict the noise in `x`. Costs N forward passes.

        Parameters
        ----------
        x : noised images x_t, (N, C, H, W).
        t : schedule index: one for all images, or one per image.
        """
        import torch

        with torch.set_grad_enabled(x.requires_grad):
            return self._run(lambda images, steps: (self._predict(images, steps),), x, t)[0]

    def score(self, x: torch.Tensor, t: int | torch.Tensor) -> torch.Tensor:
        """s(x, t) = -eps(x, t) / sigma_t. Parameters and cost are those of `eps`."""
        return self.eps(x, t) / -self.sigma(x, t)

    def jvp(self, x: torch.Tensor, t: int | torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """eps(x, t) and its Jacobian times `v`, by forward-mode differentiation. Costs N F and N J.

        Parameters
        ----------
        x : noised images x_t, (N, C, H, W).
        t : schedule index: one for all images, or one per image.
        v : direction of the derivative, shaped like `x`.
        """
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def differentiate(
            images: torch.Tensor, steps: torch.Tensor, directions: torch.Tensor
        ) -> tuple[torch.Tensor, ...]:
            return torch.func.jvp(lambda y: self._predict(y, steps), (images,), (directions,))[:2]

        # fused attention kernels have no forward-mode derivative; the plain one has
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            answer, tangent = self._run(differentiate, x, t, v)
        self.jvp_count += len(x)
        return answer, tangent

    def eps_and_log_variance(self, x: torch.Tensor, t: int | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """eps(x, t) and the logarithm of the variance of the reverse step, shaped like `x`. Costs N forward passes.

        The variance is the network's own if `learned_variance`, otherwise that of the scheduler or btilde_t.
        Parameters are those of `eps`.
        """
        import torch

        with torch.set_grad_enabled(x.requires_grad):
            answer, log_variance = self._run(self._predict_with_variance, x, t)
        return answer, log_variance

    def eps_and_activations(
        self, x: torch.Tensor, t: int | torch.Tensor, layers: Sequence[str] | None = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """eps(x, t) and the outputs of inner layers, (N, C_l, H_l, W_l) each, by name. Costs N forward passes.

        Parameters
        ----------
        x : noised images x_t, (N, C, H, W).
        t : schedule index: one for all images, or one per image.
        layers : names of modules, with wildcards; None chooses them, see `gepc.backbones.activations.find_layers`.
        """
        import torch

        from gepc.backbones.activations import feature_map, find_layers, recorded

        if self.net is None:
            raise BackboneError("this backbone is a plain function, whose inner activations cannot be recorded")
        size = (x.shape[-2], x.shape[-1])
        with torch.no_grad(), recorded(find_layers(self.net, layers)) as outputs:

            def network(images: torch.Tensor, steps: torch.Tensor) -> tuple[torch.Tensor, ...]:
                answer = self._predict(images, steps)
                return answer, *(feature_map(output, size) for output in outputs.values())

            answer, *maps = self._run(network, x, t)
        return answer, dict(zip(outputs, maps, strict=True))

    def _run(
        self,
        network: Callable[..., tuple[torch.Tensor, ...]],
        x: torch.Tensor,
        t: int | torch.Tensor,
        *more: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Call `network` on at most `rows` images at a time, join its answers, count the images, check the first."""
        import torch

        inputs = (x, self._timesteps(x, t), *more)
        if self.rows is None or len(x) <= self.rows:
            answers = network(*inputs)
        else:
            parts = zip(*(torch.split(values, self.rows) for values in inputs), strict=True)
            answers = tuple(map(torch.cat, zip(*(network(*part) for part in parts), strict=True)))
        self.forward_count += len(x)
        self._check_answer(answers[0], x)
        return answers

    def sigma(self, x: torch.Tensor, t: int | torch.Tensor) -> torch.Tensor:
        """sigma_t = sqrt(1 - abar_t), shaped to multiply a batch like `x`."""
        return self.per_image(np.sqrt(1.0 - self.alphas_cumprod), x, t)

    def sqrt_abar(self, x: torch.Tensor, t: int | torch.Tensor) -> torch.Tensor:
        """sqrt(abar_t), shaped to multiply a batch like `x`."""
        return self.per_image(np.sqrt(self.alphas_cumprod), x, t)

    def per_image(self, table: FloatArray, x: torch.Tensor, t: int | torch.Tensor) -> torch.Tensor:
        """Look up `table[t]` for every image, shaped to multiply a batch like `x`.

        Parameters
        ----------
        table : one number per timestep of the schedule.
        x : the batch, which sets shape, precision and device of the answer.
        t : schedule index: one for all images, or one per image.
        """
        import torch

        # `tolist`, not `numpy`: it also works inside `jvp`
        values = torch.from_numpy(table[self._timesteps(x, t).tolist()])
        return values.to(x.dtype).to(x.device).reshape(-1, *([1] * (x.ndim - 1)))

    def _timesteps(self, x: torch.Tensor, t: int | torch.Tensor) -> torch.Tensor:
        import torch

        if isinstance(t, torch.Tensor) and t.ndim > 0:
            if t.shape != (len(x),) or t.is_floating_point():
                raise InputError(
                    f"t must hold one whole number per image: {len(x)} images, t of shape {tuple(t.shape)}"
                )
            steps = t.to(device=x.device, dtype=torch.int64)
            ends = [int(t.min()), int(t.max())] if len(t) else []
        else:
            steps = torch.full((len(x),), int(t), dtype=torch.int64, device=x.device)
            ends = [int(t)]
        for index in ends:
            if not 0 <= index < self.n_steps:
                raise InputError(f"timestep {index} is outside the schedule, 0 to {self.n_steps - 1}")
        return steps

    def _check_answer(self, answer: torch.Tensor, x: torch.Tensor) -> None:
        import torch

        if answer.shape != x.shape:
            raise BackboneError(
                f"the backbone answered shape {tuple(answer.shape)} to an input of shape {tuple(x.shape)}; "
                "a noise prediction has the shape of its input"
            )
        # one reduction instead of an elementwise isfinite: a NaN or an infinity survives the sum
        if not torch.isfinite(answer.detach().sum()):
            raise BackboneError(
                "the backbone returned NaN or infinite values; check its weights, its precision and the input's range"
            )

    def check_size(self, height: int, width: int, what: str = "images") -> None:
        """Raise `InputError` unless the network accepts images of this size.

        Parameters
        ----------
        height : rows of pixels.
        width : columns of pixels.
        what : what the error message calls the images.
        """
        if self.image_size is not None and (height, width) != tuple(self.image_size):
            rows, columns = self.image_size
            raise InputError(
                f"{what} of {height}x{width} do not fit this backbone, which takes {rows}x{columns}; set `size`"
            )
        multiple = self.size_multiple
        if height % multiple or width % multiple:
            raise InputError(
                f"{what} of {height}x{width} do not fit this backbone: both sides must be multiples of {multiple}"
            )

    def settings(self) -> dict[str, Any]:
        """The choices that change a prediction beside weights and schedule (class label, precision, ...)."""
        return {}

    @property
    def fingerprint(self) -> str | None:
        """SHA-256 of weights, schedule and settings, the precision included and the device not; None for a function."""
        if self.sha256 is None:
            return None
        digest = hashlib.sha256(self.alphas_cumprod.tobytes())
        digest.update(json.dumps([self.family, self.sha256, self.settings()], sort_keys=True).encode())
        return digest.hexdigest()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # a pickle names the weights instead of holding them, and loading checks that they are the same
        if self.source is None:
            return super().__reduce_ex__(protocol)
        from gepc.backbones.load import load_again

        return load_again, (self.source, self.load_options, self.sha256)

    def __deepcopy__(self, memo: object) -> Backbone:
        return self  # copies of a detector, and clones of an estimator, share the network

    def describe(self) -> dict[str, Any]:
        """Plain values that say what the backbone is: a saved detector stores them. The device is not among them."""
        return {
            "family": self.family,
            "source": self.source,
            "sha256": self.sha256,
            "load_options": self.load_options,
            "parameters": self.parameters,
            "channels": self.channels,
            "image_size": None if self.image_size is None else list(self.image_size),
            "size_multiple": self.size_multiple,
            "timesteps": self.n_steps,
            "first_abar": float(self.alphas_cumprod[0]),
            "last_abar": float(self.alphas_cumprod[-1]),
            "precision": str(self.dtype).removeprefix("torch."),
            **self.settings(),
        }

    def __repr__(self) -> str:
        size = "any size" if self.image_size is None else "x".join(map(str, self.image_size))
        name = f"{type(self).__name__} {self.source or self.family}"
        return f"<{name}: {self.channels} channels, {size}, {self.n_steps} steps>"

    @staticmethod
    def from_callable(
        eps: Denoiser,
        alphas_cumprod: npt.ArrayLike,
        channels: int = 3,
        image_size: int | tuple[int, int] | None = None,
        size_multiple: int = 1,
        device: str | torch.device | None = None,
    ) -> Backbone:
        """Make a backbone of a function that predicts noise.

        Parameters
        ----------
        eps : eps(x, t) for images x (N, C, H, W) in [-1, 1] and indices t (N,) into `alphas_cumprod`. A
            `torch.nn.Module` is put in eval mode.
        alphas_cumprod : the noise schedule, see `Backbone`.
        channels : image channels; any positive number.
        image_size : side, or (height, width), of the images; None accepts every multiple of `size_multiple`.
        size_multiple : height and width must be multiples of this number.
        device : where the function runs; None is the device of a module's parameters, otherwise the CPU.
        """
        return CallableBackbone(eps, alphas_cumprod, channels, image_size, size_multiple, device)

    @staticmethod
    def from_denoiser(
        denoiser: Denoiser,
        sigmas: npt.ArrayLike,
        channels: int = 3,
        image_size: int | tuple[int, int] | None = None,
        size_multiple: int = 1,
        device: str | torch.device | None = None,
    ) -> Backbone:
        """Make a backbone of D(y, sigma), an estimate of x_0 from y = x_0 + sigma noise (EDM, VE, blind denoisers).

        Parameters
        ----------
        denoiser : D(y, sigma) for images y (N, C, H, W) and one noise level per image, sigma (N,). One that does not
            know the level is `lambda y, sigma: net(y)`.
        sigmas : the noise levels to offer, ascending, in units where images lie in [-1, 1].
        channels : image channels; any positive number.
        image_size : side, or (height, width), of the images; None accepts every multiple of `size_multiple`.
        size_multiple : height and width must be multiples of this number.
        device : where the function runs; None is the device of a module's parameters, otherwise the CPU.
        """
        return DenoiserBackbone(denoiser, sigmas, channels, image_size, size_multiple, device)


class CallableBackbone(Backbone):
    """eps(x, t) from a function, see `Backbone.from_callable`."""

    family = "callable"

    def __init__(
        self,
        function: Denoiser,
        alphas_cumprod: npt.ArrayLike,
        channels: int,
        image_size: int | tuple[int, int] | None,
        size_multiple: int,
        device: str | torch.device | None,
    ) -> None:
        import torch

        super().__init__(alphas_cumprod, channels, image_size, size_multiple)
        weights: list[torch.nn.Parameter] = []
        if isinstance(function, torch.nn.Module):
            self.net = function
            weights = list(function.eval().parameters())
            self.parameters = sum(weight.numel() for weight in weights)
        self.device = torch.device(device or (weights[0].device if weights else "cpu"))
        self._function = function

    def _predict(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self._function(x, t)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PicklingError(
            "a backbone made of a Python function cannot be pickled: a pickle holds no code, and nothing would tell "
            "whether the function is the same when it is loaded. Save the detector with detector.save(folder), and "
            "load it with gepc.load_detector(folder, backbone)"
        )


class DenoiserBackbone(CallableBackbone):
    """A denoiser in variance-exploding coordinates: with y = x_t/sqrt(abar), eps = (y - D(y, sigma))/sigma.

    The level sigma is the method's rho, so abar = 1/(1 + sigma^2).
    """

    family = "denoiser"

    def __init__(self, denoiser: Denoiser, sigmas: npt.ArrayLike, *geometry: Any) -> None:
        levels = np.array(sigmas, dtype=np.float64).reshape(-1)
        if levels.size == 0 or not (np.isfinite(levels).all() and (levels > 0).all() and (np.diff(levels) > 0).all()):
            raise InputError("sigmas must be positive, finite and ascending")
        super().__init__(denoiser, 1.0 / (1.0 + levels**2), *geometry)
        self._sigmas = levels

    def _predict(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        sigma = self.per_image(self._sigmas, x, t)
        y = x * (1.0 + sigma**2).sqrt()
        return (y - self._function(y, sigma.flatten())) / sigma
