"""What every request passes.

Files in reading order:

* ``guards``: middleware that refuses requests before they are parsed
* ``fields``: fields of requests that are not obeyed: named in a header, counted, or refused
"""
