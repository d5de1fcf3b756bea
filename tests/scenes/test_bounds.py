"""A scan of large tiles is bounded by pixels: those of a network call, and those that are read at once."""

import numpy as np
import pytest
import torch
from toys import as_uint8, cosine_alphas_cumprod, pictures

import gepc
from gepc.images.batches import MAX_CHUNK_PIXELS
from gepc.scenes import scan
from gepc.scenes.reading import ArrayScene

pytestmark = pytest.mark.filterwarnings("ignore:with .* calibration images:UserWarning")


def test_no_network_call_has_more_pixels_than_a_chunk_and_no_read_more_than_a_tile(tmp_path, monkeypatch):
    calls, reads = [], []

    def eps(x, t):
        calls.append(x.shape[0] * x.shape[2] * x.shape[3])
        return torch.tanh(x * torch.linspace(0.7, 1.3, x.shape[-1]))

    backbone = gepc.Backbone.from_callable(eps, cosine_alphas_cumprod(1000), 3, 256)
    detector = gepc.GEPC(backbone, levels=(0.9,), keep=1, group=("flip_x",), batch_size=64)
    detector.fit(as_uint8(pictures(24, 256)))
    read = ArrayScene.read

    def noted(self, top, left, height, width):
        reads.append(height * width)
        return read(self, top, left, height, width)

    monkeypatch.setattr(ArrayScene, "read", noted)
    monkeypatch.setattr("gepc.scenes.writing.WINDOW_PIXELS", 1 << 16)
    np.save(tmp_path / "s.npy", as_uint8(pictures(1, (512, 1280), seed=3))[0])
    calls.clear()
    report = scan(detector, tmp_path / "s.npy", tmp_path / "out", control="tile", alpha=0.2, overlap=0.5)
    assert report.counts["scored"] == 3 * 9
    assert max(calls) <= MAX_CHUNK_PIXELS  # eight tiles of 256x256 pixels, though a batch may have 64 images
    assert max(calls) > 256 * 256
    assert max(reads) <= 256 * 256
