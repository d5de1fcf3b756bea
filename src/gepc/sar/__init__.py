"""Radar: annotated scenes, patches, sea clutter, and how well ships in it are found."""
