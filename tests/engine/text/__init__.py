"""Tests of detokenizing and stop strings: `ostinato.engine.text`."""
