"""Tests of options: `ostinato.cli.options`."""
