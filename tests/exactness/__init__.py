"""The cache changes no answer, and nothing is computed twice."""
