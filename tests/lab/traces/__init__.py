"""Tests of traces and their replay: `ostinato.lab.traces`, `ostinato.lab.replay`."""
