"""From token ids to text and back, with the places where both may be cut.

Files in reading order:

* ``tokenized_text``: a text with the tokens that stand for it
* ``text_boundaries``: where a text can be cut so that its parts have the tokens of the whole
* ``token_table``, ``detokenizer``, ``stop_strings``: from token ids to text, and to its end
"""
