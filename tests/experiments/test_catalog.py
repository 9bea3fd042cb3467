"""Every experiment of the catalogue is complete, and its settings are those its systems know."""

from __future__ import annotations

from dataclasses import replace

import pytest
from experiment_runs import Read
from fake_engine import TINY

from fedcomp.errors import ConfigError
from fedcomp.experiments.catalog import CATALOG, get_experiment
from fedcomp.experiments.experiment import Experiment, read_claims
from fedcomp.experiments.options import TEXT, Config, Option
from fedcomp.experiments.tables import Training, rows_of, specs_of
from fedcomp.rules import Int, Real


@pytest.fixture(params=sorted(CATALOG))
def experiment(request: pytest.FixtureRequest) -> Experiment:
    return get_experiment(request.param)


def test_names_questions_and_baselines(experiment: Experiment) -> None:
    assert experiment.name in CATALOG
    assert experiment.question.endswith("?")
    assert experiment.notes
    assert experiment.answer
    config = experiment.configure()
    specs = specs_of(experiment, config)
    rows = rows_of(experiment, config)
    assert experiment.baseline in ["", *rows]
    # A study names what its quantities are of; a run refuses a claim about what was not measured.
    if experiment.study is None and not callable(experiment.claims):
        assert {line.row for line in read_claims(experiment.claims)} <= {"", *rows}
    assert experiment.changed(config) == []
    assert Config.from_json(config.to_json()) == config
    assert all(spec.rounds > 0 for spec in specs)
    # Rows that repeat others with seeds of their own move along with the run's.
    moved = specs_of(experiment, experiment.configure(seed=7))
    assert [spec.seed + 7 for spec in specs] == [spec.seed for spec in moved]
    assert not specs or min(spec.seed for spec in specs) == config.seed


@pytest.mark.slow
def test_every_row_can_run_and_every_setting_reaches_a_row(experiment: Experiment) -> None:
    from fedcomp.experiments.systems import check

    config = experiment.configure()
    settings = Read(config.settings)
    training = Training.of(experiment, replace(config, settings=settings))
    specs = [training.spec(label) for label in training.rows]
    for spec in specs:
        # What is tried here only is no system that anybody could name.
        if spec.system not in experiment.rivals:
            check(spec)
    own = {(spec.system, spec.task, spec.clients, spec.seed, str(sorted(spec.settings.items()))) for spec in specs}
    assert len(own) == len(specs)
    read = settings.read | {key for spec in specs for key in spec.settings} | {"seeds", "workers"}
    # What a study reads is seen when it studies.
    assert set(experiment.options) <= read | set(experiment.tune.values()) or experiment.study is not None


@pytest.mark.slow
def test_e2_the_smallest_size_is_one_and_can_run(experiment: Experiment) -> None:
    from fedcomp.experiments.systems import check

    whole, quick = experiment.configure(), experiment.configure(quick=True)
    assert quick.quick
    assert not whole.quick
    assert experiment.changed(quick), "nothing is made smaller"
    assert quick.rounds <= whole.rounds
    assert quick.clients <= whole.clients
    for spec in specs_of(experiment, quick):
        check(spec)


def test_e1_every_experiment_says_how_long_it_takes(experiment: Experiment) -> None:
    """``--list`` and the first lines of a run print it, so that nobody starts hours without knowing."""
    assert experiment.minutes > 0.0, "measure a run at the defaults and write minutes="


def test_defaults_have_the_form_a_user_would_type(experiment: Experiment) -> None:
    for key, option in experiment.options.items():
        assert option.parse(key, str(option.default)) == option.default
        assert option.help


def test_a_name_is_looked_up_with_a_hint() -> None:
    assert get_experiment("tiny", {"tiny": TINY}) is TINY
    with pytest.raises(ConfigError, match="did you mean 'quickstart'"):
        get_experiment("quikstart")


def test_a_setting_that_changes_no_figure_is_not_listed_as_changed() -> None:
    options = {"workers": Option(1, Int(), "", neutral=True), "lr": Option(0.1, Real(), "")}
    experiment = Experiment(**{**vars(TINY), "options": options})
    assert experiment.changed(experiment.configure(assignments=["workers=4", "lr=0.2"])) == ["lr=0.2"]


def test_an_options_own_check_becomes_one_line() -> None:
    def check(value: str) -> None:
        raise ValueError("no\nsuch thing")

    with pytest.raises(ConfigError, match=r"^link cannot be 'x': no such thing$"):
        Option("", TEXT, "", check=check).parse("link", "x")
