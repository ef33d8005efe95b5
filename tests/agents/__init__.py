"""Coding agents as npm and PyPI ship them, against the real server."""
