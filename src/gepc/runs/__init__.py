"""Many images: the same rows from one process, several processes or a cluster, and nothing lost when one is killed.

A run is a folder of shards, each a fixed range of the list of images. A score is a function of the image alone, so who
computes a shard, when, and in what batches does not change a row.
"""
