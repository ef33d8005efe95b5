"""Tests of prompts and their tokens: `ostinato.engine.prompts`."""
