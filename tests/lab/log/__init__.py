"""Tests of request logs: `ostinato.lab.log`."""
