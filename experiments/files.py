"""Atomic file replacement: after a crash or power failure, a file has its old content or its new one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from fedcomp.errors import naming


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the place of ``path`` when the block ends, and is on disk then; not after an error.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "result.json")
    >>> with replacing(path) as file:
    ...     _ = file.write(b"{}")
    >>> path.read_text()
    '{}'
    """
    # Beside its place: a rename is atomic within one file system only. The process id: several runs may write the list
    # of all runs at the same time.
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with naming(path), partial.open("wb") as file:
            yield file
            file.flush()
            # Without it a power failure soon after the rename may leave an empty file under the final name.
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
