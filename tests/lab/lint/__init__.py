"""Tests of lint: `ostinato.lab.lint`."""
