"""Tests of loading checkpoints: `ostinato.runner.loading`."""
