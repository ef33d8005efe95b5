"""How does Python reach the native library?

A shared object with a plain C ABI, built from ``native/`` when the package is installed; where it
is missing, everything runs in plain torch. Files in reading order:

* ``library``: is there a library, and what can this processor do?

Rules: no bound is checked in C++, so every one is checked here, before the call; nothing keeps a
pointer longer than the call that it was passed to.
"""
