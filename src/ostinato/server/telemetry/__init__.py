"""Metrics, traces, and usage per tenant.

Files in reading order:

* ``observer``: the port of request observers
* ``tenant_usage``: usage counters of all tenants
* ``engine_watch``: reads engine counters without waiting for a long step
* ``figures``: what a figure is, and how displays derive from it
* ``engine_figures``: the figures of the engine
* ``request_figures``: the figures of requests
* ``tracing``: OpenTelemetry spans
"""
