"""What mkdocstrings cannot know of our docstrings."""

import re

import griffe

from grainmill import _native


class Docstrings(griffe.Extension):
    """Adds the docstrings of compiled names; reads `Example:` as the section of code that it is."""

    def on_object(self, *, obj, **_):
        if obj.docstring is None and obj.path.startswith("grainmill._native."):
            compiled = _native
            for name in obj.path.split(".")[2:]:
                compiled = getattr(compiled, name, None)
            if compiled is not None and compiled.__doc__:
                obj.docstring = griffe.Docstring(compiled.__doc__, parent=obj)
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE
            )

    def on_package(self, *, pkg, **_):
        self.on_object(obj=pkg)
