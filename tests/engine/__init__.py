"""Tests of the room that runs requests: `ostinato.engine`."""
