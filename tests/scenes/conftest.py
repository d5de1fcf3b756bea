"""A detector of 16x16 colour tiles on a toy network, and scenes to hand it."""

import numpy as np
import pytest
from toys import as_uint8, pictures, toy_backbone, toy_detector


@pytest.fixture(scope="session")
def detector():
    return toy_detector(toy_backbone(3, 16), levels=(0.99, 0.9), keep=1).fit(as_uint8(pictures(120, 16, seed=1)))


@pytest.fixture(scope="session")
def landscape():
    """Bytes (72, 100, 3) like those fitted on, with a bright patch at lines 40-56, columns 60-76."""
    scene = as_uint8(pictures(1, (72, 100), seed=7))[0]
    scene[40:56, 60:76] = np.array([250, 250, 5], np.uint8)
    return scene
