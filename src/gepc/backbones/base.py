"""The contract of a backbone: it predicts the noise in x_t at timestep t of a schedule. Latents and plain functions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pickle import PicklingError
from threading import RLock
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from gepc.backbones.activations import feature_map, find_layers, recorded
from gepc.backbones.identity import Identity, digest_of, modules_in
from gepc.backbones.path import GaussianPath, NoiseSchedule, check_timesteps, look_up
from gepc.backbones.schedule import check_alphas_cumprod, log_variances
from gepc.core.errors import BackboneError, InputError, OptionError, check_choice, check_least
from gepc.core.files import digest
from gepc.images.formats import size_text

Denoiser = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
LatentEncoder = Callable[[torch.Tensor], torch.Tensor]
ACT_ON = ("latents", "pixels")
ONE_PASS = RLock()
"""Held during a pass. Hooks of modules, forward-mode derivatives and the choice of attention kernels act on the whole
process: a pass in another thread would answer with the activations of other images."""
REMEMBERED = 1 << 28  # bytes of answers that are kept inside `shared_passes`
_ANSWERS: ContextVar[dict[str, torch.Tensor] | None] = ContextVar("answers", default=None)
ENCODED_PIXELS = 2**18  # the pixels in one call of an encoder, whose activations are 100 times as large as the images


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

    Returns
    -------
    Backbone
        A backbone that calls the function. A saved detector does not contain the function: give the backbone again to
        `load_detector`.

    Raises
    ------
    InputError : `alphas_cumprod` does not fall from below 1 towards 0.

    Examples
    --------
    The noise prediction for images that are all zero:

    >>> import gepc, torch
    >>> abar = [0.99, 0.9, 0.5]
    >>> sigma = (1 - torch.tensor(abar)).sqrt()
    >>> eps = lambda x, t: x / sigma[t].reshape(-1, 1, 1, 1)
    >>> backbone = gepc.Backbone.from_callable(eps, abar, channels=1)
    >>> round(float(backbone.eps(torch.ones(2, 1, 8, 8), 1).mean()), 4)
    3.1623

    See Also
    --------
    from_denoiser, from_flow : for networks that predict something else.
    load_backbone : for files, folders and diffusers objects.
    """
    path = GaussianPath(check_alphas_cumprod(alphas_cumprod))
    return CallableBackbone("callable", eps, path, channels, image_size, size_multiple, device)


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
    channels, image_size, size_multiple, device : see `from_callable`.

    Returns
    -------
    Backbone
        A backbone whose schedule has abar = 1/(1 + sigma^2) at each level.

    Raises
    ------
    InputError : `sigmas` are not positive, finite and ascending.

    Examples
    --------
    >>> import gepc, torch
    >>> backbone = gepc.Backbone.from_denoiser(lambda y, sigma: torch.zeros_like(y), [0.1, 1.0], channels=1)
    >>> backbone.alphas_cumprod.round(3).tolist()
    [0.99, 0.5]

    See Also
    --------
    from_callable, from_flow : for networks that predict noise or a velocity.
    """
    path = GaussianPath.of_denoiser(sigmas)
    return CallableBackbone("denoiser", denoiser, path, channels, image_size, size_multiple, device)


def from_flow(
    velocity: Denoiser,
    channels: int = 3,
    image_size: int | tuple[int, int] | None = None,
    size_multiple: int = 1,
    device: str | torch.device | None = None,
    *,
    data_time: float = 0.0,
    noise_time: float = 1.0,
    levels: npt.ArrayLike | None = None,
) -> Backbone:
    """Make a backbone of a flow-matching network (rectified flow, conditional flow matching).

    The path is straight, y = (1-s) x_0 + s n, and eps = y + (1-s) (n - x_0). The network predicts n - x_0 if time
    runs from data to noise, and x_0 - n if it runs from noise to data.

    Parameters
    ----------
    velocity : v(y, time) for y (N, C, H, W) and one time per image, (N,).
    channels, image_size, size_multiple, device : see `from_callable`.
    data_time : the time at which y is an image: 0, or 1 in torchcfm and flow_matching.
    noise_time : the time at which y is noise: 1, or 0 in torchcfm and flow_matching, or 1000 in diffusers.
    levels : the shares of noise s to offer, ascending in (0, 1]; None is 1000 levels, even in log s/(1-s), with
        s/(1-s) from 0.002 to 80.

    Returns
    -------
    Backbone
        A backbone whose schedule has abar = (1-s)^2/((1-s)^2 + s^2) at each level.

    Raises
    ------
    InputError : `levels` are not ascending in (0, 1].
    OptionError : `data_time` and `noise_time` are equal.

    Examples
    --------
    >>> import gepc, torch
    >>> velocity = lambda y, time: torch.zeros_like(y)
    >>> gepc.Backbone.from_flow(velocity, channels=1, levels=[0.5]).alphas_cumprod.round(9).tolist()
    [0.5]

    See Also
    --------
    from_callable, from_denoiser : for networks that predict noise or x_0.
    """
    if levels is None:
        rho = np.geomspace(0.002, 80.0, 1000)
        levels = rho / (1.0 + rho)
    path = GaussianPath.of_flow(levels, data_time, noise_time)
    return CallableBackbone("flow", velocity, path, channels, image_size, size_multiple, device)


def with_encoder(
    backbone: Backbone, encoder: LatentEncoder, factor: int, channels: int = 3, act_on: str = "latents"
) -> Backbone:
    """Put an encoder in front of a backbone, which then sees the latents of images.

    Parameters
    ----------
    backbone : the backbone that predicts the noise in latents; as a method, the object itself.
    encoder : images (N, `channels`, H, W) in [-1, 1] -> latents (N, c, H/`factor`, W/`factor`), c the channels of
        this backbone. It must be deterministic: the mode of a variational encoder, without quantisation.
    factor : pixels per side of a latent's cell.
    channels : image channels.
    act_on : what the elements of a group act on. `latents` moves the latents by whole cells. `pixels` moves the
        image (shifts by `factor` pixels), encodes it and moves the prediction back by whole cells: this adds how
        far the encoder itself is from equivariance, and costs an encoder pass per element.

    Returns
    -------
    LatentBackbone
        A backbone that encodes images and passes their latents to the given backbone.

    Raises
    ------
    OptionError : the backbone has an encoder already, or does not predict noise.

    Examples
    --------
    >>> import torch
    >>> from gepc.lab.analytic import GaussianBackbone
    >>> pool = torch.nn.AvgPool2d(2)
    >>> latent = GaussianBackbone(0.0, 0.1, (3, 8, 8)).with_encoder(pool, factor=2)
    >>> latent.image_size, latent.encode(torch.zeros(1, 3, 16, 16)).shape
    ((16, 16), torch.Size([1, 3, 8, 8]))

    See Also
    --------
    load_backbone : a pipeline with an autoencoder becomes a latent backbone by itself.
    """
    return LatentBackbone(backbone, encoder, factor, channels, act_on)


def check_size(backbone: Backbone, height: int, width: int, what: str = "images") -> None:
    """Check that the network accepts images of this size.

    Parameters
    ----------
    backbone : the backbone that takes the images; as a method, the object itself.
    height, width : the size of the images in pixels.
    what : names the images in the message.

    Raises
    ------
    InputError : the size is not that of the network, or not a multiple of `size_multiple`.

    Examples
    --------
    >>> import gepc
    >>> gepc.load_backbone("photos-small", device="cpu").check_size(30, 31)  # doctest: +NORMALIZE_WHITESPACE
    Traceback (most recent call last):
    gepc.core.errors.InputError: images of 31x30 pixels (width x height) do not fit this backbone: both sides must be
    multiples of 4
    """
    misfit, multiple = f"{what} of {size_text((height, width))} do not fit this backbone", backbone.size_multiple
    if backbone.image_size is not None and (height, width) != tuple(backbone.image_size):
        rows, columns = backbone.image_size
        raise InputError(f"{misfit}, which takes {columns}x{rows}; set `size`", options=("size",))
    if height % multiple or width % multiple:
        raise InputError(f"{misfit}: both sides must be multiples of {multiple}")


@contextmanager
def _contiguous_norms(net: Any) -> Iterator[None]:
    """Give group norms contiguous input in the block: their forward-mode derivative takes no other."""
    modules = net.modules() if isinstance(net, torch.nn.Module) else ()
    norms = [module for module in modules if isinstance(module, torch.nn.GroupNorm)]
    hooks = [norm.register_forward_pre_hook(lambda _, inputs: (inputs[0].contiguous(),)) for norm in norms]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _in_parts(
    network: Callable[..., tuple[torch.Tensor, ...]], inputs: tuple[torch.Tensor, ...], rows: int | None
) -> tuple[tuple[torch.Tensor, ...], int | None]:
    """Call `network` on at most `rows` images at a time and join its answers; return them and `rows`.

    `rows` is halved until a part fits into the memory of the device.
    """
    count = len(inputs[0])
    try:
        if rows is None or count <= rows:
            return network(*inputs), rows
        parts = zip(*(torch.split(values, rows) for values in inputs), strict=True)
        return tuple(map(torch.cat, zip(*(network(*part) for part in parts), strict=True))), rows
    except torch.OutOfMemoryError:
        used = min(count, rows or count)
        if used == 1:
            raise
    return _in_parts(network, inputs, used // 2)


class PassCounts:
    """The cost of a backbone so far: `Backbone` documents the attributes."""

    forward_count = jvp_count = encoder_count = 0

    def reset_counts(self) -> None:
        """Set `forward_count`, `jvp_count` and `encoder_count` to zero.

        Examples
        --------
        >>> import torch
        >>> from gepc.lab.analytic import GaussianBackbone
        >>> backbone = GaussianBackbone(0.0, 0.1, (1, 8, 8))
        >>> _ = backbone.eps(torch.zeros(3, 1, 8, 8), 0)
        >>> backbone.reset_counts()
        >>> backbone.counts
        (0, 0, 0)
        """
        self.counts = (0, 0, 0)

    @property
    def counts(self) -> tuple[int, int, int]:
        """(`forward_count`, `jvp_count`, `encoder_count`)."""
        return self.forward_count, self.jvp_count, self.encoder_count

    @counts.setter
    def counts(self, counts: tuple[int, int, int]) -> None:
        self.forward_count, self.jvp_count, self.encoder_count = counts


class Backbone(NoiseSchedule, PassCounts, Identity, ABC):
    """A network, or any function, that predicts noise.

    A subclass implements `_predict(x, t)`, which gives eps for images x (N, C, H, W) at schedule indices t (N,).

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
    encoder_count : images encoded since the last `reset_counts` (E in the cost of a method).
    encoder : images -> latents; None unless this is a `LatentBackbone`.
    factor : pixels per side of a latent's cell; 1 without an encoder.
    pixels_per_cell : pixels per side of a cell of the network's input; some networks are told the size of the image.
    act_on : what a group acts on behind an encoder: `latents`, or `pixels`, see `with_encoder`.
    conditioning : the embeddings that a text-conditional network is given, by name; a saved detector stores them.
    device : where inputs must be.
    dtype : the precision of inputs.
    learned_variance : whether the network also predicts the variance of the reverse step.
    parameters : the number of weights; None if unknown.
    source : the name or path given to `load_backbone`; None for an object made in Python.
    location : `source`, as an absolute path if it is one: detectors and pickles are loaded from any working directory.
    sha256 : hash of the weights; None if they cannot be found, as in a plain function.
    trained_on : sorted 64-bit hashes of the images the network was trained on (`Record.content_hash`); None if unknown.
    load_options : plain values with which `load_backbone(source, **load_options)` loads the same backbone again.
    net : the network whose layers `eps_and_activations` records; None for a plain function.
    gives : what the network answers, which a method may need: `noise predictions` or `energies`.

    Examples
    --------
    >>> import gepc, torch
    >>> class Shrink(gepc.Backbone):
    ...     def _predict(self, x, t):
    ...         return x / self.sigma(x, t)
    >>> backbone = Shrink(alphas_cumprod=[0.99, 0.9], channels=1, image_size=8)
    >>> backbone.eps(torch.zeros(5, 1, 8, 8), 1).shape, backbone.forward_count
    (torch.Size([5, 1, 8, 8]), 5)

    See Also
    --------
    load_backbone : load a network from a file, a folder or the hub.
    """

    gives = "noise predictions"
    learned_variance = False
    encoder: LatentEncoder | None = None
    factor = pixels_per_cell = 1
    act_on = "latents"
    net: Any = None
    rows: int | None = None
    from_callable = staticmethod(from_callable)
    from_denoiser = staticmethod(from_denoiser)
    from_flow = staticmethod(from_flow)
    with_encoder = with_encoder
    check_size = check_size

    @abstractmethod
    def _predict(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """eps(x, t) for x (N, C, H, W) and schedule indices t (N,), both on the backbone's device."""

    def _predict_with_variance(self, x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._predict(x, t), self.per_image(log_variances(self.alphas_cumprod)[1], x, t).expand_as(x)

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        """The latents of images (N, C, H, W) in [-1, 1]: the images themselves without an encoder, at no cost."""
        return images

    def network_shape(self, size: tuple[int, int]) -> tuple[int, int, int]:
        """(C, H, W) of the network's input for images of `size` (H, W)."""
        return self.channels, *size

    def eps(self, x: torch.Tensor, t: int | torch.Tensor) -> torch.Tensor:
        """Predict the noise in `x`. Costs N forward passes.

        Parameters
        ----------
        x : noised images x_t, a tensor (N, C, H, W) on the backbone's device.
        t : schedule index: a whole number for all images, or a tensor (N,) of them.

        Returns
        -------
        torch.Tensor (N, C, H, W)
            eps(x, t), with the type of `x`.

        Raises
        ------
        InputError : `t` is outside the schedule, or is not one whole number per image.
        BackboneError : the answer has another shape than `x`, or is not finite.

        Examples
        --------
        The exact answer for Gaussian data, x_0 ~ N(0, 0.1^2): eps = sigma x / (0.01 abar + sigma^2).

        >>> import torch
        >>> from gepc.lab.analytic import GaussianBackbone
        >>> backbone = GaussianBackbone(0.0, 0.01, (1, 8, 8))
        >>> x, t = torch.ones(1, 1, 8, 8, dtype=torch.float64), 300
        >>> abar = backbone.alphas_cumprod[t]
        >>> expected = (1 - abar) ** 0.5 / (0.01 * abar + 1 - abar)
        >>> bool(abs(float(backbone.eps(x, t).mean()) - expected) < 1e-9)
        True

        See Also
        --------
        score : the score instead of the noise.
        eps_and_log_variance, eps_and_activations : what else a network answers.
        """
        known = _ANSWERS.get()
        if known is None or x.requires_grad:
            return self._noise(x, t)
        content = x.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        key = digest([id(self), torch.as_tensor(t).tolist(), list(x.shape)], keys=[content])
        if key in known:
            return known[key]
        answer = self._noise(x, t)
        if sum(kept.nbytes for kept in known.values()) + answer.nbytes <= REMEMBERED:
            known[key] = answer
        return answer

    def _noise(self, x: torch.Tensor, t: int | torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(x.requires_grad):
            return self._run(lambda images, steps: (self._predict(images, steps),), x, t)[0]

    def one_pass(self, x: torch.Tensor) -> torch.Tensor:
        """Return the answer of the network to `x` at the first timestep. Commands time this pass."""
        return self.eps(x, 0)

    def score(self, x: torch.Tensor, t: int | torch.Tensor) -> torch.Tensor:
        """Compute the score s(x, t) = -eps(x, t) / sigma_t. Costs N forward passes.

        Parameters
        ----------
        x, t : as for `eps`.

        Returns
        -------
        torch.Tensor (N, C, H, W)
            s(x, t), with the type of `x`.

        Examples
        --------
        >>> import torch
        >>> from gepc.lab.analytic import GaussianBackbone
        >>> backbone, x = GaussianBackbone(0.0, 0.1, (1, 8, 8)), torch.ones(1, 1, 8, 8)
        >>> torch.allclose(backbone.score(x, 9) * backbone.sigma(x, 9), -backbone.eps(x, 9))
        True

        See Also
        --------
        eps : the noise instead of the score.
        """
        return self.eps(x, t) / -self.sigma(x, t)

    def jvp(self, x: torch.Tensor, t: int | torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute eps(x, t) and its Jacobian times `v`, by forward-mode differentiation. Costs N F and N J.

        Parameters
        ----------
        x, t : as for `eps`.
        v : direction of the derivative, shaped like `x`.

        Returns
        -------
        tuple of two torch.Tensor (N, C, H, W)
            eps(x, t), and d/dh eps(x + h v, t) at h = 0.

        Examples
        --------
        The prediction for Gaussian data of mean 0 is linear in x, so it is its own derivative in the direction x:

        >>> import torch
        >>> from gepc.lab.analytic import GaussianBackbone
        >>> backbone, x = GaussianBackbone(0.0, 0.1, (1, 8, 8)), torch.rand(2, 1, 8, 8)
        >>> answer, derivative = backbone.jvp(x, 9, x)
        >>> torch.allclose(answer, derivative), backbone.counts
        (True, (2, 2, 0))

        See Also
        --------
        eps : without the derivative.
        """

        def differentiate(y: torch.Tensor, steps: torch.Tensor, direction: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return torch.func.jvp(lambda z: self._predict(z, steps), (y,), (direction,))[:2]

        # fused attention kernels have no forward-mode derivative; the plain one has
        with ONE_PASS, torch.no_grad(), sdpa_kernel(SDPBackend.MATH), _contiguous_norms(self.net):
            answer, tangent = self._run(differentiate, x, t, v)
            self.jvp_count += len(x)
        return answer, tangent

    def eps_and_log_variance(self, x: torch.Tensor, t: int | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute eps(x, t) and the log-variance of the reverse step, shaped like `x`. Costs N forward passes.

        The variance is the network's own if `learned_variance`, otherwise that of the scheduler or btilde_t.

        Parameters
        ----------
        x, t : as for `eps`.

        Returns
        -------
        tuple of two torch.Tensor (N, C, H, W)
            eps(x, t), and the log-variance.

        Examples
        --------
        >>> import torch
        >>> from gepc.lab.analytic import GaussianBackbone
        >>> backbone = GaussianBackbone(0.0, 0.1, (1, 8, 8))
        >>> [tuple(values.shape) for values in backbone.eps_and_log_variance(torch.zeros(2, 1, 8, 8), 9)]
        [(2, 1, 8, 8), (2, 1, 8, 8)]

        See Also
        --------
        gepc.backbones.schedule.log_variances : the two limits of the variance.
        """
        with torch.set_grad_enabled(x.requires_grad):
            answer, log_variance = self._run(self._predict_with_variance, x, t)
        return answer, log_variance

    def eps_and_activations(
        self, x: torch.Tensor, t: int | torch.Tensor, layers: Sequence[str] | None = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute eps(x, t) and the outputs of inner layers, (N, C_l, H_l, W_l) each. Costs N forward passes.

        Parameters
        ----------
        x, t : as for `eps`.
        layers : names of modules, with wildcards; None chooses them, see `gepc.backbones.activations.find_layers`.

        Returns
        -------
        tuple of torch.Tensor (N, C, H, W) and dict of str to torch.Tensor (N, C_l, H_l, W_l)
            eps(x, t), and the activations by the name of the layer.

        Raises
        ------
        BackboneError : the backbone is a plain function, which has no layers.
        OptionError : the network has no module of that name.

        Examples
        --------
        >>> import gepc, torch
        >>> backbone = gepc.load_backbone("photos-small", device="cpu")
        >>> _, maps = backbone.eps_and_activations(torch.zeros(1, 3, 32, 32), 100, ["conv_in"])
        >>> {name: tuple(values.shape) for name, values in maps.items()}
        {'conv_in': (1, 16, 32, 32)}

        See Also
        --------
        gepc.Encoder : the activations of a network that does not predict noise.
        """
        if self.net is None:
            raise BackboneError("this backbone is a plain function, whose inner activations cannot be recorded")
        size = (x.shape[-2], x.shape[-1])
        with ONE_PASS, torch.no_grad(), recorded(find_layers(self.net, layers)) as outputs:

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
        shape: tuple[int, ...] | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Call `network` on at most `rows` images at a time, join its answers, and count the images.

        The first answer must be finite and have the given `shape`, by default that of `x`.
        """
        with ONE_PASS:
            answers, self.rows = _in_parts(network, (x, check_timesteps(t, x, self.n_steps), *more), self.rows)
            self.forward_count += len(x)
        if answers[0].shape != (x.shape if shape is None else shape):
            meant = "a noise prediction has the shape of its input" if shape is None else f"expected {shape}"
            given, found = tuple(x.shape), tuple(answers[0].shape)
            raise BackboneError(f"the backbone answered shape {found} to an input of shape {given}; {meant}")
        # one reduction instead of an elementwise isfinite: a NaN or an infinity survives the sum
        if not answers[0].is_meta and not torch.isfinite(answers[0].detach().sum()):
            raise BackboneError("the backbone returned NaN or infinite values; check weights, precision and the input")
        return answers


@contextmanager
def shared_passes() -> Iterator[None]:
    """In the block, eps(x, t) of the same network, x and t is answered from memory, without counting it again.

    Each thread and each block remembers its own answers.
    """
    token = _ANSWERS.set({})
    try:
        yield
    finally:
        _ANSWERS.reset(token)


class LatentBackbone(Backbone):
    """A backbone that sees the latents z of images, behind an encoder; see `Backbone.with_encoder`.

    `channels`, `image_size` and `size_multiple` are those of the images. `eps` and the other passes take latents.

    Parameters
    ----------
    inner : the backbone that predicts the noise in latents.
    encoder, factor, channels, act_on : see `Backbone.with_encoder`. The encoder may have an attribute `settings` with
        plain values that describe it. If `sha256` is set, it must cover the weights of the encoder too.
    """

    def __init__(
        self, inner: Backbone, encoder: LatentEncoder, factor: int, channels: int = 3, act_on: str = "latents"
    ) -> None:
        check_choice("act_on", act_on, ACT_ON)
        if inner.encoder is not None:
            raise OptionError("this backbone has an encoder already; give a backbone without one")
        if inner.gives != Backbone.gives:
            raise OptionError(f"an encoder needs a network that predicts noise, and this one gives {inner.gives}")
        check_least(1, factor=factor)
        rows, columns = inner.image_size or (0, 0)
        size = None if inner.image_size is None else (rows * factor, columns * factor)
        super().__init__(inner.alphas_cumprod, channels, size, inner.size_multiple * factor)
        self.inner = inner
        self.encoder, self.factor, self.act_on = encoder, factor, act_on
        self.family, self.learned_variance, self.parameters = inner.family, inner.learned_variance, inner.parameters
        self.device, self.dtype, self.net, self.rows = inner.device, inner.dtype, inner.net, inner.rows
        self.conditioning, self.trained_on = inner.conditioning, inner.trained_on
        inner.pixels_per_cell = factor

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        """The latents of images (N, C, H, W) in [-1, 1]. Costs N encoder passes."""
        assert self.encoder is not None
        rows = max(1, ENCODED_PIXELS // (images.shape[-2] * images.shape[-1]))
        with ONE_PASS, torch.no_grad():
            latents = torch.cat([self.encoder(part) for part in torch.split(images, rows)]).to(images)
            self.encoder_count += len(images)
        expected = (len(images), *self.network_shape((images.shape[-2], images.shape[-1])))
        if latents.shape != expected:
            raise BackboneError(f"the encoder answered latents of shape {tuple(latents.shape)}, expected {expected}")
        return latents

    def network_shape(self, size: tuple[int, int]) -> tuple[int, int, int]:
        """(C, H, W) of the latents of images of `size` (H, W)."""
        return self.inner.channels, size[0] // self.factor, size[1] // self.factor

    def _predict(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self.inner._predict(x, t)

    def _predict_with_variance(self, x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner._predict_with_variance(x, t)

    def _digest(self) -> str | None:
        return self.inner.sha256

    @property
    def unchecked(self) -> list[str]:
        """The parts whose weights cannot be compared when a saved detector is loaded."""
        if self._sha256 is not None:
            return []
        return self.inner.unchecked + ([] if modules_in(self.encoder) else ["encoder"])

    def identity(self) -> dict[str, Any]:
        """The identity of the inner backbone and that of the encoder."""
        about = getattr(self.encoder, "settings", {"factor": self.factor, "channels": self.inner.channels})
        facts = {**self.inner.identity(), "encoder": about, "act_on": self.act_on}
        if self._sha256 is None:  # otherwise it covers the encoder
            facts["encoder_sha256"] = digest_of(modules_in(self.encoder))
        return facts

    def describe(self) -> dict[str, Any]:
        """Plain values that say what the backbone is."""
        return {**self.inner.describe(), **super().describe()}


class CallableBackbone(Backbone):
    """eps(x, t) from a function on a Gaussian path; see `Backbone.from_callable`, `from_denoiser` and `from_flow`."""

    def __init__(
        self,
        family: str,
        function: Denoiser,
        path: GaussianPath,
        channels: int,
        image_size: int | tuple[int, int] | None,
        size_multiple: int,
        device: str | torch.device | None,
    ) -> None:
        super().__init__(path.alphas_cumprod, channels, image_size, size_multiple)
        weights: list[torch.nn.Parameter] = []
        if isinstance(function, torch.nn.Module):
            self.net = function
            weights = list(function.eval().parameters())
            self.parameters = sum(weight.numel() for weight in weights)
        self.device = torch.device(device or (weights[0].device if weights else "cpu"))
        self.family = family
        self._function, self._path = function, path

    def _predict(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        table_at = partial(look_up, x=x, t=t)
        y, given = self._path.network_input(x, table_at)
        times = t if self._path.times is None else table_at(self._path.times).flatten()
        return self._path.eps(self._function(given, times), y, table_at)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PicklingError(
            "a backbone made of a Python function cannot be pickled: a pickle holds no code, and nothing would tell "
            "whether the function is the same when it is loaded. Save the detector with detector.save(folder), and "
            "load it with gepc.load_detector(folder, backbone)"
        )
