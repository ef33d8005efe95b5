"""The ledger of turns: a later prompt continues with what the model wrote.

::

    messages ─► places ─► turns of the ledger that mean the same ─┐
        │                                                         ▼
        └─────► chat template ─► text around each turn ─► frames + written turns ─► prompt
                                                                                      │
    answer ─► note: tokens, meaning, call ids, under the place that the prompt ends ◄─┘

A client sends an answer back as messages, and a chat template writes them anew: arguments with
other spaces, no reasoning. The ledger decides the *text* of such a turn; ``text.known_texts``
then gives a text the *tokens* that it had, as for every other text.

Files in reading order:

* ``meaning``: what a message means, and the place of a turn in its conversation
* ``listed_calls``: calls that a client sends back as a text
* ``turns``: the turns of all tenants, bounded in bytes
* ``seal``: names of turns that clients keep, encrypted for their tenant
* ``frames``: what a chat template writes around each turn
* ``continuation``: a prompt of frames and written turns
* ``reports``: what was done to each of the last requests, for explanations

Rules:

1. A turn is put back only where the message that was sent means the same: equal text, equal calls
   in the same order, arguments equal as JSON, and reasoning equal or left out. Calls may stand in
   the text, if it has their ids.
2. A turn is found under its tenant's salt, model and place alone. A call id or a sealed name only
   chooses among the turns of one place.
3. A message that differs changes the place of every turn behind it, so none of those is found.
4. The text around turns is the template's. Where it cannot be told from the turns without doubt,
   the template's rendering is used as it is.
5. Reasoning that a template drops is put back inside a tool loop only, unless ``keep_reasoning``
   is ``always``.
6. What is put back, and what a template dropped, is counted.
"""
