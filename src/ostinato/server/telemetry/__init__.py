"""Metrics, traces, and usage per tenant.

Files in reading order:

* ``observer``: the port of request observers
* ``tenant_usage``: usage counters of all tenants
* ``engine_watch``: reads engine counters without waiting for a long step
* ``engine_metrics``: Prometheus metrics of the engine and of requests, ``/metrics``
* ``tracing``: OpenTelemetry spans
"""
