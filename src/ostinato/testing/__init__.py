"""Test equipment for those who write a KV tier of their own.

Files in reading order:

* ``conformance_medium``: what the conformance suite stores, and the medium that it needs
* ``conformance_faults``: faults of a medium, one by one and in a storm
* ``conformance``: the suite that every tier passes
* ``simulated_disk``: a disk that is killed, loses power, fails or is damaged
"""
