"""Tests of simulation and planning: `ostinato.lab.simulate`, `plan`, `work`."""
