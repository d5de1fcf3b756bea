"""Counters for Prometheus, in a registry of their own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """What an operator watches: requests, images, batches, the queue, the detector in service."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        self.requests = Counter("gepc_requests", "Requests by route and status.", ["route", "status"], registry=own)
        self.seconds = Histogram("gepc_request_seconds", "Time to answer.", ["route"], buckets=SECONDS, registry=own)
        self.images = Counter("gepc_images", "Images by outcome: normal, alarm, failed.", ["outcome"], registry=own)
        self.batches = Histogram(
            "gepc_batch_images", "Images handed to the network at once.", buckets=BATCHES, registry=own
        )
        self.network = Counter("gepc_network_seconds", "Time spent in the network.", registry=own)
        self.in_service = Gauge("gepc_images_in_service", "Images accepted and not yet answered.", registry=own)
        self.refused = Counter("gepc_refused", "Requests refused because the queue was full.", registry=own)
        self.reloads = Counter(
            "gepc_reloads", "Attempts to read the detector again, by outcome.", ["outcome"], registry=own
        )
        self.detector = Gauge("gepc_detector_info", "The detector in service.", ["detector"], registry=own)

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)
