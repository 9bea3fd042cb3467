"""Imports go down the layers, never up, never sideways; and every module has one name."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from fedcomp.gossip import ALGORITHMS

ROOT = Path(__file__).parent.parent
BESIDE = ("coding", "strategies", "clients", "experiments")
PACKAGES = ("fedcomp", *BESIDE)

FORBIDDEN = {
    "fedcomp": {"fedcomp.strategies", "fedcomp.clients", "fedcomp.experiments"},
    "coding": {"fedcomp", "torch", "flwr"},
    "strategies": {"fedcomp.clients", "fedcomp.experiments"},
    "clients": {"fedcomp.strategies", "fedcomp.experiments"},
    "experiments/security": {
        *("torch", "numpy", "numba", "sklearn", "jinja2", "rich", "matplotlib", "fedcomp.tasks", "fedcomp.codecs"),
        *("fedcomp.strategies", "fedcomp.wire", "fedcomp.privacy"),
    },
    "coding/kernels": {
        *("fedcomp.coding.field", "fedcomp.coding.prime", "fedcomp.coding.packet", "fedcomp.coding.rlnc"),
        *("fedcomp.coding.mds", "galois", "scipy"),
    },
    "coding/errors.py": {"numpy", "numba", "galois"},
    "fedcomp/wire": {"flwr", "torch", "numba", "fedcomp.layout", "fedcomp.codecs", "fedcomp.flower"},
    "fedcomp/kernels": {"flwr", "torch", "fedcomp.codecs", "fedcomp.wire", "fedcomp.flower"},
    "fedcomp/codecs": {"flwr", "torch", "fedcomp.flower", "fedcomp.tasks", "fedcomp.gossip"},
    "fedcomp/factors": {
        *("flwr", "numba", "fedcomp.flower", "fedcomp.tasks", "fedcomp.gossip", "fedcomp.codecs", "fedcomp.kernels"),
        *("fedcomp.layout", "fedcomp.wire", "fedcomp.timing", "fedcomp.privacy"),
    },
    "fedcomp/gossip": {"flwr", "torch", "fedcomp.flower", "fedcomp.tasks", "fedcomp.timing"},
    "fedcomp/graphs": {
        *("flwr", "numba", "fedcomp.flower", "fedcomp.tasks", "fedcomp.gossip", "fedcomp.codecs", "fedcomp.kernels"),
        *("fedcomp.privacy", "fedcomp.layout", "fedcomp.timing"),
    },
    "fedcomp/forward": {"flwr", "fedcomp.flower", "fedcomp.tasks", "fedcomp.codecs", "fedcomp.wire"},
    "fedcomp/forward/directions.py": {"torch"},
    "fedcomp/drift": {
        *("flwr", "torch", "numba", "fedcomp.flower", "fedcomp.tasks", "fedcomp.gossip", "fedcomp.privacy"),
        *("fedcomp.timing", "fedcomp.graphs"),
    },
    # torch is for the training of LGC's autoencoder, inside functions.
    "fedcomp/systems": {"flwr", "fedcomp.flower", "fedcomp.tasks", "fedcomp.logs", "fedcomp.local", "fedcomp.timing"},
    "fedcomp/tasks": {"flwr", "fedcomp.flower", "fedcomp.gossip", "fedcomp.codecs", "fedcomp.kernels", "fedcomp.wire"},
    "fedcomp/privacy": {"flwr", "fedcomp.flower", "fedcomp.tasks", "fedcomp.gossip", "fedcomp.timing", "numba"},
    "fedcomp/timing": {"flwr", "torch", "fedcomp.flower"},
    "fedcomp/errors.py": {"flwr", "torch", "numpy", "fedcomp"},
    "fedcomp/files.py": {"flwr", "torch", "numpy"},
    "fedcomp/measuring.py": {"flwr", "torch", "numpy", "fedcomp"},
    "fedcomp/logs.py": {"flwr", "torch", "numpy", "fedcomp"},
    "fedcomp/verdicts.py": {"flwr", "torch", "numpy", "fedcomp"},
    "fedcomp/params.py": {"flwr", "torch", *(f"fedcomp.{name}" for name in ("layout", "codecs", "flower", "wire"))},
    "fedcomp/plain.py": {"flwr", "torch", *(f"fedcomp.{name}" for name in ("layout", "codecs", "flower", "wire"))},
    "fedcomp/stateful.py": {"flwr", "torch", *(f"fedcomp.{name}" for name in ("layout", "codecs", "flower", "wire"))},
    "fedcomp/rng.py": {"flwr", "torch", "fedcomp"},
    "fedcomp/layout.py": {"flwr", "torch", "fedcomp.codecs", "fedcomp.kernels", "fedcomp.flower", "fedcomp.tasks"},
    "fedcomp/exact.py": {"flwr", "torch", "fedcomp.codecs", "fedcomp.kernels", "fedcomp.flower", "fedcomp.tasks"},
    "fedcomp/versions.py": {"flwr", "torch", "fedcomp.flower", "fedcomp.tasks"},
}


for below in (
    "wire",
    "kernels",
    "codecs",
    "factors",
    "gossip",
    "graphs",
    "forward",
    "drift",
    "tasks",
    "privacy",
    "timing",
    "asks.py",
    "local.py",
    "mailbox.py",
    "program.py",
):
    # Systems alone stand on codes; what they stand on beside them, and the drivers of programs, do not.
    FORBIDDEN.setdefault(f"fedcomp/{below}", set()).add("fedcomp.coding")


ALLOWED = {"coding": ("fedcomp.errors", "fedcomp.measuring", "fedcomp.coding")}
"""The base class of all errors and the runner of benchmarks: all that the layers share that never import each other."""


@dataclass(frozen=True)
class Names:
    """What a file names, at any depth."""

    imports: frozenset[str]
    calls: frozenset[str]
    """Dotted names that are called."""
    attributes: frozenset[str]
    """Dotted names of two parts and more, wherever they are used."""


@functools.cache
def names(path: Path) -> Names:
    """Read a file: once for all tests, which ask for the same few hundred files again and again."""
    imported: set[str] = set()
    called: set[str] = set()
    attributes: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call):
            called.add(dotted(node.func))
        elif isinstance(node, ast.Attribute):
            attributes.add(dotted(node))
    return Names(frozenset(imported), frozenset(called), frozenset(attributes))


def dotted(node: ast.expr) -> str:
    """Return ``a.b.c`` as it is written; what does not begin with a plain name is empty up to its first dot."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    parts.append(node.id if isinstance(node, ast.Name) else "")
    return ".".join(reversed(parts))


def imports(path: Path) -> frozenset[str]:
    """Return every dotted module name the file imports, wherever the statement stands."""
    return names(path).imports


def module_name(path: Path) -> str:
    """Return the one name by which a file of the repository is imported."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name if name.startswith("fedcomp.") else f"fedcomp.{name}"


@pytest.mark.slow
def test_every_module_is_imported_by_one_name() -> None:
    """In a checkout ``strategies`` can be imported, too: classes would exist twice, and errors would not be caught."""
    files = [p for folder in (*PACKAGES, "tests", "examples") for p in (ROOT / folder).rglob("*.py")]
    # The one app that has folders of these names itself.
    files = [path for path in files if "clashing_app" not in path.parts]
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name in imports(path)
        if name.partition(".")[0] in BESIDE
    ]
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_go_down(package: str) -> None:
    path = ROOT / package
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    assert files, f"{package} is empty"
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name in imports(path)
        if any(name == bad or name.startswith(bad + ".") for bad in FORBIDDEN[package])
        and not any(name == good or name.startswith(good + ".") for good in ALLOWED.get(package, ()))
    ]
    assert not wrong


@pytest.mark.slow
def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions and for type checkers count: what needs each other is one idea, and belongs in one file.

    What a package's own file re-exports does not.
    """
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if path.stem != "__init__"]
    modules = {module_name(path): path for path in files}
    graph = {name: {found for found in imports(path) if found in modules} - {name} for name, path in modules.items()}
    assert len(graph) > 300
    assert sum(map(len, graph.values())) > 1000
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


@pytest.mark.slow
def test_only_the_flower_package_knows_flower() -> None:
    outside = [p for p in (ROOT / "fedcomp").rglob("*.py") if "flower" not in p.relative_to(ROOT).parts]
    wrong = [str(p.relative_to(ROOT)) for p in outside if any(n.split(".")[0] == "flwr" for n in imports(p))]
    assert not wrong


@pytest.mark.slow
def test_private_flower_imports_stand_in_one_file() -> None:
    public = ("flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.simulation")
    wrong = []
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if path.name == "_private.py":
                continue
            for name in imports(path):
                if name.startswith("flwr.") and not any(name == p or name.startswith(p + ".") for p in public):
                    wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


IMPORTED = (
    "fedcomp.wire, fedcomp.codecs, fedcomp.codecs, fedcomp.kernels, fedcomp.versions",
    "fedcomp.flower.grid, fedcomp.flower.ledger, fedcomp.flower.rounds, fedcomp.flower.state",
    "fedcomp.clients.app, fedcomp.clients.compressed, fedcomp.clients.programs, fedcomp.clients.edge",
    "fedcomp.clients.coded.gradients, fedcomp.clients.coded.linear",
    "fedcomp.strategies.compressed, fedcomp.strategies.shared_support, fedcomp.strategies.coded.strategy",
    "fedcomp.strategies.coded.linear, fedcomp.systems.coded.relay, fedcomp.systems.coded.sums",
    "fedcomp.strategies.coded.gradients",
    "fedcomp.clients.gossip, fedcomp.strategies.gossip.strategy",
    "fedcomp.systems.private.datalens, fedcomp.clients.private.datalens, fedcomp.strategies.private.datalens",
    "fedcomp.experiments.catalog.datalens",
    "fedcomp.gossip, fedcomp.gossip_simulation, fedcomp.gossip.topology, fedcomp.gossip.tuning, fedcomp.gossip.local",
    ", ".join(where.partition(":")[0] for where in ALGORITHMS.values()),
    "fedcomp.coding.kernels, fedcomp.coding.field, fedcomp.coding.rlnc, fedcomp.coding.mds, fedcomp.coding.decoder",
    "fedcomp.coding.relay, fedcomp.coding.plan, fedcomp.coding.prime, fedcomp.coding.sumcode",
    "fedcomp.coding.gradcode, fedcomp.coding.datacode, fedcomp.coding.sealing, fedcomp.coding.transport",
    "fedcomp.coding.bench",
    "fedcomp.experiments.run, fedcomp.experiments.systems, fedcomp.experiments.engines, fedcomp.experiments.bench",
    "fedcomp.experiments.program",
)


@pytest.mark.slow
def test_imports_are_cheap() -> None:
    """Importing compiles nothing, opens no socket and imports no ray (flower spec, test 8).

    One process imports one after another: nothing takes a module back, so what is not there at the end was brought by
    none, and the first who brings it is named.
    """
    code = f"""
import importlib, os, sys, socket
for name in ("FLWR_TELEMETRY_ENABLED",): os.environ[name] = "0"
class Refused(socket.socket):
    def connect(self, *a): raise AssertionError("import opened a connection")
    def bind(self, *a): raise AssertionError("import bound a socket")
socket.socket = Refused
for module in {", ".join(IMPORTED)!r}.split(", "):
    importlib.import_module(module)
    heavy = sorted(m for m in ("ray", "numba", "llvmlite", "galois", "opacus") if m in sys.modules)
    assert not heavy, (module, heavy)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


KNOW_TORCH = {"coins.py", "dpsgd.py", "optimizers.py"}
"""The files of fedcomp/privacy that are about Opacus and torch, and import them at once."""


@pytest.mark.slow
def test_privacy_brings_neither_torch_nor_opacus() -> None:
    """The promise of a run on numpy alone is computed without them; who samples loads Opacus when it is asked."""
    package = ROOT / "fedcomp" / "privacy"
    names = sorted(
        p.stem for p in package.glob("*.py") if p.name not in KNOW_TORCH and p.stem not in ("__init__", "__main__")
    )
    code = f"""
import sys
import {", ".join(f"fedcomp.privacy.{name}" for name in names)}
heavy = sorted(m for m in ("torch", "opacus", "scipy", "numba", "flwr", "ray") if m in sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    knowing = {p.name for p in package.glob("*.py") if any(n.split(".")[0] == "torch" for n in imports(p))}
    assert knowing <= KNOW_TORCH


@pytest.mark.slow
def test_privacy_draws_from_its_own_entropy_alone() -> None:
    """Noise from numpy's or torch's generators can be drawn again by whoever seeds them."""
    banned = ("np.random", "numpy.random", "random.", "torch.normal", "torch.rand", "torch.Generator", "time.time")
    wrong = []
    for path in (ROOT / "fedcomp" / "privacy").glob("*.py"):
        wrong += [f"{path.relative_to(ROOT)} uses {n}" for n in names(path).attributes if n.startswith(banned)]
        wrong += [f"{path.relative_to(ROOT)} imports {n}" for n in imports(path) & {"numpy.random", "random", "uuid"}]
    assert not wrong


READS_PICKLES = {"fedcomp/tasks/planetoid.py": set(), "experiments/advise.py": {"torch.load"}}
"""Files that may import pickle, with what else they may call. Published data files are pickles; they are read after
their SHA-256 was compared, by an unpickler of six names. A user's own ``.pt`` file is read with ``weights_only``."""

RESEEDS = {"clients/edge/zygote.py": {"numpy.random.seed"}}
"""A fork would repeat what its siblings draw, in apps that use the global generators; nothing of ours does."""


@pytest.mark.slow
def test_no_pickle_and_no_global_randomness_in_the_product() -> None:
    """No pickle on any wire or in any state; no global random state."""
    banned_imports = {"pickle", "cloudpickle", "dill", "shelve", "random"}
    banned_calls = {"torch.manual_seed", "np.random.seed", "numpy.random.seed", "torch.load", "torch.save"}
    wrong = []
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            name = str(path.relative_to(ROOT))
            allowed = {"pickle"} if name in READS_PICKLES else set()
            wrong += [f"{path.relative_to(ROOT)} imports {n}" for n in (imports(path) & banned_imports) - allowed]
            calls = names(path).calls & banned_calls - RESEEDS.get(name, set()) - READS_PICKLES.get(name, set())
            wrong += [f"{path.relative_to(ROOT)} calls {n}" for n in calls]
    assert not wrong


def test_the_tests_that_every_flower_runs_are_files() -> None:
    script = (ROOT / ".ci/flowers").read_text()
    listed = script[script.index("tests=(") : script.index(")\n", script.index("tests=("))] + ")"
    show = f'{listed}; printf "%s\\n" "${{tests[@]}}"'
    named = subprocess.run(["bash", "-c", show], check=True, capture_output=True, text=True).stdout.split()
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []
