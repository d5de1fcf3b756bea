"""A fitted detector applied to an image of any size: tiles, one stitched map, regions, a promise for the whole scene.

    from gepc.scenes import scan

    report = scan(gepc.load_detector("det"), "scene.tif", "out", stride=16, control="bh", alpha=0.1)
    report.regions, report.guarantee

A scene goes one way: reading (windows) -> tiling (tiles, no-data) -> detector -> stitching (map) and control (flags)
-> regions -> overview. PNG, JPEG and `.npy` need nothing more; TIFF and GeoTIFF need the extra `gepc[scenes]`.
"""

from __future__ import annotations

from gepc.scenes.plan import Plan, ScanOptions
from gepc.scenes.run import SceneReport, plan_scan, scan

__all__ = ["Plan", "ScanOptions", "SceneReport", "plan_scan", "scan"]
