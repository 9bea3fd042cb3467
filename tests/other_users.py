"""What another user of this machine gets: functions run as ``nobody``, who reads and owns nothing here."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def as_nobody(work: Callable[[], Any]) -> Any:
    """Return what ``work`` returns, in JSON, when a fork of this process calls it as another user.

    A fork and no program: the interpreter may be where that user cannot read it.
    """
    mine, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(mine)
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            answer = {"value": work()}
        except BaseException as error:
            answer = {"error": repr(error)}
        with os.fdopen(theirs, "w") as out:
            json.dump(answer, out)
        os._exit(0)
    os.close(theirs)
    with os.fdopen(mine) as come:
        answer = json.loads(come.read())
    os.waitpid(child, 0)
    assert "error" not in answer, answer["error"]
    return answer["value"]
