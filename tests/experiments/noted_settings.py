"""Settings that tell which of them an experiment asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class Read(Mapping[str, Any]):
    """Settings that note which of them were asked for."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return self.settings[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.settings)

    def __len__(self) -> int:
        return len(self.settings)

    def items(self) -> Any:
        return self.settings.items()  # a row that takes settings by prefix sees all of them; that is no reading
