"""Scoring many images: a folder of shards, the same rows from one process or a cluster, with resume after a crash."""
