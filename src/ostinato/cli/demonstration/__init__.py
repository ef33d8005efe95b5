"""The traffic and the examples of ``demo``.

Files in reading order:

* ``demo_examples``: the prompts of the demonstration
* ``demo_waves``: its waves of requests, and how they are sent
* ``captured_layer``: a layer of a model in one step, for a lab
* ``lab_traffic``: the same calls for the server of a lab
"""
