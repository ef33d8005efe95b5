"""How are layers served that carry a state from token to token?

Files in reading order:

* ``store``: where are states kept between steps?
* ``recurrence``: what is asked of a function that carries one?
* ``recurrences``: which functions of ``transformers`` do, and how are they called?
* ``step``: how does one row of tokens become calls per sequence?
* ``mixers``: how do the layers of a model get there?
"""
