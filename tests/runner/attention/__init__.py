"""Attention over scattered blocks equals attention over one contiguous row."""
