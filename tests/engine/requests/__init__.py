"""Tests of requests and their parameters: `ostinato.engine.requests`."""
