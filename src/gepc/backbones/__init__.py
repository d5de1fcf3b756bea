"""Backbones: networks that predict noise, from any source."""
