"""The detector: features, scoring and verdicts behind one interface."""
