"""Tests of constrained outputs: `ostinato.engine.grammar`."""
