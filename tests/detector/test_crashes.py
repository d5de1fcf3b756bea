"""A process that ends while it saves a detector leaves the old one or the new one."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from crashes import crashes
from toys import LEVELS, pictures, toy_backbone, toy_detector

from gepc.core import files
from gepc.detector.registry import load_detector

SHOWN = pictures(4, seed=9)


@pytest.mark.parametrize("exchange", [True, False], ids=["exchanged", "renamed"])
def test_saving_over_a_detector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool) -> None:
    """At every crash; and the same command completes afterwards."""
    if not exchange:
        monkeypatch.setattr(files, "_exchange", lambda first, second: False)
    options = {"levels": LEVELS[:1], "keep": 1, "group": ("flip_x",), "maps": "raw"}  # few passes
    old, new = (toy_detector(**options).fit(pictures(24, seed=seed)) for seed in (1, 2))
    answers = {name: detector.score(SHOWN).tolist() for name, detector in {"old": old, "new": new}.items()}
    seen, folder = [], tmp_path / "work" / "det"
    old.save(folder)
    for _ in crashes(lambda: new.save(folder)):
        loaded = load_detector(folder, toy_backbone()).score(SHOWN).tolist()
        seen.append(next(name for name, expected in answers.items() if loaded == expected))
        new.save(folder)
        assert load_detector(folder, toy_backbone()).score(SHOWN).tolist() == answers["new"]
        shutil.rmtree(folder.parent)
        old.save(folder)
    assert len(seen) > 8
    assert seen == sorted(seen, reverse=True)  # the old one, and from some moment on the new one
    assert set(seen) == {"old", "new"}
    np.testing.assert_array_equal(load_detector(folder, toy_backbone()).score(SHOWN), answers["new"])
