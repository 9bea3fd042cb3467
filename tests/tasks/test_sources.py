"""The three ways data comes in: local and verified, library on request, offline default with a warning."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import types
import warnings
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from fedcomp.errors import ConfigError
from fedcomp.tasks import get_task, registry, sources, synthetic
from fedcomp.tasks.sources import Corpus, DataError, DataMismatch, DataWarning, LabelledExamples, load


@pytest.fixture(autouse=True)
def _fresh() -> None:
    """Forget loaded sets and tasks: each test is to see the first load, with its warning."""
    sources._load.cache_clear()
    registry._build.cache_clear()


def _wifi_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local wifi set of our own making, with its SHA-256 recorded."""
    import hashlib
    from dataclasses import replace

    rng = np.random.default_rng(0)
    rows = np.column_stack([rng.integers(-90, -30, (60, 7)), np.arange(60) // 15 + 1])
    text = "\n".join("\t".join(map(str, row)) for row in rows).encode()
    folder = tmp_path / "wifi_localization"
    folder.mkdir()
    (folder / "wifi_localization.txt").write_bytes(text)
    entry = replace(sources.SETS["wifi"], files={"wifi_localization.txt": hashlib.sha256(text).hexdigest()})
    monkeypatch.setattr(sources, "SETS", {**sources.SETS, "wifi": entry})
    return folder


def test_local_files_are_read_and_verified_without_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _wifi_folder(tmp_path, monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table, source = load("wifi", root=tmp_path)
    assert (source.used, source.verified, source.substitute) == ("local", True, False)
    assert isinstance(table, LabelledExamples)
    assert table.x_train.shape == (48, 7)
    assert np.bincount(table.y_test).tolist() == [3, 3, 3, 3]
    np.testing.assert_allclose(table.x_train.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(table.x_train.std(0), 1, atol=1e-5)


def test_root_from_the_environment_and_the_argument_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _wifi_folder(tmp_path, monkeypatch)
    monkeypatch.setenv("FEDCOMP_DATA", str(tmp_path))
    assert load("wifi")[1].used == "local"
    assert get_task("wifi").data.used == "local"
    with pytest.warns(DataWarning):
        assert load("wifi", root=tmp_path / "elsewhere")[1].used == "offline"
    monkeypatch.delenv("FEDCOMP_DATA")
    with pytest.warns(DataWarning):
        assert get_task("wifi").data.used == "offline"


def test_file_changed_after_the_first_load_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = _wifi_folder(tmp_path, monkeypatch) / "wifi_localization.txt"
    original = file.read_bytes()
    content, source = load("wifi", root=tmp_path)
    task = get_task("wifi", root=tmp_path)
    assert source.verified
    # An untouched set is not read again.
    assert load("wifi", root=tmp_path)[0] is content
    assert get_task("wifi", root=tmp_path) is task
    _write_later(file, original.replace(b"\t1\n", b"\t2\n", 1))
    with pytest.raises(DataMismatch, match="SHA-256"):
        load("wifi", root=tmp_path)
    with pytest.raises(DataMismatch, match="SHA-256"):
        get_task("wifi", root=tmp_path)
    _write_later(file, original)
    assert load("wifi", root=tmp_path)[1].verified
    file.unlink()
    with pytest.raises(DataError, match="missing"):
        get_task("wifi", root=tmp_path)


def _write_later(file: Path, data: bytes) -> None:
    """Write ``data`` of the same size with a later time of change, whatever the clock of the file system resolves."""
    before = file.stat()
    assert len(data) == before.st_size
    file.write_bytes(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))


def _make_directory(path: Path) -> None:
    path.mkdir()


def _make_file(path: Path) -> None:
    path.write_text("not a folder")


def _make_dangling_link(path: Path) -> None:
    path.symlink_to(path.with_name("nowhere"))


def _make_loop(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("make", [_make_file, _make_dangling_link, _make_loop])
def test_what_stands_in_the_folders_place_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "a9a")
    for call in (lambda: load("a9a", root=tmp_path), lambda: get_task("a9a", root=tmp_path)):
        with pytest.raises(DataError, match="a9a"):
            call()
    make(tmp_path / "root")
    with pytest.raises(DataError, match="root"):
        load("a9a", root=tmp_path / "root")


def test_linked_folder_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _wifi_folder(tmp_path, monkeypatch)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "wifi_localization").symlink_to(folder)
    assert load("wifi", root=tmp_path / "linked")[1].used == "local"


@pytest.mark.parametrize("make", [_make_directory, os.mkfifo, _make_dangling_link, _make_loop])
def test_what_stands_in_a_files_place_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None]
) -> None:
    file = _wifi_folder(tmp_path, monkeypatch) / "wifi_localization.txt"
    file.unlink()
    make(file)
    with pytest.raises(DataError, match=r"wifi_localization\.txt"):
        load("wifi", root=tmp_path)


def test_unreadable_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _wifi_folder(tmp_path, monkeypatch)

    def refuse(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    # Not by mode bits: they do not bind the superuser, who may run the tests.
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match="Permission denied"):
        load("wifi", root=tmp_path)


def test_unreachable_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> os.stat_result:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(sources.os, "lstat", refuse)
    with pytest.raises(DataError, match="Permission denied"):
        load("a9a", root=tmp_path)


def test_impossible_root_is_refused() -> None:
    with pytest.raises(DataError, match="root"):
        load("a9a", root="null\0byte")


def test_incomplete_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a9a").mkdir()
    with pytest.raises(DataError, match="missing"):
        load("a9a", root=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mnist", "cifar10-subset", "tiny-shakespeare", "a9a", "wifi"])
def test_stand_ins_warn_and_say_so_in_the_record(name: str) -> None:
    with pytest.warns(DataWarning, match="used instead"):
        task = get_task(name)
    record = task.record()["data"]
    assert record["substitute"] is True
    assert record["used"] == "offline"
    assert "used instead" in record["note"]
    assert record["name"] == name


@pytest.mark.parametrize("name", ["digits", "breast-cancer"])
def test_embedded_sets_are_what_they_say(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, source = load(name)
    assert (source.used, source.substitute) == ("offline", False)


def _torchvision_is(monkeypatch: pytest.MonkeyPatch, found: object) -> None:
    """Let a look for torchvision find ``found``; other packages are where they are."""
    real = sources.importlib.util.find_spec
    monkeypatch.setattr(
        sources.importlib.util, "find_spec", lambda name: found if name == "torchvision" else real(name)
    )


def _fake_torchvision(monkeypatch: pytest.MonkeyPatch, calls: list[tuple[str, bool, bool]]) -> None:
    class Fake:
        def __init__(self, root: str, train: bool, download: bool) -> None:
            calls.append((root, train, download))
            n = 30 if train else 10
            self.data = np.full((n, 28, 28), 255 if train else 0, np.uint8)
            self.targets = np.arange(n) % 10

    package, module = types.ModuleType("torchvision"), types.ModuleType("torchvision.datasets")
    module.MNIST = Fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision", package)
    monkeypatch.setitem(sys.modules, "torchvision.datasets", module)
    _torchvision_is(monkeypatch, object())


def test_library_is_used_only_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, bool, bool]] = []
    _fake_torchvision(monkeypatch, calls)
    with pytest.warns(DataWarning):
        load("mnist", root=tmp_path)
    assert calls == []
    table, source = load("mnist", root=tmp_path, download=True)
    assert calls == [(str(tmp_path), True, True), (str(tmp_path), False, True)]
    assert (source.used, source.verified, source.substitute) == ("library", False, False)
    assert isinstance(table, LabelledExamples)
    assert table.x_train.shape == (30, 784)
    assert table.x_train[0, 0] == pytest.approx((1 - 0.1307) / 0.3081, rel=1e-6)
    assert table.x_test[0, 0] == pytest.approx(-0.1307 / 0.3081, rel=1e-6)


def test_local_files_win_over_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, bool, bool]] = []
    _fake_torchvision(monkeypatch, calls)
    (tmp_path / "mnist").mkdir()
    with pytest.raises(DataError):
        load("mnist", root=tmp_path, download=True)
    assert calls == []


def test_missing_library_falls_back_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    _torchvision_is(monkeypatch, None)
    with pytest.warns(DataWarning, match="torchvision is not installed"):
        assert load("mnist", download=True)[1].used == "offline"


def test_unknown_set() -> None:
    with pytest.raises(ConfigError, match="did you mean 'mnist'"):
        load("mnits")


def test_loaded_arrays_are_read_only() -> None:
    table, _ = load("digits")
    assert isinstance(table, LabelledExamples)
    with pytest.raises(ValueError, match="read-only"):
        table.x_train[0] = 0


def test_synthetic_speakers_differ_from_one_another() -> None:
    texts = synthetic.speakers(4, 6000)
    assert texts == synthetic.speakers(4, 6000)
    assert [len(t) for t in texts.values()] == [6000, 4800, 4000, 3428]

    def pairs(text: str) -> Counter[str]:
        return Counter(a + b for a, b in pairwise(text))

    one, two = texts["SPEAKER 00"], texts["SPEAKER 01"]
    half = len(one) // 2
    within = (pairs(one[:half]) & pairs(one[half:])).total() / half
    across = (pairs(one[:half]) & pairs(two[:half])).total() / half
    assert within > across + 0.1


def test_path_loss_falls_with_distance() -> None:
    x, y = synthetic.path_loss()
    assert np.bincount(y).tolist() == [500] * 4
    # The access points in the rooms' centres are heard best from their own room.
    means = np.array([[x[y == room, point].mean() for point in range(4)] for room in range(4)])
    assert (means.argmax(0) == np.arange(4)).all()
    assert -100 < x.min() < x.max() < -25


def test_real_files_have_their_published_counts(local_data: Path) -> None:
    mnist, source = load("mnist", root=local_data)
    assert source.verified
    assert isinstance(mnist, LabelledExamples)
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert np.bincount(mnist.y_train).tolist() == counts
    assert mnist.x_test.shape == (10000, 784)
    assert abs(mnist.x_train.mean()) < 1e-3
    a9a, _ = load("a9a", root=local_data)
    assert isinstance(a9a, LabelledExamples)
    assert (a9a.x_train.shape, int(a9a.y_train.sum())) == ((32561, 123), 7841)
    assert (a9a.x_test.shape, int(a9a.y_test.sum())) == ((16281, 123), 3846)
    assert np.count_nonzero(a9a.x_train) == 451592
    text, _ = load("tiny-shakespeare", root=local_data)
    assert isinstance(text, Corpus)
    assert len(text.texts) == 309
    assert sum(len(t) >= 1000 for t in text.texts.values()) == 141
    assert len(set("".join(text.texts.values()))) <= 65
    wifi, _ = load("wifi", root=local_data)
    assert isinstance(wifi, LabelledExamples)
    assert np.bincount(np.concatenate([wifi.y_train, wifi.y_test])).tolist() == [500] * 4


def test_the_images_of_cifar10_are_read_by_number_then_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib
    import io
    import tarfile
    from dataclasses import replace

    from PIL import Image

    file, colour = tmp_path / "cifar10-jpeg-subset" / "cifar10-jpeg-subset.tar.gz", {"cat": 200, "truck": 40}
    file.parent.mkdir()
    with tarfile.open(file, "w:gz") as archive:
        for path in ("train/truck/0000.jpg", "train/cat/0001.jpg", "train/cat/0000.jpg", "test/truck/0000.jpg"):
            stream = io.BytesIO()
            red = colour[path.split("/")[1]]
            Image.new("RGB", (32, 32), (red, 0, 255)).save(stream, "JPEG", quality=95)
            member = tarfile.TarInfo(path)
            member.size = len(stream.getvalue())
            archive.addfile(member, io.BytesIO(stream.getvalue()))
    entry = replace(sources.SETS["cifar10-subset"], files={file.name: hashlib.sha256(file.read_bytes()).hexdigest()})
    monkeypatch.setattr(sources, "SETS", {**sources.SETS, "cifar10-subset": entry})
    table, source = load("cifar10-subset", root=tmp_path)
    assert source.verified
    assert isinstance(table, LabelledExamples)
    assert table.y_train.tolist() == [3, 9, 3]
    assert table.y_test.tolist() == [9]
    # Colours first, in [-1, 1]: red as drawn (JPEG loses a little), green none, blue full.
    red, green, blue = table.x_train[1].reshape(3, 32, 32)
    np.testing.assert_allclose(red, 40 / 127.5 - 1.0, atol=0.06)
    assert green.max() < -0.9
    assert blue.min() > 0.9


@pytest.mark.slow
def test_embedded_tables_are_scikit_learns_own_read_without_the_library() -> None:
    from sklearn.datasets import load_breast_cancer, load_digits

    for bunch, name, skip in ((load_digits(), "digits.csv.gz", 0), (load_breast_cancer(), "breast_cancer.csv", 1)):
        x, y = sources._embedded(name, skip)
        assert x.dtype == bunch.data.dtype == np.float64
        assert x.tobytes() == bunch.data.tobytes()
        np.testing.assert_array_equal(y, bunch.target)
    code = (
        "import sys; from fedcomp.tasks.sources import load\n"
        "import warnings; warnings.simplefilter('ignore')\n"
        "[load(n) for n in ('digits', 'digits-zero', 'digits-five', 'breast-cancer', 'mnist', 'a9a')]\n"
        "print([m for m in ('torch', 'sklearn', 'scipy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_missing_library_or_file_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="reinstall scikit-learn"):
        sources._embedded("no-such-table.csv")
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="not installed"):
        sources._embedded("digits.csv.gz")


def test_digits_five_is_in_order_of_the_digit_and_in_the_unit_interval() -> None:
    table, _ = load("digits-five")
    other, _ = load("digits")
    assert isinstance(table, LabelledExamples)
    assert isinstance(other, LabelledExamples)
    order = np.argsort(other.y_train, kind="stable")
    np.testing.assert_array_equal(table.y_train, (other.y_train[order] >= 5).astype(np.int64))
    np.testing.assert_allclose(table.x_train, (other.x_train[order] * 6.017 + 4.884) / 16, atol=1e-6)
    assert table.x_train.min() == 0.0
    assert table.x_train.max() == 1.0
    assert (len(table.x_train), len(table.x_test), table.classes) == (1442, 355, 2)
