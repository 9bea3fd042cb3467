"""Why a SuperNode ended: every row of what Flower 1.41 printed when it was tried, and what a node does about it."""

from __future__ import annotations

import math

import pytest

from fedcomp.clients.edge.failures import Failure, classify
from fedcomp.clients.edge.supervisor import pause


def connection_error(detail: str) -> str:
    return f"ERROR :     Exit Code: 305\nFailed to initialize the connection to the SuperLink.\n{detail}"


KEY_INVALID = "ERROR :     Exit Code: 302\nUnable to parse the private key file."
NO_TLS = "ERROR :     Exit Code: 303\nInsecure connection is enabled, but the SuperNode's private key is provided"
PORT = "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 9094): address already in use"
CA = "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: "
GRACEFUL = "INFO :      SuperNode terminated gracefully."
PYTHON = 'Traceback (most recent call last):\n  File "x.py", line 1\nValueError: odd'


def never() -> float | None:
    raise AssertionError("the clock is asked for only where it matters")


@pytest.mark.parametrize(
    ("printed", "event", "patience"),
    [
        (connection_error("[code: 2004] Node is not registered"), "unregistered", 90.0),
        (connection_error("[code: 2001] Public key is not allowed"), "key-needed", 0.0),
        (connection_error(CA + "self-signed certificate in certificate chain (_ssl.c:1006)"), "wrong-ca", 0.0),
        (connection_error(CA + "unable to get local issuer certificate"), "wrong-ca", 0.0),
        (connection_error(CA + "certificate is not yet valid (_ssl.c:1006)"), "certificate-dates", math.inf),
        (connection_error(CA + "certificate has expired"), "certificate-dates", math.inf),
        (connection_error(CA + "Hostname mismatch, certificate is not valid for 'x'."), "certificate-name", 0.0),
        (
            connection_error(CA + "IP address mismatch, certificate is not valid for '10.0.0.1'."),
            "certificate-name",
            0.0,
        ),
        (connection_error("[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1006)"), "no-tls", 0.0),
        (KEY_INVALID, "wrong-key", 0.0),
        (NO_TLS, "key-without-tls", 0.0),
        (PORT, "port-taken", 60.0),
        ("ERROR :     Exit Code: 606\nFlower 1.40 is too old", "versions", 0.0),
        ("ERROR :     Exit Code: 604\nno such file", "arguments", 0.0),
        (connection_error("[code: 9999] something new"), "failed", math.inf),
        (PYTHON, "failed", math.inf),
    ],
)
def test_what_flower_prints_is_told_apart(printed: str, event: str, patience: float) -> None:
    failure = classify(1, printed.splitlines(), never)
    assert (failure.event, failure.patience) == (event, patience)


@pytest.mark.parametrize(
    ("behind", "event", "said"),
    [
        (-7.0, "clock", "7 s ahead of the SuperLink's"),
        (312.0, "clock", "312 s behind the SuperLink's"),
        (0.2, "forgotten", "does not know this node any more"),
        (-3.4, "forgotten", "does not know"),
        (300.0, "forgotten", "does not know"),
        (None, "refused", "sent no time to compare with: the node is unknown, or this clock is wrong"),
    ],
)
def test_an_end_with_status_0_is_a_failure_and_the_clock_says_which(behind, event, said) -> None:
    failure = classify(0, [GRACEFUL], lambda: behind)
    assert failure.event == event
    assert said in failure.message
    # A clock is set, a SuperLink remembers: neither ends a node.
    assert failure.patience == math.inf


def test_a_signal_is_named_and_a_failure_quotes_the_last_line() -> None:
    assert "signal 9" in classify(-9, [], never).message
    assert classify(1, PYTHON.splitlines(), never).message.endswith("it printed last: ValueError: odd")
    behind_it = [*PYTHON.splitlines(), "", "For more information, visit: https://flower.ai"]
    assert classify(1, behind_it, never).message.endswith("ValueError: odd")
    assert isinstance(classify(1, [], never), Failure)


def test_pauses_are_the_same_each_time_and_others_for_every_partition() -> None:
    drawn = [pause(3, attempt) for attempt in range(40)]
    assert drawn == [pause(3, attempt) for attempt in range(40)]
    for attempt, seconds in enumerate(drawn):
        doubled = min(60.0, 2.0 ** (attempt + 1))
        assert max(1.0, doubled / 2) <= seconds <= doubled
    # A hundred nodes that lost their SuperLink at once do not come back at once.
    first = {pause(partition, 5) for partition in range(100)}
    assert len(first) == 100
    assert max(first) - min(first) > 20
