"""Options that several commands share.

Files in reading order:

* ``config_source``: where a model's config comes from
* ``cost_options``: options for the cost of a step
* ``engine_options``: options of an engine
* ``setting_texts``: what settings mean, in ``--help`` and in the docs
* ``setting_options``: an option for each setting of an engine, a server or a router
* ``option_groups``: groups of options in ``--help``
* ``tokenizer``: the tokenizer that an option names
* ``trace_source``: the trace that options name
"""
