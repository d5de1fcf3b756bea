"""From scores to decisions with a guarantee."""
