"""How does Python reach the native library?

A shared object with a plain C ABI, built from ``native/`` when the package is installed; where it
is missing, everything runs in plain torch. Files in reading order:

* ``face``: how do the library's structures look from Python?
* ``library``: is there a library, and what can this processor do?
* ``checks``: what is checked before the library sees a pointer?
* ``pages``: when is memory for keys and values taken from the kernel?
* ``best``: where does each row have its largest number?
* ``delta``: how does a token change the states of a gated delta rule?
* ``store``: where do keys and values live, if the library is to read them?

Rules: no bound is checked in C++, so every one is checked here, before the call. Planning is the
exception, since it walks over all tables anyhow: there it is lengths that are checked here, and the
library looks at what the tables say before it goes by it. What it plans is right by construction
and goes back to it unseen. C++ keeps no pointer longer than the call that it was passed to, and an
object that stores pointers for later calls, as a program of the forward does, keeps what they point
to alive.
"""
