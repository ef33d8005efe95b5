"""From token ids to text and back, with the places where both may be cut.

Files in reading order:

* ``known_texts``: a text with the tokens that stand for it, and which texts are known, by tenant
* ``detokenizer``, ``stop_strings``: from token ids to text, and to its end
"""
