"""``import fedcomp as fc``: light, complete, and clear about what is not installed."""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from page_reading import ROOT

import fedcomp as fc
from fedcomp import codecs
from fedcomp.errors import EXTRAS, ConfigError, MissingExtra, optional

FLOWERS = {"rich", "typer"}
"""Libraries of extras that Flower itself brings."""

BLOCKED = sorted(set(EXTRAS) - FLOWERS)

WITHOUT_EXTRAS = f"""
import sys
for name in {BLOCKED!r}: sys.modules[name] = None
"""
"""Makes a process in which no library of an extra is installed: importing one raises ModuleNotFoundError."""

PAIR = """
import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
import fedcomp as fc

app = ClientApp(mods=[fc.compression()])

@app.train()
def train(msg, context):
    (weight,) = msg.content["arrays"].to_numpy_ndarrays()
    moved = weight + np.arange(weight.size, dtype=np.float32).reshape(weight.shape) / weight.size
    return Message(RecordDict({"a": ArrayRecord([moved]), "m": MetricRecord({"num-examples": 1})}), reply_to=msg)

for text in sys.argv[1:]:
    codec = eval("fc." + text)
    strategy = fc.Compressed(FedAvg(fraction_evaluate=0.0), codec)
    with fc.InProcessGrid(app, 2) as inner:
        grid = fc.MeteredGrid(inner)
        result = strategy.start(grid, ArrayRecord([np.zeros((40, 50), np.float32)]), num_rounds=2)
        (weight,) = result.arrays.to_numpy_ndarrays()
        assert np.abs(weight).max() > 0.1, (text, np.abs(weight).max())
        assert len(strategy.reports) == 2, text
print("trained with", *sys.argv[1:])
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_importing_it_brings_nothing() -> None:
    code = "import sys, fedcomp; print(*sorted({'flwr', 'numpy', 'torch', 'numba', 'ray'} & set(sys.modules)))"
    assert run(code).stdout.strip() == ""


def test_the_stub_alone_names_layers_above_and_none_of_them_is_imported() -> None:
    code = "import sys, fedcomp; dir(fedcomp); print(*(m for m in sys.modules if m.startswith('fedcomp.')))"
    assert run(code).stdout.strip() == ""
    assert [path.relative_to(ROOT) for path in (ROOT / "fedcomp").rglob("*.pyi")] == [Path("fedcomp/__init__.pyi")]


def test_every_name_is_public_and_leads_to_what_it_says() -> None:
    names = [name for name in fc.__all__ if name != "__version__"]
    assert len(names) == len(set(names)) > 40
    for name in names:
        found = getattr(fc, name)
        assert not isinstance(found, type) or found.__name__ == name or name == "State"  # the name of a dict
        assert getattr(found, "__doc__", None), f"{name} has no docstring"
    assert set(names) <= set(dir(fc))
    assert not {"Any", "Iterator", "Path"} & set(dir(fc))
    stub = (ROOT / "fedcomp" / "__init__.pyi").read_text()
    assert set(re.findall(r"^from \S+ import (\w+) as", stub, re.MULTILINE)) <= set(names)


def test_what_a_first_page_names_is_there() -> None:
    pair = {"Compressed", "compression", "client", "EDEN", "TopK", "QSGD", "ScaledSign", "SmallDense"}
    private = {"DpFedAvg", "RecordDp", "DpSgdPlan", "DistributedDp", "ShareSettings", "local_dp", "Privatise"}
    assert pair | private <= set(fc.__all__)


def test_every_codec_is_there() -> None:
    """One line of the codecs' package makes a codec known by its id and by its name."""
    found = [value for value in vars(codecs).values() if isinstance(value, type) and issubclass(value, fc.Codec)]
    usable = {cls.__name__: cls for cls in found if not inspect.isabstract(cls)}
    assert len(usable) >= 19
    assert set(usable) <= set(fc.__all__)
    assert {cls.codec_id for cls in usable.values()} <= set(codecs.known())


def test_a_checkout_needs_no_installation_of_its_own() -> None:
    """Started in a checkout Python takes ``fedcomp`` from there, even where another copy is installed."""
    code = """
import sys
sys.meta_path = [f for f in sys.meta_path if isinstance(f, type) and f.__module__.startswith(("_frozen", "importlib"))]
import fedcomp, fedcomp.strategies, fedcomp.clients, fedcomp.coding, fedcomp.experiments
print(*(m.__file__ for m in (fedcomp.strategies, fedcomp.clients, fedcomp.coding, fedcomp.experiments)))
"""
    done = run(code)
    folders = ("strategies", "clients", "coding", "experiments")
    assert done.stdout.split() == [str(ROOT / name / "__init__.py") for name in folders], done.stderr


def test_an_unknown_name_is_an_ordinary_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'TopQ'"):
        _ = fc.TopQ


@pytest.mark.parametrize(("wrong", "right"), [("Eden", "EDEN"), ("topk", "TopK"), ("compresion", "compression")])
def test_a_name_like_another_one_names_it(wrong: str, right: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{wrong}'; did you mean '{right}'"):
        getattr(fc, wrong)
    for unlike in ("xyzzy", "__wrapped__", "_EDEN"):
        with pytest.raises(AttributeError, match=f"'{unlike}'$"):
            getattr(fc, unlike)


def test_the_version_is_that_of_the_distribution() -> None:
    assert fc.__version__ == version("fedcomp")


@pytest.mark.slow
def test_the_pair_needs_no_extra() -> None:
    """Any codec, any round: Flower, numpy and cryptography are enough."""
    texts = [
        "TopK(0.1)",
        "QSGD()",
        "SIDCo(0.1)",
        "STC(0.1)",
        "DGC(0.1)",
        "AdaComp()",
        "chain(fc.Clip(1e9), fc.TopK(0.1))",
    ]
    done = run(WITHOUT_EXTRAS + PAIR, *texts)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == " ".join(["trained with", *texts])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("from fedcomp.tasks import get_task; get_task('digits')", "the task 'digits' needs torch"),
        ("from fedcomp.privacy.gaussian import gaussian_delta; gaussian_delta(1.0, 1.0)", "curve needs scipy"),
        (
            "from fedcomp.coding import prime; prime.inverse(prime.PrimeField(7), __import__('numpy').eye(2))",
            "needs galois",
        ),
        # Before the run: the first sum is decoded after a round of training.
        (
            "import fedcomp as fc; from flwr.serverapp.strategy import FedAvg; "
            "fc.CodedFedAvg(fc.Compressed(FedAvg(), fc.FixedPoint(fc.RandomK(1.0), clip=0.5)), construction='sumcode', "
            "symbols=3, threshold=1)",
            "decoding a sum needs galois",
        ),
        (
            "import fedcomp as fc; from flwr.serverapp.strategy import FedAvg; "
            "fc.CodedFedAvg(FedAvg(), construction='gradcode', losses=1, arithmetic='gf31')",
            "decoding over a prime field needs galois",
        ),
        (
            "import fedcomp as fc; from flwr.serverapp.strategy import FedAvg; "
            "fc.DistributedDp(FedAvg(fraction_evaluate=0.0), fc.ShareSettings(clip=1.0, tolerated=2), "
            "noise_multiplier=2.0, population=20)",
            "decoding a sum needs galois",
        ),
        ("from fedcomp.privacy.accounting import _sampled_curve; _sampled_curve(0.1, 1.0)", "rounds needs opacus"),
    ],
)
def test_a_missing_extra_is_one_line_that_names_it(code: str, line: str) -> None:
    done = run(WITHOUT_EXTRAS + code)
    last = done.stderr.strip().splitlines()[-1]
    assert line in last
    assert re.search(r"not installed: install fedcomp with its extra \[(\w+)\] \(.*pip install '\.\[\1\]'\)$", last), (
        last
    )


def test_a_command_without_its_extra_says_so_in_one_line() -> None:
    start = "from fedcomp.experiments.program import main; sys.exit(main(['run', 'quickstart', '--quick']))"
    done = run(WITHOUT_EXTRAS + start)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert re.fullmatch(
        r"error: .* needs \w+, which is not installed: install fedcomp with its extra \[\w+\] \(in a checkout: .*\)",
        line,
    ), line


def test_other_import_errors_pass() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module") as caught, optional("this"):
        importlib.import_module("no_such_module")
    assert not isinstance(caught.value, MissingExtra)
    with pytest.raises(ConfigError), optional("this"):
        raise ConfigError("as it was")


def test_a_library_adds_no_handler_to_the_root_logger() -> None:
    """Opacus calls ``logging.basicConfig`` when it is imported, and an app would log every line twice."""
    before = list(logging.root.handlers)
    with optional("this"):
        logging.root.addHandler(logging.NullHandler())
    assert logging.root.handlers == before


def test_every_extra_that_an_error_names_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert set(EXTRAS.values()) <= set(extras)
    packages = {"sklearn": "scikit-learn", "ray": "flwr[simulation]"}
    for library, extra in EXTRAS.items():
        wanted = packages.get(library, library)
        assert any(line.startswith(wanted) for line in extras[extra]), f"{extra} does not install {library}"
    required = {re.match(r"[\w-]+", line)[0] for line in project["dependencies"]}
    assert required == {"flwr", "numpy", "cryptography", "h11"}
