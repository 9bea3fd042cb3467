"""Griffe extension: docstrings are shown as ``generate.py`` prepared them, with links and verdicts."""

import json
from pathlib import Path

import griffe


class Prepared(griffe.Extension):
    """Replaces the docstrings that a file of JSON has, by the dotted name of their object."""

    def __init__(self, texts: str) -> None:
        self.texts = json.loads(Path(texts).read_text("utf-8"))

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.path in self.texts and obj.docstring is None:  # another name for a method
            obj.docstring = griffe.Docstring(self.texts[obj.path], parent=obj, parser="numpy")
        elif obj.path in self.texts:
            obj.docstring.value = self.texts[obj.path]
