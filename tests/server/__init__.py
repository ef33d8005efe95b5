"""Tests of the room that speaks HTTP: `ostinato.server`."""
