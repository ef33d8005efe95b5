"""Eight labs: build a prefix cache, one file with holes at a time, and let it serve a real model.

Files in reading order:

* ``course``: the labs, their holes, and the folders that ``ostinato labs new`` writes
* ``mistakes``: what a check raises, and how it draws
* ``grading``: checks a file, in a process of its own, and writes the result in words
* ``side_by_side``: the same requests under the built-in index, policy and order
* ``real_layer``: a layer of a real model, for the lab without a port
* ``checks/``: what each lab's file has to do, smallest inputs first
* ``solutions/``: one solution per lab; the holes are cut out of it
* ``pages``: the text of each lab, and two notebooks; no code

Rules:

1. A lab's file imports the standard library and NumPy alone, so that it runs in a notebook.
2. The holes are in the solution, between two comments; what ``new`` writes is cut out of it.
3. Every check names the kind of mistake, with the smallest input that shows it, on one screen.
4. Code of others runs in a process with limits, and is never imported by name.
"""
