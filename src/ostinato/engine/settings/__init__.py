"""The settings of an engine, their checks, and what derives from them.

Files in reading order:

* ``keywords``, ``vllm_keywords``: which of vLLM's keywords are accepted, and what replaces others
* ``settings``, ``setting_checks``: the settings of an engine, and which values are refused
* ``config``: checked settings, and those of cache and scheduler that derive from them
* ``setup``: loads the model and sizes its pools
* ``weights``: checks new weights against the model
"""
