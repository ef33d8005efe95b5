"""From token ids to text and back, with the places where both may be cut.

Files in reading order:

* ``tokenized_text``: a text with the tokens that stand for it
* ``detokenizer``, ``stop_strings``: from token ids to text, and to its end
"""
