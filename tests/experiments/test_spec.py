"""A spec survives every way it travels; wrong fields and texts are refused with the value and the rule."""

from __future__ import annotations

import copy
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcomp.errors import ConfigError, StateError
from fedcomp.experiments.spec import (
    ARRAYS_FILE,
    RESULT_FILE,
    RoundRecord,
    RunResult,
    RunSpec,
    format_settings,
    format_value,
    load_arrays,
    parse_settings,
    parse_value,
    save_arrays,
)

scalars = st.one_of(st.booleans(), st.integers(-(2**63), 2**63), st.floats(allow_nan=False), st.text(max_size=20))
names = st.from_regex(r"[a-z][a-z_]{0,8}(\.[a-z_]{1,8})?", fullmatch=True)


@given(scalars)
def test_every_scalar_survives_its_text_with_its_type(value):
    back = parse_value(format_value(value))
    assert type(back) is type(value)
    assert back == value


@pytest.mark.slow
@given(st.dictionaries(names, scalars, max_size=5))
def test_settings_survive_their_text(settings):
    assert parse_settings(format_settings(settings)) == settings


@pytest.mark.slow
@given(st.dictionaries(names, scalars, max_size=4), st.integers(0, 2**63 - 1))
def test_a_spec_survives_run_config_json_and_copying(settings, seed):
    spec = RunSpec("topk", "top-k 1 %", "digits", "ray", 3, 4, seed, settings)
    config = spec.to_run_config()
    assert all(isinstance(value, bool | int | float | str) for value in config.values())
    back = RunSpec.from_run_config(config)
    assert back == spec
    assert {name: type(value) for name, value in back.settings.items()} == {n: type(v) for n, v in settings.items()}
    assert copy.deepcopy(spec) == spec


def test_settings_cannot_be_changed_behind_the_spec():
    given_settings = {"codec.density": 0.01}
    spec = RunSpec(settings=given_settings)
    given_settings["codec.density"] = 0.5
    assert spec.settings["codec.density"] == 0.01
    with pytest.raises(TypeError):
        spec.settings["codec.density"] = 0.5  # type: ignore[index]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rounds": -1}, "rounds is -1; it must be at least 0"),
        ({"rounds": 2.0}, "rounds is 2.0; expected a whole number"),
        ({"rounds": True}, "rounds is True; expected a whole number"),
        ({"clients": 0}, "clients is 0; it must be at least 1"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**63}, "below 2\\*\\*63"),
        ({"system": ""}, "system is ''; expected a name"),
        ({"settings": {"a b ": 1}}, "is not a word"),
        ({"settings": {"a": [1]}}, "a list; expected true/false, a number or text"),
        ({"settings": {"a": None}}, "a NoneType"),
    ],
)
def test_wrong_fields_are_named(fields, said):
    with pytest.raises(ConfigError, match=said):
        RunSpec(**fields)


def test_an_unknown_run_configuration_key_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'rounds'"):
        RunSpec.from_run_config({"round": 3})


@pytest.mark.parametrize("text", ["codec.density", "=3", "a='unclosed", 'a="unclosed'])
def test_malformed_settings_are_refused(text):
    with pytest.raises(ConfigError):
        parse_settings(text)


def test_arrays_of_any_name_and_number_type_are_stored_exactly(tmp_path):
    arrays = {
        "file": np.arange(3, dtype=np.int64),
        "a/b.weight": np.array([[1.5, -0.0]], np.float32),
        "scalar": np.array(7, np.int64),
        "empty": np.zeros((0, 4), np.float16),
    }
    save_arrays(tmp_path / "arrays.npz", arrays)
    back = load_arrays(tmp_path / "arrays.npz")
    assert list(back) == list(arrays)
    for name, array in arrays.items():
        assert back[name].dtype == array.dtype
        assert back[name].shape == array.shape
        assert back[name].tobytes() == array.tobytes()


def test_objects_are_not_stored(tmp_path):
    with pytest.raises(StateError, match="holds Python objects"):
        save_arrays(tmp_path / "arrays.npz", {"x": np.array([{}], object)})


def test_a_result_survives_its_folder(tmp_path):
    """One that diverged, too."""
    from fedcomp.flower.ledger import TrafficLedger

    ledger = TrafficLedger()
    ledger.record(round=1, node=7, direction="up", message_type="train", payload=10, wire=20)
    spec = RunSpec("topk", settings={"codec.density": 0.01, "lr": math.inf})
    rounds = [
        RoundRecord(0, 0.1, 2.3),
        RoundRecord(1, math.nan, math.nan, 10, 20, 30, 40, 0.5, 0.1, 2, 1, {"train_loss": 1.25, "test_loss": math.nan}),
    ]
    notes = {"engine": "inprocess", "figure": math.inf}
    result = RunResult(spec, rounds, {"w": np.ones(3, np.float32)}, ledger, 1.5, 0.5, notes)
    result.save(tmp_path)
    back = RunResult.load(tmp_path)
    assert back.spec == spec
    assert back.rounds[0] == rounds[0]
    assert math.isnan(back.rounds[1].accuracy)
    assert math.isnan(back.rounds[1].loss)
    assert back.rounds[1].metrics["train_loss"] == 1.25
    assert math.isnan(back.rounds[1].metrics["test_loss"])
    assert back.accuracy == 0.1  # the last round that was evaluated
    assert (back.uplink_payload_bytes, back.downlink_wire_bytes) == (10, 40)
    assert back.ledger.to_json() == ledger.to_json()
    np.testing.assert_array_equal(back.arrays["w"], result.arrays["w"])
    json.loads((tmp_path / RESULT_FILE).read_text(), parse_constant=pytest.fail)  # strict JSON: no NaN


@pytest.mark.parametrize("arrays", [None, b"", b"PK\x03\x04 and no more"])
@pytest.mark.parametrize("document", [None, "{", "{}", "[]", '{"spec": {}, "rounds": []}'])
def test_an_incomplete_folder_is_not_a_result(tmp_path, document, arrays):
    for name, content in ((RESULT_FILE, document and document.encode()), (ARRAYS_FILE, arrays)):
        if content is not None:
            (tmp_path / name).write_bytes(content)
    with pytest.raises(StateError, match="no complete result"):
        RunResult.load(tmp_path)
