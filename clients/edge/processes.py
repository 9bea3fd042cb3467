"""The living processes of this machine and who started them, read from ``/proc``: Linux only."""

from __future__ import annotations

from pathlib import Path


def members(group: int) -> list[int]:
    """Return the ids of the living processes in process group ``group`` (zombies are dead)."""
    return [pid for pid, (_, pgrp) in _living().items() if pgrp == group]


def below(pid: int) -> set[int]:
    """Return the living descendants of a process."""
    return _below(pid, _living())


def groups_below(pid: int) -> set[int]:
    """Return the process groups led by ``pid`` or by any of its living descendants.

    Some of Flower's helpers are started in sessions of their own; a group whose leader is no descendant is never ours.
    """
    living = _living()
    family = {pid} | _below(pid, living)
    return {pid} | {living[p][1] for p in family if p in living and living[p][1] in family}


def processes_with(variable: str, value: str) -> dict[int, str]:
    """Return the command lines of the living processes of this user that were started with ``variable=value``."""
    found = {}
    wanted = f"{variable}={value}".encode()
    for pid in _living():
        try:
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                found[pid] = command.replace(b"\0", b" ").decode(errors="replace").strip()
        except (PermissionError, FileNotFoundError, ProcessLookupError):
            # Somebody else's, or gone meanwhile.
            continue
    return found


def _below(pid: int, living: dict[int, tuple[int, int]]) -> set[int]:
    family = {pid}
    while True:
        # /proc does not list parents before their children: repeat until nothing is added.
        more = {child for child, (parent, _) in living.items() if parent in family} - family
        if not more:
            return family - {pid}
        family |= more


def _living() -> dict[int, tuple[int, int]]:
    """Return parent and process group of every living process by its id."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The command name, in parentheses, may hold anything: fields count from the last one.
            state, parent, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if state not in "ZX":
            found[int(entry.name)] = (int(parent), int(group))
    return found
