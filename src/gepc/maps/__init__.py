"""Anomaly maps: what is usual in them, the regions that stand out, and pictures."""
