"""Convert docstrings, which people read in an editor, to Markdown for mkdocstrings.

In the code, a drawing stands indented below a line that ends in ``::``, and a table between
lines of ``====``. Markdown knows neither: a colon too many would be shown, and a table would run
into one paragraph. So, before a page is rendered::

    like this::            like this:

        a drawing              a drawing

    ====  ====             ```text
    rows  are              ====  ====
    kept  as is            rows  are
    ====  ====             ...
                           ```
"""

import re
from typing import Any

import griffe

_DRAWING = re.compile(r"(?<=\S)::$", re.MULTILINE)
_BARE = re.compile(r"^ *::$", re.MULTILINE)
_TABLE = re.compile(r"^( *)(=+ +=[= ]*)\n(?:.*\n)+?\1\2\n(?:.*\n)*?\1\2$", re.MULTILINE)


class EditorDocstrings(griffe.Extension):
    """Turns drawings and tables of docstrings into what Markdown calls them."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite one object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(docstring: str) -> str:
    """Return a docstring with fenced tables and without doubled colons."""
    fenced = _TABLE.sub(lambda table: f"```text\n{table[0]}\n```", docstring)
    return _BARE.sub("", _DRAWING.sub(":", fenced))
