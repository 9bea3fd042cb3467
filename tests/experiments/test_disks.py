"""Small disks are full when they are filled, for whoever writes there, and nothing stays mounted."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from fedcomp.errors import ConfigError
from fedcomp.experiments import disks
from fedcomp.experiments.disks import SmallDisk, unavailable
from fedcomp.flower.folder import FolderError, Stamp, StateFolder

REASON = unavailable()
needs_disks = pytest.mark.skipif(bool(REASON), reason=REASON)


def mounted(path: Path) -> bool:
    return any(str(path) in line.split() for line in Path("/proc/mounts").read_text().splitlines())


def stamp(number: int) -> Stamp:
    return Stamp(0, 1, ("ab",), "life", number, "digest", 40_000)


@needs_disks
def test_a_full_disk_keeps_the_state_that_was_there_and_takes_the_next_when_it_is_emptied(tmp_path: Path) -> None:
    with SmallDisk(tmp_path / "state", 256 << 10) as disk:
        folder = StateFolder(disk.path, 0)
        folder.save(stamp(1), bytes(40_000))
        disk.fill()
        assert shutil.disk_usage(disk.path).free == 0
        with pytest.raises(FolderError, match="No space left"):
            folder.save(stamp(2), bytes(40_000))
        assert [found.number for found in folder.stamps().values()] == [1]
        disk.empty()
        folder.save(stamp(3), bytes(40_000))
        assert [found.number for found in folder.stamps().values()] == [3]
        # Twice is as good as once.
        disk.empty()
    assert not mounted(tmp_path / "state")


@needs_disks
def test_nothing_stays_mounted_after_an_exception_or_with_an_open_file(tmp_path: Path) -> None:
    def interrupted() -> None:
        with SmallDisk(tmp_path / "disk", 1 << 20), (tmp_path / "disk" / "open").open("wb"):
            assert mounted(tmp_path / "disk")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not mounted(tmp_path / "disk")


def test_what_is_missing_is_said_in_one_line_and_a_disk_of_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError):
        SmallDisk(tmp_path, 100)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert unavailable() == "small disks need root, to mount them"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(disks.shutil, "which", lambda name: None)
    assert unavailable() == "small disks need 'mount'"
