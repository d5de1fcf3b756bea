"""Radar images: data sets, patches, detectors without a network, a simulator, and the experiment."""
