"""Small disks on this machine: in-memory file systems that can be filled without filling the real disk.

Linux and root only; :func:`unavailable` says what is missing.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fedcomp import params
from fedcomp.experiments.links import MadeError, command

if TYPE_CHECKING:
    from typing import Self

_BALLAST: Final = ".ballast"
_PIECE: Final = 4096


class SmallDisk:
    """A file system of a few bytes at ``path``, for the duration of a ``with`` block.

    Parameters
    ----------
    path : Path
        A folder, made where it is missing; what was in it is hidden meanwhile.
    size : int
        Bytes, 64 KiB or more.

    Raises
    ------
    MadeError
        When it cannot be mounted; :func:`unavailable` says why beforehand.

    Examples
    --------
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     if not unavailable():
    ...         with SmallDisk(Path(folder), 1 << 20) as disk:
    ...             disk.fill()
    ...             free = shutil.disk_usage(folder).free
    ...     else:
    ...         free = 0
    >>> free
    0
    """

    def __init__(self, path: Path, size: int) -> None:
        params.integer("size", size, low=1 << 16)
        self.path, self.size = path, size

    def __enter__(self) -> Self:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        command("mount", "-t", "tmpfs", "-o", f"size={self.size},mode=0700", "fedcomp", str(self.path))
        return self

    def __exit__(self, *_: object) -> None:
        # Lazily: whoever still has a file open there must not keep it mounted for ever.
        command("umount", "--lazy", str(self.path))

    def fill(self) -> None:
        """Leave no byte free."""
        with (self.path / _BALLAST).open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(_PIECE))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def empty(self) -> None:
        """Give back what :meth:`fill` has taken."""
        (self.path / _BALLAST).unlink(missing_ok=True)


def unavailable() -> str:
    """Return in one line why small disks cannot be made here; empty when they can."""
    if os.geteuid() != 0:
        return "small disks need root, to mount them"
    if shutil.which("mount") is None:
        return "small disks need 'mount'"
    try:
        with tempfile.TemporaryDirectory() as folder, SmallDisk(Path(folder), 1 << 16):
            return ""
    except MadeError as error:
        return f"small disks cannot be made here: {error}"
