"""Tests of tables: `ostinato.cli.output`."""
