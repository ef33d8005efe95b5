"""Tests of the engine's steps: `ostinato.engine.loop`."""
