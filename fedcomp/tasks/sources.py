"""Sources of a data set: a checked local folder, a download by a library, or the offline default.

:func:`load` tries, in this order,

1. ``<root>/<folder>/`` where ``root`` is the argument or the environment variable ``FEDCOMP_DATA``: every
   file's SHA-256 is compared with the one recorded here, and a mismatch is an error. So is anything under
   that name that is not a folder of readable files; only where nothing is there does the search go on. In a folder
   that several sets share, nothing means no file of this set. The network is not touched.
2. the set's usual library, when it is installed *and* ``download=True``;
3. an offline default that needs no file: data embedded in scikit-learn or drawn from a documented formula. A
   stand-in for another set is announced by a :class:`DataWarning` and by the :class:`DataSource` that result
   records carry.

A loaded set is kept for the next call as long as its files look untouched (see :func:`local_stamp`).
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import os
import stat
import tarfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError, FedcompError, nearest
from fedcomp.tasks import graph_sources, planetoid, synthetic
from fedcomp.tasks.graph_sources import LabelledGraph

ROOT_VARIABLE: Final = "FEDCOMP_DATA"
"""Environment variable that names the folder of local data sets."""


class DataError(FedcompError, OSError):
    """A local data set is there but incomplete or cannot be read."""


class DataMismatch(DataError):
    """A local data file is not the file that was recorded: its SHA-256 differs."""


class DataWarning(UserWarning):
    """Another set stands in for the one that was asked for."""


@dataclass(frozen=True, slots=True)
class DataSource:
    """Which data was used, for the result record.

    Attributes
    ----------
    name : str
        The set that was asked for.
    used : str
        ``"local"`` (files under the root), ``"library"`` (downloaded by a library) or ``"offline"`` (needs no
        file).
    served : str
        What the data is.
    verified : bool
        Whether the SHA-256 of every file was compared with the recorded one.
    substitute : bool
        Whether ``served`` is not the set that was asked for.
    note : str
        One sentence for people.
    """

    name: str
    used: Literal["local", "library", "offline"]
    served: str
    verified: bool
    substitute: bool
    note: str

    def record(self) -> dict[str, Any]:
        """Return the fields as a JSON-able dict."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class LabelledExamples:
    """Examples as arrays: ``x`` float32 ``(N, features)``, ``y`` int64 ``(N,)`` with classes ``0 .. classes -
    1``."""

    x_train: NDArray[np.float32]
    y_train: NDArray[np.int64]
    x_test: NDArray[np.float32]
    y_test: NDArray[np.int64]
    classes: int


@dataclass(frozen=True, slots=True)
class Corpus:
    """Text by speaker."""

    texts: Mapping[str, str]


Content = LabelledExamples | Corpus | LabelledGraph

Stamp = tuple[tuple[int, ...], ...]
"""What distinguishes one state of a set's local files from another; see :func:`local_stamp`."""


def data_root(root: str | os.PathLike[str] | None = None) -> str | None:
    """Return the folder of local data: ``root``, else ``$FEDCOMP_DATA``, else None."""
    if root is None:
        root = os.environ.get(ROOT_VARIABLE) or None
    return None if root is None else os.fspath(root)


def load(name: str, root: str | os.PathLike[str] | None = None, download: bool = False) -> tuple[Content, DataSource]:
    """Return the data set ``name`` and where it came from; the order of search is the module's.

    Parameters
    ----------
    name : str
        One of :data:`SETS`.
    root : path, optional
        Folder of local sets; default ``$FEDCOMP_DATA``.
    download : bool
        Whether a library may fetch the set from the network.

    Raises
    ------
    ConfigError
        When the set is unknown.
    DataMismatch, DataError
        When local files are not the recorded ones, or some are missing or cannot be read.
    """
    if name not in SETS:
        raise ConfigError(f"unknown data set {name!r}{nearest(name, SETS)}")
    where = data_root(root)
    content, source = _load(name, where, bool(download), local_stamp(name, where))
    # Outside the cached function, so that each call says it and not only the first.
    if source.substitute:
        warnings.warn(source.note, DataWarning, stacklevel=2)
    return content, source


def local_stamp(name: str, root: str | None) -> Stamp | None:
    """Return size, times of change in nanoseconds and inode of each local file of the set ``name``; None when
    there is no folder for it under ``root``, or a shared one that holds only files of other sets.

    A rewritten file has another stamp, so what was loaded and verified before is not taken for it.

    Raises
    ------
    DataError
        When the folder, or a file in it, is there but is something else, or cannot be reached.
    """
    entry = SETS[name]
    if entry.files is None or root is None:
        return None
    folder = Path(root) / entry.folder
    if not (_is_folder(Path(root)) and _is_folder(folder)):
        return None
    stamps, missing = [], []
    for file in entry.files:
        try:
            found = os.stat(folder / file)
        except FileNotFoundError:
            # Gathered, not refused yet: where all are missing the folder may belong to other sets.
            missing.append(file)
            continue
        except OSError as error:
            raise DataError(f"{folder / file} cannot be read ({error.strerror}); make it readable") from error
        # Not even opened: reading a pipe would block for ever.
        if not stat.S_ISREG(found.st_mode):
            raise DataError(f"{folder / file} is not a regular file; put the data file there or remove {_rest(entry)}")
        stamps.append((found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino))
    # A link that leads nowhere is a broken file of this set, not the lack of one.
    if not stamps and not any((folder / file).is_symlink() for file in missing) and _shares(entry):
        return None
    if missing:
        raise DataError(
            f"{folder / missing[0]} is missing; the folder must hold {', '.join(entry.files)}, or "
            + ("none of them" if _shares(entry) else "not exist at all")
        )
    return tuple(stamps)


def _shares(entry: _Set) -> bool:
    """Return whether another set keeps other files in the same folder."""
    return any(other.folder == entry.folder and other.files != entry.files for other in SETS.values())


def _rest(entry: _Set) -> str:
    """Return what must be deleted before the search can continue, without the files of other sets."""
    return "all files of this set" if _shares(entry) else "the folder"


def _is_folder(path: Path) -> bool:
    """Return True if ``path`` is a folder and False if it does not exist; raise DataError otherwise."""
    # lstat first: it tells a link that leads nowhere, which is an error, from nothing at all.
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        raise DataError(
            f"{str(path)!r} cannot be looked up ({error}); give another root or make it readable"
        ) from error
    try:
        found = os.stat(path)
    except OSError as error:
        raise DataError(
            f"{path} is a link that leads nowhere ({error.strerror}); repair it, or remove it to go without the data"
        ) from error
    if not stat.S_ISDIR(found.st_mode):
        raise DataError(f"{path} is not a folder; put a folder with the data files there, or remove it")
    return True


@dataclass(frozen=True, slots=True)
class _Set:
    """One data set: its local files with their SHA-256, its readers, and its substitute."""

    offline: Callable[[], Content]
    offline_is: str
    substitute: bool = False
    folder: str = ""
    files: Mapping[str, str] | None = None
    read: Callable[[Mapping[str, bytes]], Content] | None = None
    library: str = ""
    fetch: Callable[[str | None], Content] | None = None


@lru_cache(maxsize=4)
def _load(name: str, root: str | None, download: bool, stamp: Stamp | None) -> tuple[Content, DataSource]:
    entry = SETS[name]
    if stamp is not None and root is not None and entry.files is not None and entry.read is not None:
        content = entry.read(_verified(Path(root) / entry.folder, entry, entry.files))
        note = f"{name}: read from local files, SHA-256 verified"
        return _frozen(content), DataSource(name, "local", name, True, False, note)
    what = "files of it in" if _shares(entry) else "folder"
    missing = f"no {what} {entry.folder!r} under " + (f"{root!r}" if root else f"${ROOT_VARIABLE} (not set)")
    if download and entry.fetch is not None:
        if importlib.util.find_spec(entry.library) is not None:
            content = entry.fetch(root)
            note = f"{name}: fetched by {entry.library}, files not verified here"
            return _frozen(content), DataSource(name, "library", name, False, False, note)
        missing += f", and {entry.library} is not installed"
    elif download and entry.substitute:
        missing += ", and no library route is implemented"
    note = f"{name}: {entry.offline_is}"
    if entry.substitute:
        note = f"{name}: not available ({missing}); {entry.offline_is} is used instead"
    content = _frozen(entry.offline())
    return content, DataSource(name, "offline", entry.offline_is, False, entry.substitute, note)


def _verified(folder: Path, entry: _Set, files: Mapping[str, str]) -> dict[str, bytes]:
    out = {}
    for name, expected in files.items():
        try:
            # Read once: the bytes that are hashed are the bytes that are parsed.
            data = (folder / name).read_bytes()
        except OSError as error:
            raise DataError(f"{folder / name} cannot be read ({error.strerror}); make it readable") from error
        found = hashlib.sha256(data).hexdigest()
        if found != expected:
            raise DataMismatch(
                f"{folder / name} has SHA-256 {found}, expected {expected}; replace the file or remove {_rest(entry)}"
            )
        out[name] = data
    return out


def _frozen(content: Content) -> Content:
    """Make shared arrays read-only, because they are kept for the life of the process."""
    if isinstance(content, LabelledExamples):
        for array in (content.x_train, content.y_train, content.x_test, content.y_test):
            array.flags.writeable = False
    if isinstance(content, LabelledGraph):
        content.freeze()
    return content


def held_out(labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which rows are held out: every fifth of each class."""
    out = np.zeros(len(labels), np.bool_)
    for label in np.unique(labels):
        out[np.flatnonzero(labels == label)[4::5]] = True
    return out


def _split(x: NDArray[Any], y: NDArray[Any], *, standardise: bool = False) -> LabelledExamples:
    """Hold out every fifth row of each class; optionally standardise by the training rows."""
    y = np.asarray(y, np.int64)
    out = held_out(y)
    train, test = np.flatnonzero(~out), np.flatnonzero(out)
    x = np.asarray(x, np.float64)
    if standardise:
        # Of the training rows alone: nothing of the test rows may show in what is trained on.
        mean, std = x[train].mean(0), x[train].std(0)
        # A constant column stays zero instead of becoming NaN.
        x = (x - mean) / np.where(std > 0, std, 1.0)
    x = x.astype(np.float32)
    return LabelledExamples(x[train], y[train], x[test], y[test], int(y.max()) + 1)


def _embedded(name: str, skip: int = 0) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return rows and targets of a table embedded in scikit-learn, whose last column is the target.

    The file is read directly, because importing the library takes a second, and a deployed client, with a process per
    message, would spend it on every message.
    """
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise DataError("scikit-learn is not installed, which embeds this data; install it: pip install scikit-learn")
    path = Path(found.submodule_search_locations[0]) / "datasets" / "data" / name
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); reinstall scikit-learn, 1.4 or newer") from error
    text = (gzip.decompress(data) if name.endswith(".gz") else data).decode()
    rows = np.loadtxt(io.StringIO(text), delimiter=",", skiprows=skip)
    return rows[:, :-1], rows[:, -1].astype(np.int64)


def _digits() -> LabelledExamples:
    x, y = _embedded("digits.csv.gz")
    # Pixels are 0..16; the overall mean and deviation are 4.884 and 6.017 (measured).
    return _split((x - 4.884) / 6.017, y)


def _digits_zero() -> LabelledExamples:
    """Return the digits with the classes "not a zero" and "zero"; a fifth of each of the ten classes is held out."""
    table = _digits()
    train, test = (np.asarray(y == 0, np.int64) for y in (table.y_train, table.y_test))
    return LabelledExamples(table.x_train, train, table.x_test, test, 2)


def _digits_five() -> LabelledExamples:
    """Return the digits in [0, 1] with the classes "below five" and "five and more", in order of the digit.

    With this order the partition "sorted" is by digit, which the two labels alone do not allow.
    """
    x, y = _embedded("digits.csv.gz")
    table = _split(x / 16.0, y)
    train, test = (np.argsort(y, kind="stable") for y in (table.y_train, table.y_test))
    y_train, y_test = table.y_train[train], table.y_test[test]
    half = [np.asarray(y >= 5, np.int64) for y in (y_train, y_test)]
    return LabelledExamples(table.x_train[train], half[0], table.x_test[test], half[1], 2)


def _digits_nodes() -> LabelledGraph:
    """Return all digits in [0, 1] as nodes without edges, in their own order; the task adds the edges."""
    x, y = _embedded("digits.csv.gz")
    nobody = np.zeros(0, np.int64)
    return LabelledGraph((x / 16.0).astype(np.float32), y, nobody, nobody.copy(), 10)


def _breast_cancer() -> LabelledExamples:
    return _split(*_embedded("breast_cancer.csv", skip=1), standardise=True)


def _enlarged_digits() -> LabelledExamples:
    """Return the embedded digits in MNIST's shape: every pixel three times each way, a margin of two."""
    x, y = _embedded("digits.csv.gz")
    images = np.pad(x.reshape(-1, 8, 8).repeat(3, axis=1).repeat(3, axis=2), ((0, 0), (2, 2), (2, 2)))
    return _split(_mnist_scale(images / 16.0), y)


def _enlarged_colour_digits() -> LabelledExamples:
    """Return the embedded digits in CIFAR-10's shape: every pixel four times each way, in three equal colours."""
    x, y = _embedded("digits.csv.gz")
    images = x.reshape(-1, 1, 8, 8).repeat(4, axis=2).repeat(4, axis=3).repeat(3, axis=1)
    return _split(_centred(images / 16.0), y)


def _centred(images: NDArray[Any]) -> NDArray[np.float32]:
    """Return images in [0, 1] as rows in [-1, 1], the inputs of Flower's PyTorch quickstart."""
    return ((images.reshape(len(images), -1) - 0.5) / 0.5).astype(np.float32)


_CIFAR_CLASSES: Final = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def _read_cifar(files: Mapping[str, bytes]) -> LabelledExamples:
    """Return the images by number, then class, so that any first part has equal numbers of all classes."""
    from PIL import Image

    (data,) = files.values()
    # In this order, whatever the archive's: the two are unpacked by it below.
    found: dict[str, list[tuple[str, int, NDArray[np.uint8]]]] = {"train": [], "test": []}
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            split, _, name = member.name.partition("/")
            kind, _, number = name.partition("/")
            # Folders of the archive have no third part.
            stream = archive.extractfile(member) if number else None
            if stream is not None:
                # Channels first, as torch's convolutions want them.
                pixels = np.asarray(Image.open(stream)).transpose(2, 0, 1)
                found[split].append((number, _CIFAR_CLASSES.index(kind), pixels))
    (x, y), (x_test, y_test) = (_stacked(rows) for rows in found.values())
    return LabelledExamples(x, y, x_test, y_test, 10)


def _stacked(rows: list[tuple[str, int, NDArray[np.uint8]]]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    rows.sort(key=lambda row: row[:2])
    labels = np.array([label for _, label, _ in rows], np.int64)
    return _centred(np.stack([pixels for _, _, pixels in rows]) / np.float32(255)), labels


def _mnist_scale(images: NDArray[Any]) -> NDArray[np.float32]:
    """Return images in [0, 1] as rows of 784, standardised with the mean and deviation of MNIST's training
    pixels."""
    return ((images.reshape(len(images), -1) - 0.1307) / 0.3081).astype(np.float32)


def _read_mnist(files: Mapping[str, bytes]) -> LabelledExamples:
    arrays = []
    for data in files.values():
        raw = gzip.decompress(data)
        # idx format: two zero bytes, type code 8 (uint8), number of dimensions, big-endian sizes, data.
        ndim = raw[3]
        shape = np.frombuffer(raw, ">i4", ndim, 4)
        arrays.append(np.frombuffer(raw, np.uint8, offset=4 + 4 * ndim).reshape(shape))
    return _mnist_table(*arrays)


def _mnist_table(x: NDArray[Any], y: NDArray[Any], x_test: NDArray[Any], y_test: NDArray[Any]) -> LabelledExamples:
    # With a Python number the division would be in float64, and take twice the memory.
    scale = np.float32(255)
    return LabelledExamples(
        _mnist_scale(x / scale), y.astype(np.int64), _mnist_scale(x_test / scale), y_test.astype(np.int64), 10
    )


def _fetch_mnist(root: str | None) -> LabelledExamples:
    datasets = importlib.import_module("torchvision.datasets")
    folder = root or str(Path.home() / ".cache" / "fedcomp")
    parts = []
    for train in (True, False):
        images = datasets.MNIST(folder, train=train, download=True)
        parts += [np.asarray(images.data), np.asarray(images.targets)]
    return _mnist_table(*parts)


def _read_a9a(files: Mapping[str, bytes]) -> LabelledExamples:
    from sklearn.datasets import load_svmlight_file

    parts = []
    for data in files.values():
        # The width is given because one file alone may lack the highest features: train and test must agree.
        x, y = load_svmlight_file(io.BytesIO(data), n_features=123, zero_based=False)
        parts += [np.asarray(x.toarray(), np.float32), (y > 0).astype(np.int64)]
    x, y, x_test, y_test = parts
    return LabelledExamples(x, y, x_test, y_test, 2)


def _read_wifi(files: Mapping[str, bytes]) -> LabelledExamples:
    (data,) = files.values()
    rows = np.loadtxt(io.BytesIO(data))
    # The file numbers rooms from 1.
    return _split(rows[:, :7], rows[:, 7].astype(np.int64) - 1, standardise=True)


def _read_shakespeare(files: Mapping[str, bytes]) -> Corpus:
    (data,) = files.values()
    texts: dict[str, list[str]] = {}
    for speech in data.decode().split("\n\n"):
        # Two speeches follow three line ends instead of two.
        head, _, body = speech.lstrip("\n").partition("\n")
        texts.setdefault(head.rstrip(":"), []).append(body + "\n")
    return Corpus({speaker: "".join(parts) for speaker, parts in texts.items()})


_MNIST: Final = _Set(
    _enlarged_digits,
    "scikit-learn's embedded 8x8 digits enlarged to 28x28",
    substitute=True,
    folder="mnist",
    files={
        "train-images-idx3-ubyte.gz": "0b367032e93c5d0cea0925647cfdb18614af8ee15f83e6f2fc2ad904a6835971",
        "train-labels-idx1-ubyte.gz": "1787548bbe0bff1ec2ecdc0ef292b02df999e2d1a6002d27500982c652b17203",
        "t10k-images-idx3-ubyte.gz": "1a1a05eab793c14bb050b398624a11b0ffd1a2953baed553b1b9bd079e2a20be",
        "t10k-labels-idx1-ubyte.gz": "b91679a0acfe4ba0e50a2437a903084cba1f5f92592b016a25a7dfd00455798b",
    },
    read=_read_mnist,
    library="torchvision",
    fetch=_fetch_mnist,
)


def _planetoid(name: str, sums: Sequence[str], offline: Callable[[], LabelledGraph]) -> _Set:
    return _Set(
        offline,
        "a drawn graph of its sizes",
        substitute=True,
        folder="planetoid",
        files={f"ind.{name.lower()}.{kind}": sha for kind, sha in zip(_PLANETOID_FILES, sums, strict=True)},
        read=planetoid.read,
        library="torch_geometric",
        fetch=graph_sources.fetch_planetoid(name),
    )


_PLANETOID_FILES: Final = ("x", "y", "tx", "ty", "allx", "ally", "graph", "test.index")

_CORA_SUMS: Final = (
    "23cfa55d91c6f624233f5eb7b6e3f141f1bd2b2ae39608a63cf5d084bb27baab",
    "94465c14eb53e04ca262198dcbb2521ee8af60fb3f3d546cd6ca24a511b0e7d1",
    "b9afbaa4a400df991f6f02ef677e1e44da55ffc04801fd02f9e673987829226a",
    "41f5ac76596a1699cc33f53084a2419e92961c42bb75f36fc38e616d348532ad",
    "9419ba2f26f5c35243db64aba110e0f35a04851609e0dc5433450676ca6b8543",
    "2b998f5cc7fedc86e7f97ca2498f47a1ffc1462c29e2d578b23bf3f62b6e7d71",
    "58f13302f39dde8852dad6fe6d15b89b077b6d7f837626bce671ef80344b383d",
    "297ce89af2b51a6a194181c7dbe1796c6a1cf9cd9349a88383b1b1e227867875",
)

_CITESEER_SUMS: Final = (
    "d20de19150741e555de0ed037195630fc194114ebc7fd72ced62810148aa22f6",
    "8ba87e515d8e3ee3cf52f6d2c5b86aa73f11ecad825a808455209ec26cd54924",
    "539a8906a2da97628d212f2fdd668c109a8b3f0d36574b59e5d3fd5b5303da21",
    "55e5bd1ba1e733a04598753ad1a8d57957f4b8f89e74519f41f4f4938767e4ce",
    "2ac30345d95c9ec933a817ee0bdd6a5f077f8c184a20e696910192d534414668",
    "f704b2d986dde6c2669934de1f3ae5696a6cf9455c0f6b2646a2d135ea0a1c95",
    "d79a4ef9d3e7169aee8946145f6b7306e35bc79bffad26346cfb94e10e9912a7",
    "2af990671580b6b2df5d158d1038f8292e30c9cd821b5453f399659b25b723d4",
)

_SHAKESPEARE: Final = _Set(
    lambda: Corpus(synthetic.speakers()),
    "synthetic text of twenty Markov speakers",
    substitute=True,
    folder="tinyshakespeare",
    files={"input.txt": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"},
    read=_read_shakespeare,
)

SETS: Final[Mapping[str, _Set]] = {
    "digits": _Set(_digits, "scikit-learn's embedded 8x8 digits"),
    "digits-generator": _Set(_digits, "scikit-learn's embedded 8x8 digits"),
    "digits-zero": _Set(_digits_zero, "scikit-learn's embedded 8x8 digits, zero against the rest"),
    "digits-five": _Set(_digits_five, "scikit-learn's embedded 8x8 digits, five and more against the rest"),
    "breast-cancer": _Set(_breast_cancer, "scikit-learn's embedded breast cancer table"),
    "mnist": _MNIST,
    "mnist-generator": _MNIST,
    "cifar10-subset": _Set(
        _enlarged_colour_digits,
        "scikit-learn's embedded 8x8 digits enlarged to 32x32 in three colours",
        substitute=True,
        folder="cifar10-jpeg-subset",
        files={"cifar10-jpeg-subset.tar.gz": "df463c17492b19ca8fde10e12e7aafcb6b0fb1b567c033fc49d0c27f4600c87d"},
        read=_read_cifar,
    ),
    "tiny-shakespeare": _SHAKESPEARE,
    # Pretraining needs the text of speakers who are no clients.
    "dialects": replace(
        _SHAKESPEARE, offline=lambda: Corpus(synthetic.speakers(48)), offline_is="synthetic text of 48 Markov speakers"
    ),
    "a9a": _Set(
        _breast_cancer,
        "scikit-learn's embedded breast cancer table (30 features instead of 123)",
        substitute=True,
        folder="a9a",
        files={
            "a9a": "7ba53cccb27e2e525f0fb173e1f446d49856e3fb007eb43be4ec6d0f5b3335ca",
            "a9a.t": "1f448a153f0320399a7e40836eb207655b0bde0f21fc941cc472193daa9f5de9",
        },
        read=_read_a9a,
    ),
    "wifi": _Set(
        lambda: _split(*synthetic.path_loss(), standardise=True),
        "synthetic signal strengths from the log-distance path-loss formula",
        substitute=True,
        folder="wifi_localization",
        files={"wifi_localization.txt": "76121abf412b961f474e72baa8a802241f3032e85590c6680dd5280b1af8e0ab"},
        read=_read_wifi,
    ),
    "digits-graph": _Set(_digits_nodes, "scikit-learn's embedded 8x8 digits"),
    "karate": _Set(graph_sources.karate, "Zachary's karate club, embedded"),
    "cora": _planetoid("Cora", _CORA_SUMS, lambda: graph_sources.citations(2708, 5278, 1433, 18, 7)),
    "citeseer": _planetoid("CiteSeer", _CITESEER_SUMS, lambda: graph_sources.citations(3327, 4552, 3703, 32, 6)),
    "cora-ml": _Set(
        lambda: graph_sources.citations(2995, 8158, 2879, 50, 7),
        "a drawn graph of its sizes",
        substitute=True,
        folder="cora_ml",
        files={"cora_ml.npz": "e3439bfd32c4a962d5c56a4f313793baee39181c208c90a3915b61183d3e1cda"},
        read=graph_sources.read_cora_ml,
        library="torch_geometric",
        fetch=graph_sources.fetch_cora_ml,
    ),
}
"""All data sets by name."""
