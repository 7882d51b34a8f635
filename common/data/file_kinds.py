"""What a file is by its first bytes: images, archives, web pages in place of a download."""

import stat
from collections.abc import Sequence
from pathlib import Path

STARTS: Sequence[tuple[int, bytes, str]] = (
    (0, b"\x89PNG\r\n", "a PNG image"),
    (0, b"\xff\xd8\xff", "a JPEG image"),
    (0, b"GIF8", "a GIF image"),
    (8, b"WEBP", "a WEBP image"),
    (4, b"ftyphei", "a HEIF image"),
    (4, b"ftypmif1", "a HEIF image"),
    (4, b"ftypavif", "an AVIF image: convert it to PNG"),
    (4, b"jP  ", "a JPEG 2000 image: convert it to PNG"),
    (0, b"\xff\x0a", "a JPEG XL image: convert it to PNG"),
    (4, b"JXL ", "a JPEG XL image: convert it to PNG"),
    (128, b"DICM", "a DICOM file: convert it to PNG or TIFF"),
    (0, b"\x93NUMPY", "a NumPy array: save it as PNG or TIFF"),
    (
        0,
        b"MATLAB 7.3",
        "a MATLAB 7.3 file, and only earlier ones are read: in MATLAB, load it and save(file,'X','y','-v7')",
    ),
    (0, b"PK\x03\x04", "a ZIP archive: unpack it there"),
    (0, b"\x1f\x8b", "a compressed archive: unpack it there"),
    (257, b"ustar", "an archive: unpack it there"),
    (0, b"version https://git-lfs", "only a reference to a file of Git LFS: fetch the file itself (git lfs pull)"),
    (0, b"<!DOCTYPE", "a web page, so the download failed: fetch it again"),
    (0, b"<html", "a web page, so the download failed: fetch it again"),
)
"""Where and how files begin: what they are, and what to do if they are to be read and are not."""


def kind_of_file(path: Path) -> str:
    """Return what a file is by its first bytes, and what to do; empty if nothing is known of them."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return ""
        with path.open("rb") as stream:
            start = stream.read(264)
    except OSError:
        return ""
    if not start:
        return "empty: fetch it again"
    for place, beginning, kind in STARTS:
        if start[place : place + len(beginning)].lower() == beginning.lower():
            return kind
    return ""
