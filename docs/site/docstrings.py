"""Docstrings for the site: they are written for `help()`, and two habits of theirs are not what mkdocstrings reads."""

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`~?([^`]*)`")


class Docstrings(griffe.Extension):
    """Takes Sphinx's roles out (what they name is left as code) and lets a single example be a section of examples."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites the docstring of an object before it is read."""
        if obj.docstring is not None:
            text = ROLE.sub(r"``\1``", obj.docstring.value)
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.M)
