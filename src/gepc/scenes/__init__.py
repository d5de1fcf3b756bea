"""A fitted detector applied to an image of any size: tiles, a stitched map, regions, an error rate for the whole scene.

    from gepc.scenes import scan

    report = scan(gepc.load_detector("det"), "scene.tif", "out", stride=16, control="bh", alpha=0.1)
    report.regions, report.guarantee

Data flow: reading (windows) -> tiling (tiles, no-data) -> scoring (detector, map) -> flags and regions -> writing.
"""

from gepc.scenes.scan import ScanOptions, ScanPlan, SceneReport, plan_scan, scan

__all__ = ["ScanOptions", "ScanPlan", "SceneReport", "plan_scan", "scan"]
