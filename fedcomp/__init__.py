"""The public interface: ``import fedcomp as fc``, a communication layer for Flower.

>>> import fedcomp as fc
>>> from flwr.clientapp import ClientApp
>>> from flwr.serverapp.strategy import FedAvg
>>> app = ClientApp(mods=[fc.compression()])
>>> strategy = fc.Compressed(FedAvg(), fc.TopK(density=0.01))

Every name of ``__init__.pyi`` is here, and is imported when it is first used: ``import fedcomp`` itself brings neither
Flower nor torch. What needs a library of an extra says which one, see :data:`fedcomp.errors.EXTRAS`.
``docs/architecture.md`` says what is in the packages below.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

__version__ = "0.1.0"

# In a checkout four packages are beside this folder. Python finds this one first when it is started there, also
# where another copy is installed.
_ROOT: Final = Path(__file__).resolve().parents[1]
if (_ROOT / "setup.py").is_file():
    __path__.append(str(_ROOT))


def _names(file: Path) -> Iterator[tuple[str, str]]:
    """Yield each name that a file offers with its module: ``from module import name as name``, or all of a package."""
    for module, name, again in re.findall(
        r"^from (\S+) import (\S+)(?: as (\w+))?$", file.read_text("utf-8"), re.MULTILINE
    ):
        if name == again:
            yield name, module
        elif name == "*":
            yield from _names(Path(__file__).parent.joinpath(*module.split(".")[1:], "__init__.py"))


# One list for type checkers, editors and this file.
_PLACES: Final[dict[str, str]] = dict(_names(Path(__file__).with_suffix(".pyi")))

__all__ = ["__version__", *_PLACES]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_meant(name)}")
    # Not at the top: the errors' own module is part of this package.
    from fedcomp.errors import optional

    with optional(f"fedcomp.{name}"):
        found = getattr(importlib.import_module(_PLACES[name]), name)
    globals()[name] = found
    return found


def _meant(name: str) -> str:
    """Return which public name is like one that there is not; nothing where none is."""
    # Not at the top: whoever asks for names that exist does without.
    from difflib import get_close_matches

    by_lower = {each.lower(): each for each in _PLACES}
    # Names with an underscore are asked for by libraries, which expect that most of them are not there.
    close = [] if name.startswith("_") else get_close_matches(name.lower(), by_lower, n=1, cutoff=0.7)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""


def __dir__() -> list[str]:
    # What this file imports for itself is not offered.
    return sorted(__all__)
