from __future__ import annotations

import bz2
import gzip
import io
import os
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch
from data_makers import even_labels, levels, write_image
from PIL import Image

from common.data.batches import Split
from common.data.digit_files import decompressed, read_idx, read_listed, read_mat
from common.data.digits import Digits, pooled
from common.errors import DataError

LABELS = even_labels(20).astype(np.uint8)


def digits(root: Path, *domains: str, **fields: object) -> Digits:
    return Digits(domains=domains, root=str(root), **fields)  # type: ignore[arg-type]


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def write_mnist(folder: Path, packed: bool = True) -> None:
    folder.mkdir(parents=True)
    for prefix in ("train", "t10k"):
        images = np.broadcast_to(np.arange(20)[:, None, None], (20, 28, 28))
        for stem, array in (("images-idx3", images), ("labels-idx1", LABELS)):
            path = folder / f"{prefix}-{stem}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(idx(array), mtime=0) if packed else idx(array))


def write_mat(path: Path, count: int = 20, zero: int = 10) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    images = np.broadcast_to(np.arange(count, dtype=np.uint8), (32, 32, 3, count))
    labels = np.where(even_labels(count) == 0, zero, even_labels(count))
    scipy.io.savemat(path, {"X": images, "y": labels.astype(np.uint8)[:, None]})


def png(level: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32), (level, level, level)).save(buffer, "PNG")
    return buffer.getvalue()


def write_tar(path: Path, files: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def mnist_m_files() -> dict[str, bytes]:
    files = {}
    for part in ("train", "test"):
        files |= {f"mnist_m/mnist_m_{part}/{index:08}.png": png(index) for index in range(20)}
        lines = [f"{index:08}.png {LABELS[index]}" for index in range(20)]
        files[f"mnist_m/mnist_m_{part}_labels.txt"] = "\n".join(lines).encode()
    return files


@pytest.mark.parametrize("packed", [True, False])
def test_mnist(tmp_path: Path, packed: bool) -> None:
    write_mnist(tmp_path / "digits" / "MNIST" / "raw", packed)
    for place in (tmp_path, tmp_path / "digits" / "MNIST" / "raw"):  # a node's directory may be the set's own
        domain = Digits().load("mnist", root=str(place))
        for split in (domain.train, domain.test):
            assert split.images.shape == (20, 3, 32, 32)
            assert levels(split) == list(range(20))
            assert split.labels.tolist() == LABELS.tolist()


def test_usps(tmp_path: Path) -> None:
    (tmp_path / "USPS").mkdir()
    lines = [f"{digit + 1} " + " ".join(f"{pixel}:{value}" for pixel in range(1, 257)) for digit, value in
             ((0, -1), (9, 1), (5, 0))]  # fmt: skip
    for name in ("usps.bz2", "usps.t.bz2"):
        (tmp_path / "USPS" / name).write_bytes(bz2.compress("\n".join(lines).encode()))
    domain = digits(tmp_path, "usps", image_size=16).load("usps")
    assert levels(domain.train) == [0, 255, 128]
    assert domain.test.labels.tolist() == [0, 9, 5]


@pytest.mark.parametrize(("name", "folder", "stem"), [("svhn", "SVHN", ""), ("synth_digits", "SynthDigits", "synth_")])
def test_mat_files(tmp_path: Path, name: str, folder: str, stem: str) -> None:
    for part in ("train", "test"):
        write_mat(tmp_path / folder / f"{stem}{part}_32x32.mat", zero=10 if name == "svhn" else 0)
    domain = digits(tmp_path, name).load(name)
    assert levels(domain.train) == list(range(20))
    assert domain.test.labels.tolist() == LABELS.tolist()


@pytest.mark.parametrize("packed", [True, False])
def test_mnist_m(tmp_path: Path, packed: bool) -> None:
    if packed:
        write_tar(tmp_path / "MNIST-M" / "mnist_m.tar.gz", mnist_m_files())
    else:
        write_all(tmp_path / "MNIST-M", mnist_m_files())
    domain = digits(tmp_path, "mnist_m").load("mnist_m")
    assert levels(domain.test) == list(range(20))
    assert domain.train.labels.tolist() == LABELS.tolist()


def test_the_small_synthetic_set_is_an_image_folder(tmp_path: Path) -> None:
    for part in ("imgs_train", "imgs_valid"):
        for digit in range(10):
            write_image(tmp_path / "SYN" / part / str(digit) / "a.png", digit * 20)
    source = digits(tmp_path, "syn", "synth_digits")
    domain = source.load("syn")
    assert levels(domain.train) == [digit * 20 for digit in range(10)]
    assert domain.test.labels.tolist() == list(range(10))
    with pytest.raises(DataError, match="synth_digits is not in"):
        source.load("synth_digits")


def test_the_two_synthetic_sets_are_not_taken_for_each_other_or_for_fonts(tmp_path: Path) -> None:
    for part in ("train", "test"):
        write_mat(tmp_path / "SynthDigits" / f"synth_{part}_32x32.mat", zero=0)
    (tmp_path / "CHARS74K-FNT").mkdir()
    source = digits(tmp_path, "syn", "synth_digits")
    with pytest.raises(DataError, match=r"syn is not in .*10,000 \+ 2,000 images.*another domain.*computer_fonts"):
        source.load("syn")
    assert len(source.load("synth_digits").train) == 20


def test_computer_fonts(tmp_path: Path) -> None:
    files = {}
    for part in ("train", "test"):
        names = [f"Fnt/Sample{digit + 1:03}/{part}.png" for digit in range(10)]
        files |= {f"English/{name}": png(digit) for digit, name in enumerate(names)}
        files[f"English/{part}.txt"] = "\n".join(f"{name} {digit}" for digit, name in enumerate(names)).encode()
    write_tar(tmp_path / "CHARS74K-FNT" / "EnglishFnt_digits_28x28.tar.gz", files)
    domain = digits(tmp_path, "computer_fonts").load("computer_fonts")
    assert levels(domain.train) == list(range(10))
    assert domain.name == "computer_fonts"


def test_the_decoded_set_is_cached_until_a_file_changes(tmp_path: Path, own_cache: Path) -> None:
    write_mnist(tmp_path / "MNIST" / "raw")
    source = digits(tmp_path, "mnist")
    source._read("mnist")
    source._read("mnist")
    assert len(list(own_cache.glob("digits-mnist-*"))) == 1
    path = tmp_path / "MNIST" / "raw" / "train-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(idx((LABELS + 1) % 10), compresslevel=1, mtime=0))
    assert source._read("mnist").train.labels.tolist() == ((LABELS + 1) % 10).tolist()


def test_pooling_divides_80_20_with_equal_classes() -> None:
    images = torch.arange(200, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 2, 2)
    labels = torch.from_numpy(even_labels(200))
    train, test = pooled(Split(images[:150], labels[:150]), Split(images[150:], labels[150:]))
    assert train.class_counts(10).tolist() == [16] * 10
    assert test.class_counts(10).tolist() == [4] * 10
    assert sorted(levels(train) + levels(test)) == list(range(200))
    again, _ = pooled(Split(images[:150], labels[:150]), Split(images[150:], labels[150:]))
    assert torch.equal(train.images, again.images)


@pytest.mark.parametrize(("total", "tenth"), [(70_000, 5600), (99_289, 7943), (9298, 743)])
def test_pooled_tenths_have_fedpalls_sizes(total: int, tenth: int) -> None:
    labels = torch.from_numpy(even_labels(total))
    images = torch.zeros(1, 3, 1, 1, dtype=torch.uint8).expand(total, 3, 1, 1)
    train, _ = pooled(Split(images[:-10], labels[:-10]), Split(images[-10:], labels[-10:]))
    assert len(train) // 10 == tenth


def test_an_archive_that_lacks_an_image_is_named(tmp_path: Path, own_cache: Path) -> None:
    files = mnist_m_files()
    del files["mnist_m/mnist_m_test/00000003.png"]
    write_tar(tmp_path / "MNIST-M" / "mnist_m.tar.gz", files)
    with pytest.raises(DataError, match=r"names mnist_m/mnist_m_test/00000003\.png, which it does not contain"):
        digits(tmp_path, "mnist_m").load("mnist_m")
    assert not list(own_cache.iterdir())


def test_a_label_that_is_no_number_is_named(tmp_path: Path) -> None:
    odd = {"mnist_m/mnist_m_test_labels.txt": "00000000.png ²".encode()}
    write_all(tmp_path / "MNIST-M", mnist_m_files() | odd)
    with pytest.raises(DataError, match="line 1: expected 'file label'"):
        digits(tmp_path, "mnist_m").load("mnist_m")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    write_all(tmp_path, {"USPS/usps.bz2": b"rubbish"})
    with pytest.raises(DataError, match=r"usps\.bz2 is damaged"):
        digits(tmp_path, "usps").load("usps")
    path = tmp_path / "train_32x32.mat"
    write_mat(path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(DataError, match=r"train_32x32\.mat is damaged"):
        read_mat(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b"\0\0\x08\x01\0\0\0\x05abc", mtime=0), r"3 bytes .*\[5\]"),
        (gzip.compress(b"\0\0\x0d\x01\0\0\0\x01abcd", mtime=0), "no header of an IDX"),
        (gzip.compress(idx(LABELS), mtime=0)[:-9], "damaged"),
    ],
    ids=["fewer values than it says", "values of another type", "cut short"],
)
def test_a_damaged_idx_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "labels.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"labels\.gz.*{message}"):
        read_idx(path)


def test_the_error_of_a_missing_data_set_names_the_expected_files(tmp_path: Path) -> None:
    source = digits(tmp_path, "mnist", "synth_digits", "svhn")
    for name, wanted in (("mnist", "train-images-idx3"), ("synth_digits", "479,400")):
        with pytest.raises(DataError, match=f"{name} is not in .*put .*{wanted}"):
            source.load(name)
    (tmp_path / "SVHN").mkdir()
    with pytest.raises(DataError, match=r"train_32x32\.mat is missing"):
        source.load("svhn")


def write_all(root: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "set")
    with pytest.raises(DataError, match="set is not a regular file"):
        decompressed(tmp_path / "set")
    with pytest.raises(DataError, match="set is not a regular file"):
        read_listed(tmp_path / "set", "list.txt", 8, str)
