"""Making a small backbone where there is none."""
