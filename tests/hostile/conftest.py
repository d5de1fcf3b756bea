"""A detector on disk that was fitted on a small network, images as bytes, and files that are slow to decode."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image
from toys import as_uint8, pictures


@pytest.fixture(autouse=True)
def _from_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Folders come from someone else: this user has no networks."""
    monkeypatch.setenv("GEPC_STATE", str(tmp_path / "state"))


def encoded(pixels: npt.NDArray[np.uint8], kind: str = "PNG", **options: object) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format=kind, **options)
    return out.getvalue()


@pytest.fixture(scope="session")
def photo() -> npt.NDArray[np.uint8]:
    return as_uint8(pictures(1, (24, 20), seed=7))[0]


@pytest.fixture(scope="session")
def slow_jpeg() -> bytes:
    """A progressive JPEG whose last scan, of a few hundred bytes, is repeated 40,000 times: minutes to decode."""
    whole = encoded(np.zeros((4000, 4000), dtype=np.uint8), "JPEG", progressive=True)
    last = whole.rindex(b"\xff\xda")
    return whole[:-2] + whole[last:-2] * (1_300_000 // (len(whole) - last)) + whole[-2:]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory, tiny_net) -> Path:
    """`det`, a detector that was fitted with the backbone `net` beside it."""
    from diffusers import DDPMScheduler

    import gepc

    root = tmp_path_factory.mktemp("hostile")
    tiny_net.save_pretrained(root / "net")
    DDPMScheduler(beta_schedule="squaredcos_cap_v2").save_pretrained(root / "net")
    backbone = gepc.load_backbone(str(root / "net"))
    gepc.GEPC(backbone, levels=(0.99, 0.9), size=16).fit(as_uint8(pictures(60, 16))).save(root / "det")
    return root / "det"
