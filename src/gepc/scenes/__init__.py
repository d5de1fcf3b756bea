"""A fitted detector applied to an image of any size: tiles, a stitched map, regions, detections, an error rate.

    from gepc.scenes import scan

    report = scan(gepc.load_detector("det"), "scene.tif", "out", stride=16, control="bh", alpha=0.1)
    report.detections, report.regions, report.guarantee

Data flow: reading (windows) -> tiling (tiles, no-data) -> scanning (detector, map) -> regions, detections -> writing.
"""

from gepc.scenes.scanning import ScanOptions, ScanPlan, SceneReport, plan_scan, scan

__all__ = ["ScanOptions", "ScanPlan", "SceneReport", "plan_scan", "scan"]
