"""Which actions are symmetries of in-distribution images, and which of them to take: `gepc symmetries`, `group="auto"`.

The theory needs a law that is invariant under the group. For one half of the images x and the other half moved, P_g x,
a two-sample test compares small versions of the images: the maximum mean discrepancy with a Gaussian kernel, whose null
distribution comes from permutations (Gretton et al., JMLR 2012). If the law is invariant, the two halves have the same
law, so a p-value is valid for any number of images. Holm's procedure controls the probability that any true symmetry
is rejected. The network's residual, and how well it separates the images from synthetic outliers, come from the same
images. No out-of-distribution image is used.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.spatial.distance import pdist, squareform
from scipy.stats import mannwhitneyu, rankdata
from torch.nn.functional import adaptive_avg_pool2d

from gepc.backbones.base import Backbone
from gepc.core.errors import InputError
from gepc.core.rates import holm
from gepc.images.batches import OnBadImage, chunks, settled
from gepc.images.noise import generator
from gepc.images.preprocessing import Preprocessing
from gepc.images.sources import Images
from gepc.images.synthetic import KINDS, synthetic_outlier
from gepc.methods.base import Batch, extract_table, noised
from gepc.methods.extraction import ImageSample, concatenate
from gepc.methods.gepc import GepcExtractor
from gepc.methods.groups import Action, Group

Array = npt.NDArray[np.float64]
LEVEL = 0.05
PERMUTATIONS = 999
GRID = 8  # the side of the small images that are compared
DISC = 0.9  # of half their side: a rotation on the torus puts other parts of the image into the corners
LEAST_IMAGES, NETWORK_IMAGES, SAMPLE_IMAGES = 16, 64, 600
MOST_BYTES = 1 << 30  # of the images that are kept: enough of the largest ones, also if a share of them is held out
MOST_ELEMENTS = 6  # as many as the paper's group, and so as many passes
REDUNDANT = 0.95


@dataclass(frozen=True)
class Evidence:
    """What in-distribution images say about one action.

    Parameters
    ----------
    action : its name.
    p_value : the p-value of the test of the hypothesis that P_g x has the same distribution as x.
    holds : whether Holm's procedure over all actions does not reject the hypothesis.
    residual : the mean of pool(r_g^2) / b over the images.
    spread : the standard deviation of this residual over the images.
    operator_error : the mean of |P_g^-1 P_g x_t - x_t|^2 / |x_t|^2, without the network.
    power : the AUROC of synthetic outliers by |log s_g - median|; 0.5 is chance.
    weight : the weight in the chosen group; 0 if the action was left out.
    reason : why it was chosen or left out.

    Examples
    --------
    >>> from gepc.methods.symmetries import Evidence
    >>> Evidence("rot90", 0.001, False, 0.21, 0.05, 0.0, 0.83).holds
    False
    """

    action: str
    p_value: float
    holds: bool
    residual: float
    spread: float
    operator_error: float
    power: float
    weight: float = 0.0
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The evidence as JSON values, numbers to four digits."""
        facts = asdict(self).items()
        return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in facts}


def read_batch(
    images: Images,
    preprocessing: Preprocessing,
    seed: int,
    rows: int,
    allowed: Callable[[Sequence[bytes]], Iterable[bytes]] = list,
    most: int = SAMPLE_IMAGES,
) -> Batch:
    """At most `most` preprocessed images of one size: those with the smallest keys among `allowed(all keys)`."""
    if images.once:
        raise InputError("choosing symmetries reads the images twice; give a folder, list or array, not a stream")
    keys: list[bytes] = []
    sample = ImageSample(most, MOST_BYTES)
    for chunk in chunks(images, settled(preprocessing, images), rows, OnBadImage.UNREADABLE):
        keys += chunk.keys
        for key, image in zip(chunk.keys, chunk.images, strict=True):
            sample.add(key, image)
    read = sample.of(allowed(keys), most)
    first = next(iter(read.values()), None)
    chosen = {key: image for key, image in read.items() if first is not None and image.shape == first.shape}
    if len(chosen) < LEAST_IMAGES:
        raise InputError(f"a test of symmetries needs at least {LEAST_IMAGES} images of one size; got {len(chosen)}")
    return Batch(np.stack(list(chosen.values())), list(chosen), seed, rows)


def examine(method: GepcExtractor, backbone: Backbone, batch: Batch, actions: Group) -> tuple[list[Evidence], Array]:
    """Test every action other than the identity on the images of a batch.

    Parameters
    ----------
    method : the method whose pooling and levels are used; its middle level is evaluated.
    backbone : the network.
    batch : in-distribution images of one size. At most `NETWORK_IMAGES` of them are given to the network.
    actions : the actions.

    Returns
    -------
    evidence : list of Evidence
        One for every action, in their order.
    residuals : float64 array (images, actions)
        pool(r_g^2) / b of the images that were given to the network.

    See Also
    --------
    choose : a group with weights from this evidence.

    Examples
    --------
    >>> import numpy as np
    >>> from gepc import Group
    >>> from gepc.lab.analytic import GaussianBackbone
    >>> from gepc.methods.base import Batch
    >>> from gepc.methods.gepc import GepcExtractor
    >>> from gepc.methods.symmetries import examine
    >>> images = np.random.default_rng(0).normal(0.0, 0.2, (20, 1, 8, 8)).astype(np.float32)
    >>> batch = Batch(images, [bytes([number]) for number in range(20)])
    >>> evidence, residuals = examine(GepcExtractor(), GaussianBackbone.fitted(images), batch, Group.of("flips"))
    >>> [item.action for item in evidence], residuals.shape
    (['flip_x', 'flip_y', 'rot180'], (20, 3))
    """
    p_values = [invariance_p(batch, action) for action in actions.moving]
    rejected = holm(p_values, LEVEL)
    keys = batch.keys[:NETWORK_IMAGES]
    some = Batch(batch.images[:NETWORK_IMAGES], keys, batch.seed, batch.rows)
    changed = [synthetic_outlier(x, KINDS[i % len(KINDS)], batch.seed) for i, x in enumerate(some.images)]
    outliers = Batch(np.stack(changed), keys, batch.seed, batch.rows)
    inside, outside = (residuals(method, backbone, images, actions) for images in (some, outliers))
    errors = _operator_errors(backbone, some, actions, _middle(method, backbone))
    evidence = []
    for i, action in enumerate(actions.moving):
        values = inside[:, i]
        power = _power(values, outside[:, i])
        moments = (float(values.mean()), float(values.std()))
        evidence.append(Evidence(action.name, p_values[i], not rejected[i], *moments, errors[i], power))
    return evidence, inside


def choose(method: GepcExtractor, backbone: Backbone, batch: Batch) -> tuple[Group, list[Evidence]]:
    """Choose a group for these in-distribution images, with weights, and return the evidence for every candidate.

    An action is left out if the data do not have the symmetry, if its residual does not separate synthetic outliers, or
    if it ranks the images as a chosen one does. The weight is (2 power - 1) / spread, 1 on average, so that elements
    with a large residual do not drown the others.

    Parameters
    ----------
    method, backbone, batch : as in `examine`.

    Returns
    -------
    group : Group
        The chosen actions with their weights.
    evidence : list of Evidence
        One for every candidate, with the reason why it was chosen or left out.

    Examples
    --------
    >>> import numpy as np
    >>> from gepc.lab.analytic import GaussianBackbone
    >>> from gepc.methods.base import Batch
    >>> from gepc.methods.gepc import GepcExtractor
    >>> from gepc.methods.symmetries import choose
    >>> images = np.random.default_rng(0).normal(0.0, 0.2, (20, 1, 8, 8)).astype(np.float32)
    >>> batch = Batch(images, [bytes([number]) for number in range(20)])
    >>> group, evidence = choose(GepcExtractor(), GaussianBackbone.fitted(images), batch)
    >>> len(group) == 1 + sum(item.weight > 0.0 for item in evidence)
    True
    """
    colours = ["hue(120)"] if backbone.encoder is None and backbone.channels == 3 else []
    actions = Group.of([*Group.of("auto").names, *colours]).for_size(*batch.size)
    evidence, inside = examine(method, backbone, batch, actions)
    with np.errstate(invalid="ignore"):  # residuals that are all zero have no correlation
        ranks = np.abs(np.corrcoef(rankdata(inside, axis=0), rowvar=False))
    order = sorted(range(len(evidence)), key=lambda i: (not evidence[i].holds, -evidence[i].power))
    chosen: list[int] = []
    reasons: dict[int, str] = {}
    for i in order:
        reasons[i] = _objection(evidence, i, chosen, ranks)
        if not reasons[i]:
            chosen.append(i)
    on_layers = any(kind.layers and kind.per == "element" for kind in method.kinds)
    usable = [i for i in order if actions.moving[i].on_layers or not on_layers]
    if not set(usable) & set(chosen):
        best = max(usable, key=lambda i: evidence[i].p_value)
        chosen.append(best)
        reasons[best] = "the features need an action of this kind, none passed, and this one has the largest p-value"
    raw = {i: max(2.0 * evidence[i].power - 1.0, 0.01) / max(evidence[i].spread, 1e-12) for i in chosen}
    mean = sum(raw.values()) / len(raw)
    weights = {i: float(f"{value / mean:.3g}") for i, value in raw.items()}
    decided = [
        replace(item, weight=weights.get(i, 0.0), reason=reasons[i] or "chosen") for i, item in enumerate(evidence)
    ]
    return Group.of([f"{weights[i]:g}*{evidence[i].action}" for i in sorted(chosen)]), decided


def _objection(evidence: Sequence[Evidence], i: int, chosen: Sequence[int], ranks: Array) -> str:
    """Why action `i` is not added to the chosen ones; empty if it is."""
    if not evidence[i].holds:
        return f"the data are not invariant (p = {evidence[i].p_value:.3g})"
    if evidence[i].power <= 0.5:
        return "its residual does not separate synthetic outliers"
    if len(chosen) == MOST_ELEMENTS:
        return f"{MOST_ELEMENTS} others separate synthetic outliers better"
    twin = next((j for j in chosen if ranks[i, j] > REDUNDANT), None)
    return "" if twin is None else f"it ranks the images as {evidence[twin].action} does"


def invariance_p(batch: Batch, action: Action) -> float:
    """The p-value of the test that P_g x has the law of x; every second image in the order of the keys is moved."""
    order = sorted(range(len(batch)), key=lambda row: batch.keys[row])
    still, moving = order[::2], order[1::2]
    drawn = action.drawn(batch.seed, [batch.keys[row] for row in moving])
    x = _small(torch.from_numpy(batch.images[still]))
    y = _small(drawn.apply(torch.from_numpy(batch.images[moving])))
    distances = squareform(pdist(np.concatenate([x, y]), "sqeuclidean"))
    kernel = np.exp(-distances / max(float(np.median(distances)), 1e-12))
    signs = np.concatenate([np.full(len(x), 1.0 / len(x)), np.full(len(y), -1.0 / len(y))])
    rng = generator(batch.seed, b"".join(sorted(batch.keys)), f"permutations {action.name}")
    drawn_signs = rng.permuted(np.tile(signs, (PERMUTATIONS, 1)), axis=1)
    null = np.einsum("pi,pi->p", drawn_signs @ kernel, drawn_signs)
    return float((1 + (null >= signs @ kernel @ signs - 1e-12).sum()) / (PERMUTATIONS + 1))


def _small(images: torch.Tensor) -> Array:
    """Means over the cells of a coarse grid, without those outside a disc, (N, features)."""
    cells = adaptive_avg_pool2d(images.float(), GRID).flatten(2)
    y, x = np.mgrid[:GRID, :GRID] - (GRID - 1) / 2
    inside = torch.from_numpy(np.hypot(x, y).ravel() < DISC * GRID / 2)
    return cells[:, :, inside].flatten(1).double().numpy()


def residuals(method: GepcExtractor, backbone: Backbone, batch: Batch, actions: Group) -> Array:
    """pool(r_g^2) / b of each image under every action other than the identity, (N, actions), at the middle level."""
    plain = GepcExtractor(method.levels, ("s",), method.pool, method.topk, method.window, actions)
    rows = max(1, min(batch.rows, plain.chunk_pixels // (batch.size[0] * batch.size[1])))
    parts = [slice(first, first + rows) for first in range(0, len(batch), rows)]
    some = (Batch(batch.images[part], batch.keys[part], batch.seed, rows) for part in parts)
    tables = [extract_table(plain, backbone, each, (_middle(method, backbone),)) for each in some]
    return np.asarray(concatenate(tables)["s"][:, 0, 1:])


def _middle(method: GepcExtractor, backbone: Backbone) -> int:
    timesteps = method.timesteps(backbone)
    return timesteps[len(timesteps) // 2]


def _operator_errors(backbone: Backbone, batch: Batch, actions: Group, t: int) -> list[float]:
    """The mean of |P_g^-1 P_g x_t - x_t|^2 / |x_t|^2 for every action; x_0 takes the place of x_t for intensities."""
    encoded = batch.encoded(backbone)
    clean, noise = encoded.clean(backbone), encoded.noise(backbone, t)
    x_t = noised(clean, noise, float(backbone.alphas_cumprod[t]))
    errors = []
    for action in actions.moving:
        x = clean if action.kind == "intensity" else x_t
        error = action.drawn(batch.seed, batch.keys).error(x).square().sum((1, 2, 3))
        errors.append(float((error / x.square().sum((1, 2, 3)).clamp_min(1e-12)).mean()))
    return errors


def _power(inside: Array, outside: Array) -> float:
    """The AUROC of outliers by their distance from the median of the in-distribution images, in logarithms."""
    logs, others = (np.log(np.maximum(values, 1e-30)) for values in (inside, outside))
    near, far = (np.abs(values - np.median(logs)) for values in (logs, others))
    return float(mannwhitneyu(far, near).statistic / (len(near) * len(far)))
