"""Encryption of tiers by tenant.

Files in reading order:

* ``tenant_keys``: wrapped keys of tenants
* ``sealing``: names of tenants, and encryption
"""
