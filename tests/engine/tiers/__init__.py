"""Tests of engines with KV tiers: `ostinato.engine.tiers`."""
