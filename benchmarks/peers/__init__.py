"""Speed beside other engines, on the same machine, in the same minutes.

Files in reading order:

* ``run``: the one command;
* ``measures``: what is measured?
* ``samples``: what does one sample consist of?
* ``engines``: who is measured, and where is it installed?
* ``session``: who is measured when, and for how long?
* ``processes``: how is a worker started, asked and put to sleep?
* ``protocol``: how do runner and worker speak?
* ``machine``: what is this machine, and what else does it do?
* ``report``: how are figures shown?
* ``table``: how do they come into the docs?
* ``checkpoint``: on which model?
* ``workers``: one file per engine, run by that engine's own Python.

Rules:

1. One engine computes at a time; all others are stopped, so that no waiting threads take
   another's cores.
2. Engines take turns, repetition by repetition, each time in another order: what the machine does
   meanwhile falls on all of them.
3. The same model, threads, precision of weights and KV, prompts, lengths of answers and state of
   the cache in all engines. Cold prompts are new.
4. Workers know nothing of measures: they serve prompts and say when tokens came.
5. What an engine cannot do, or takes too long for, is left out with a word, never estimated.
"""
