"""Scoring many images: the same rows from one process or a cluster, with resume after a crash.

A run is a folder of shards, each a fixed range of the list of images. A score depends on the image alone, so it does
not matter which process computes a shard, when, or in which batches.
"""
