"""Tests of routes: `ostinato.server.routes`."""
