"""Ostinato's tests: a folder per room, and folders for what concerns several rooms."""
