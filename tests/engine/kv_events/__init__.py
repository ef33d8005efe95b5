"""Tests of KV events on the wire."""
