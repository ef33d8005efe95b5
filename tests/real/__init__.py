"""The engine with a real model: ``ostinato models get smollm2`` fetches it once."""
