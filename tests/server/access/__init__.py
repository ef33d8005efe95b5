"""Tests of keys, limits and connections: `ostinato.server.access`."""
