"""Readers of the public digit formats. Each returns uint8 images [N, H, W] or [N, H, W, 3] and int64 labels [N]."""

import bz2
import gzip
import io
import tarfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath

import numpy as np

from common.data.file_kinds import kind_of_file
from common.data.image_files import decode_image, image_files
from common.errors import DataError
from common.extras import libraries_of
from common.regular_files import MAX_TENSOR_FILE, check_regular, check_within

Arrays = tuple[np.ndarray, np.ndarray]


def existing(directory: Path, names: Iterable[str]) -> Path | None:
    """Return the path of the first of ``names`` that exists in ``directory``; ``None`` if none does."""
    for name in names:
        if (directory / name).exists():
            return directory / name
    return None


def damaged(path: Path, reason: object) -> DataError:
    """Return the error for a file that is not of the expected format, with what its first bytes say that it is."""
    kind = kind_of_file(path)
    if kind and "compressed" not in kind:
        return DataError(f"{path} is {kind}")
    return DataError(f"{path} is damaged ({reason}); fetch it again")


def decompressed(path: Path) -> bytes:
    """Return a file's content, unpacked if its first bytes are those of gzip or bzip2, whatever its suffix says.

    Raises:
        DataError: it is missing, cut short or damaged.
    """
    try:
        check_regular(path, MAX_TENSOR_FILE)  # reading a pipe would block
        data = path.read_bytes()
        if data.startswith(b"\x1f\x8b"):
            return gzip.decompress(data)
        if data.startswith(b"BZh"):
            return bz2.decompress(data)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise damaged(path, error) from error
    return data


def read_idx(path: Path) -> np.ndarray:
    """Return the array in an IDX file of bytes (the MNIST format), packed or not: uint8, 1 to 4 dimensions."""
    data = decompressed(path)
    if len(data) < 4 or data[:3] != b"\0\0\x08" or not 1 <= data[3] <= 4 or len(data) < 4 + 4 * data[3]:
        raise damaged(path, "it has no header of an IDX file of bytes")
    shape = [int.from_bytes(data[4 + 4 * axis : 8 + 4 * axis], "big") for axis in range(data[3])]
    start = 4 + 4 * data[3]
    if len(data) - start != int(np.prod(shape, dtype=object)):
        raise damaged(path, f"{len(data) - start} bytes instead of the {shape} in its header")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def read_mnist(directory: Path, train: bool) -> Arrays:
    """Return ``{train,t10k}-{images-idx3,labels-idx1}-ubyte[.gz]``: grey 28x28."""
    prefix = "t10k"
    if train:
        prefix = "train"
    arrays = []
    for stem in (f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"):
        path = existing(directory, (stem + ".gz", stem, stem.replace("-idx", ".idx")))
        if path is None:
            raise DataError(f"mnist: {directory / stem}.gz is missing; put MNIST's four idx files there")
        arrays.append(read_idx(path))
    return arrays[0], arrays[1].astype(np.int64)


def read_usps(directory: Path, train: bool) -> Arrays:
    """``usps[.t][.bz2]``, LIBSVM's text format: 256 values in -1..1 (grey 16x16), classes 1..10 for the digits 0..9."""
    with libraries_of("datasets", "usps"):
        from sklearn.datasets import load_svmlight_file  # slow to import, and needed only to decode

    stem = "usps.t"
    if train:
        stem = "usps"
    path = existing(directory, (f"{stem}.bz2", stem, f"{stem}.gz"))
    if path is None:
        raise DataError(f"usps: {directory / stem}.bz2 is missing; put LIBSVM's usps.bz2 and usps.t.bz2 there")
    content = decompressed(path)
    try:
        values, classes = load_svmlight_file(io.BytesIO(content), n_features=256)
    except ValueError as error:
        raise damaged(path, error) from error
    if values.min() >= 0:
        raise damaged(
            path, f"values from {values.min():g} to {values.max():g}; those of LIBSVM's usps.bz2 are in -1..1"
        )
    grey = ((values.toarray() + 1) * 127.5).round().clip(0, 255).astype(np.uint8)
    return grey.reshape(-1, 16, 16), classes.astype(np.int64) - 1


def read_mat(path: Path) -> Arrays:
    """Return a MATLAB file with X uint8 [32, 32, 3, N] and y [N, 1], where SVHN writes 10 for the digit 0."""
    with libraries_of("datasets", "a MATLAB file"):
        import scipy.io  # slow to import, and needed only to decode

    try:
        content = scipy.io.loadmat(str(path), variable_names=["X", "y"])
        images, labels = content["X"], content["y"].reshape(-1).astype(np.int64)
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing; put the data set's two .mat files there") from error
    except Exception as error:  # scipy raises errors of many kinds for damaged files
        raise damaged(path, error) from error
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[2] != 3 or images.shape[3] != len(labels):
        raise damaged(path, f"X is {images.dtype} {list(images.shape)}, y has {len(labels)} labels")
    return np.ascontiguousarray(images.transpose(3, 0, 1, 2)), labels % 10


def read_class_folders(directory: Path, image_size: int) -> Arrays:
    """Return ``directory/{0..9}/*.png`` (or jpg), resized."""
    images, labels = [], []
    for digit in range(10):
        folder = directory / str(digit)
        files: list[Path] = []
        if folder.is_dir():
            files = image_files(folder)
        if not files:
            raise DataError(f"class folder {folder} is missing or has no images; put the images of that digit there")
        check_within(files, directory)
        images += [decode_image(path, image_size, str(path)) for path in files]
        labels += [digit] * len(files)
    return np.stack(images), np.array(labels, dtype=np.int64)


def read_listed(place: Path, list_name: str, image_size: int, locate: Callable[[str], str]) -> Arrays:
    """Return images named by a list file with lines ``file label``; both are in a directory or in a tar archive.

    Args:
        place: the directory or the archive (.tar, .tar.gz); archives are read without unpacking them.
        list_name: path of the list file inside.
        image_size: images are resized to it.
        locate: a line's file to its path inside.
    """
    if place.is_dir():
        path = place / list_name
        if not path.is_file():
            raise DataError(f"{path} is missing; put the data set's list files there")
        names, labels = _parse(path.read_text(encoding="utf-8"), path)
        files = [place / locate(name) for name in names]
        check_within(files, place)
        return np.stack([decode_image(file, image_size, str(file)) for file in files]), labels
    found: dict[str, bytes] = {}
    try:
        check_regular(place, MAX_TENSOR_FILE)
        with tarfile.open(place) as archive:
            for member in archive:
                if not member.isfile():
                    continue
                content = archive.extractfile(member)
                if content is not None:
                    found[str(PurePosixPath(member.name))] = content.read()
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise damaged(place, error) from error
    if list_name not in found:
        raise damaged(place, f"it does not contain {list_name}")
    names, labels = _parse(found[list_name].decode(), place / list_name)
    images = []
    for name in map(locate, names):
        if name not in found:
            raise damaged(place, f"{list_name} names {name}, which it does not contain")
        images.append(decode_image(io.BytesIO(found[name]), image_size, f"{place}:{name}"))
    return np.stack(images), labels


def _parse(text: str, path: Path) -> tuple[list[str], np.ndarray]:
    names, labels = [], []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words:
            continue
        if len(words) != 2 or not words[1].isdecimal():
            raise DataError(
                f"{path}, line {number}: expected 'file label' with a space between them, paths with / and no blanks, "
                f"got {line!r}"
            )
        names.append(words[0])
        labels.append(int(words[1]))
    if not names:
        raise damaged(path, "it lists no images")
    return names, np.array(labels, dtype=np.int64)
