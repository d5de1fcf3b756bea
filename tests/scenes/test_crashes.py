"""A scan that ends at any file operation: the same call completes it, with the files of an uninterrupted scan."""

import os
import shutil
from functools import partial

import numpy as np
import pytest
from crashes import changes, crash

from gepc.scenes import scan

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.filterwarnings("ignore:with .* calibration images:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning"),
]
STEP, LAST = 9, 20  # every ninth operation, and each of the last ones: they write the map, finish and clean up


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_crash_at_any_file_operation_loses_nothing(tmp_path, detector, landscape, monkeypatch):
    np.save(tmp_path / "s.npy", landscape[:32, 50:90])
    monkeypatch.setattr(detector, "batch_size", 4)  # a block for every row of tiles
    work = partial(scan, detector, tmp_path / "s.npy", tmp_path / "out", control="tile")
    count = changes(work)
    whole = content(tmp_path / "out")
    assert not [name for name in whole if name.startswith((".", "work"))]
    assert count > 60
    for k in (*range(1, count - LAST, STEP), *range(count - LAST, count + 1)):
        shutil.rmtree(tmp_path / "out")
        assert crash(work, k)
        if (tmp_path / "out" / "scene.json").exists():  # it comes last: beside it are the results and nothing else
            left = content(tmp_path / "out")
            left.pop(".lock", None)
            assert left == whole, k
        report = work()
        assert content(tmp_path / "out") == whole, k
        assert report.counts["scored"] == report.counts["tiles"]
