"""What the tests share: one thread, exact repetition, a tiny network and where the real data lies."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import typer.main
from hypothesis import settings

if TYPE_CHECKING:
    from diffusers import UNet2DModel

    from gepc import Backbone

sys.path.insert(0, str(Path(__file__).parent))  # toys.py and literal_gepc.py, which are imported by name
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start: every core already runs a worker
os.environ.pop("GEPC_TRUST", None)  # tests that follow the paths of detector folders use the fixture `trusted`
_state = tempfile.TemporaryDirectory(prefix="gepc-state-")  # removed when the tests end
os.environ["GEPC_STATE"] = _state.name  # tests neither read nor change which networks this user has
typer.main.get_command = functools.cache(typer.main.get_command)  # it builds every command for each call, in 50 ms
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None, max_examples=30)
settings.register_profile("random", deadline=None, print_blob=True, max_examples=300)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture(scope="module")
def trusted() -> Iterator[None]:
    """Follow the paths of networks that detector folders name, for modules whose folders are their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GEPC_TRUST", "1")
        yield


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Real images, in the folder that GEPC_DATA names."""
    if "GEPC_DATA" not in os.environ:
        pytest.skip("real images need the environment variable GEPC_DATA, the folder that holds celeba32.npz")
    return Path(os.environ["GEPC_DATA"])


def random_unet(**options: Any) -> UNet2DModel:
    """A random UNet for 16x16 colour images, in eval mode."""
    from diffusers import UNet2DModel

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return UNet2DModel(sample_size=16, layers_per_block=1, **options).eval()


@pytest.fixture(scope="session")
def tiny_net() -> UNet2DModel:
    """A network with attention."""
    return random_unet(
        block_out_channels=(8, 16),
        norm_num_groups=4,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )


@pytest.fixture(scope="session")
def plain_net() -> UNet2DModel:
    """A network of 4 channels without attention, a third of the work: for tests of what happens around it."""
    return random_unet(
        block_out_channels=(4, 4),
        norm_num_groups=2,
        add_attention=False,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )


@pytest.fixture
def tiny_unet(tiny_net: UNet2DModel) -> Backbone:
    """The tiny network as a backbone on the paper's schedule, its counters at zero."""
    import gepc
    from gepc.backbones.schedule import cosine_alphas_cumprod

    def eps(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return tiny_net(x, t).sample

    return gepc.Backbone.from_callable(eps, cosine_alphas_cumprod(4000), channels=3, image_size=16)
