"""The arithmetic of caching, against worked examples, oracles and the library's own caches."""
