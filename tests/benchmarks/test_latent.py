"""The latent benchmark on a few random pictures: trains, resumes, and makes its table."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from toys import as_uint8, pictures

import gepc
from gepc.lab.bench.protocol import load_protocol


def test_it_trains_resumes_and_makes_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate", reason="training needs gepc[train]")
    import latent

    for place, name in enumerate(("celeba32", "svhn32")):
        train, test = (as_uint8(pictures(48, 32, seed=10 * place + part)) for part in (0, 1))
        np.savez(tmp_path / f"{name}.npz", train_x=train, test_x=test)
    ticks = itertools.count()  # every step takes a second
    clock = SimpleNamespace(monotonic=lambda: float(next(ticks)), perf_counter=time.perf_counter)
    monkeypatch.setattr(latent, "time", clock)
    monkeypatch.setattr(latent, "BATCH", 4)
    images = pictures(48, 32)
    latent.train_autoencoder(images, tmp_path, 2 / 60, 8)  # interrupted after two steps of three
    pipeline = latent.make_pipeline(tmp_path, tmp_path, (3 / 60, 0.005), 48, 8)
    steps = [json.loads(line)["step"] for line in (tmp_path / "autoencoder.jsonl").read_text().splitlines()]
    assert steps == [2, 3]
    backbone = gepc.load_backbone(pipeline, device="cpu")
    assert (backbone.channels, backbone.inner.channels, backbone.factor) == (3, 4, 2)
    assert 0 < latent.reconstruction_error(pipeline, tmp_path) < 4

    small = load_protocol("small32", {"train_images": 24, "test_images": 20})
    protocol = dataclasses.replace(small, pairs={"celeba": ("svhn",)}, levels=small.levels)
    table = latent.table_of(backbone, backbone, protocol, tmp_path, "both the same")
    assert table.header == ("network in", "CelebA:SVHN", "mean", "passes", "time per image")
    assert [row[3] for row in table.rows] == ["2F+0J+1E"] * 2
    assert table.rows[0][1] == table.rows[1][1]
