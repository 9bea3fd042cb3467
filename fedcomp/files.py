"""Atomic file replacement: after a crash or a power failure, a file has its old content or its new one."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from fedcomp.errors import naming


def write(path: Path, *data: Any, mode: int = 0o600) -> None:
    """Write a file whole or not at all, in place of an older one; its folder is made when it is not there.

    Parameters
    ----------
    path : Path
        The file; it is on disk when this returns.
    *data : bytes-like
        Its content, in pieces, each in one block of memory.
    mode : int
        Who may read the new file, less what the process's umask takes away: its owner alone unless told otherwise.

    Raises
    ------
    OSError
        When it cannot be written, with the name of the file; nothing is left beside the old one.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "folder", "result.json")
    >>> write(path, b"{", b"}")
    >>> path.read_text()
    '{}'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same directory: a rename is atomic within one file system only. Under a name of its own: several processes
    # and threads may write the same file at the same time.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with naming(path), os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            for part in data:
                file.write(part)
            file.flush()
            # Before the rename: that could reach the disk first, and a crash leave an empty file for the old one.
            os.fsync(file.fileno())
        os.replace(partial, path)
        # A rename survives a power failure only with the folder that records it.
        flush_folder(path.parent)
    # After an interrupt too, or every one of them would leave a file behind.
    finally:
        partial.unlink(missing_ok=True)


def flush_folder(folder: Path) -> None:
    """Bring to the disk what a folder says of its files: names that are new, gone or other ones."""
    # Where folders cannot be opened, as on Windows, the system records the rename when it sees fit.
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
