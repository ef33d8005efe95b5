"""Tests of the arithmetic of sizes: `ostinato.lab.size`."""
