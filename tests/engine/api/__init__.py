"""Tests of the Python interfaces: `ostinato.engine.api`."""
