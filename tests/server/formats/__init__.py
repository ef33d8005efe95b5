"""Answers in a form: JSON, calls of tools, and the APIs that need them."""
