"""Tests of sampling: `ostinato.runner.sampling`."""
