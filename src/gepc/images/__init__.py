"""Images in every form they come in, preprocessing, batches, and noise keyed by content."""
