"""Tests of metrics and traces: `ostinato.server.telemetry`."""
