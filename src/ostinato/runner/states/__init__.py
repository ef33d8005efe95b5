"""How are layers served that carry a state from token to token?

Files in reading order:

* ``store``: where are states kept between steps?
* ``recurrences``: which functions of ``transformers`` carry one, and how are they called?
* ``step``: how does one row of tokens become calls per sequence?
* ``mixers``: how do the layers of a model get there?
"""
