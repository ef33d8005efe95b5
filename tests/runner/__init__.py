"""Tests of the room that computes: `ostinato.runner`."""
