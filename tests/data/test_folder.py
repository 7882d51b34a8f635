from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from data_makers import levels, write_classes, write_image

from common.data.folder import Folder
from common.errors import ConfigError, DataError
from common.settings import load_settings
from strategies.core.method import build_model


def wards(tmp_path: Path) -> Path:
    write_classes(tmp_path / "ward_a", {"benign": 5, "malignant": 5})
    write_classes(tmp_path / "ward_b", {"benign": 5, "unclear": 10}, start=100)
    return tmp_path


def folder(root: Path, **fields: object) -> Folder:
    return Folder(image_size=8, root=str(root), **fields)  # type: ignore[arg-type]


def test_domains_and_classes_are_found(tmp_path: Path) -> None:
    source = folder(wards(tmp_path))
    assert source.domains == ("ward_a", "ward_b")
    assert source.class_names == ("benign", "malignant", "unclear")
    domain = source.load("ward_b")
    assert domain.train.class_counts(3).tolist() == [4, 0, 8]
    assert levels(domain.test) == [104, 113, 114]


EMPTY = {
    "nothing": ("", "'ward_c' in .* has no images"),
    "no test": ("ward_c/benign/only.png", "'ward_c' in .* has no test images"),
    "an empty class": ("ward_c/unclear/.hidden.png", "'ward_c' in .* has no images"),
}


@pytest.mark.parametrize("name", ["", "..", "../elsewhere", "a/b", ".hidden", " a"])
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="cannot be a name"):
        folder(tmp_path, domains=(name,))


def test_a_class_of_one_image_is_trained_on(tmp_path: Path) -> None:
    write_classes(tmp_path / "ward", {"rare": 1, "usual": 10})
    domain = folder(tmp_path).load("ward")
    assert domain.train.class_counts(2).tolist() == [1, 8]
    assert domain.test.class_counts(2).tolist() == [0, 2]


@pytest.mark.parametrize("case", EMPTY)
def test_an_empty_domain_is_an_error(tmp_path: Path, case: str) -> None:
    place, message = EMPTY[case]
    wards(tmp_path)
    (tmp_path / "ward_c").mkdir()
    if place:
        write_image(tmp_path / place, 1)
    for classes in ((), ("benign", "malignant", "unclear")):
        with pytest.raises(DataError, match=message):
            folder(tmp_path, domains=("ward_a", "ward_c"), classes=classes).load("ward_c")


@pytest.mark.parametrize("place", ["unclear/2021/a/image.png", "image.png"])
def test_an_image_that_lies_too_deep_or_in_no_class_is_named(tmp_path: Path, place: str) -> None:
    wards(tmp_path)
    write_image(tmp_path / "ward_b" / place, 3)
    with pytest.raises(DataError, match=rf"ward_b/{place} lies (deeper than its class|in no class)"):
        folder(tmp_path).load("ward_b")


def test_what_programs_made_is_neither_a_domain_nor_a_class(tmp_path: Path) -> None:
    wards(tmp_path)
    for place in (tmp_path, tmp_path / "ward_a", tmp_path / "ward_a" / "benign"):
        for name in ("__pycache__", ".hidden", "@eaDir", "__MACOSX", "lost+found", "$RECYCLE.BIN", "tagged"):
            write_image(place / name / "image.png", 9)
        (place / "tagged" / "CACHEDIR.TAG").touch()
    source = folder(tmp_path)
    assert source.domains == ("ward_a", "ward_b")
    assert source.class_names == ("benign", "malignant", "unclear")
    assert len(source.load("ward_a").whole) == 10


def test_a_missing_domain_or_class_is_named_with_the_nearest(tmp_path: Path) -> None:
    wards(tmp_path)
    source = folder(tmp_path, domains=("ward_a", "ward_bb"), classes=("benign", "malignant"))
    with pytest.raises(DataError, match=r"'ward_bb' is not in .*did you mean 'ward_b'"):
        source.load("ward_bb")
    with pytest.raises(DataError, match="is not a directory"):
        source.load("ward_a", root=str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="did you mean 'ward_b'"):
        assert folder(tmp_path, domains=("ward_a", "ward_bb")).class_names
    write_classes(tmp_path / "ward_c", {"benigne": 5})
    with pytest.raises(DataError, match=r"ward_c/benigne is not one of data\.classes.*did you mean 'benign'"):
        folder(tmp_path, classes=("benign", "malignant", "unclear")).load("ward_c")


def test_without_any_directory_the_message_names_the_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GOLDFINCH_DATA", raising=False)
    with pytest.raises(ValueError, match=r"data\.domains=\[a,b\]"):
        Folder()
    with pytest.raises(ValueError, match=r"data\.root is not set \(GOLDFINCH_DATA alone names no domains\)"):
        Folder()
    (tmp_path / "list.txt").touch()
    for name in ("nowhere", "list.txt"):
        with pytest.raises(ValueError, match=f"data.root={tmp_path / name} is no directory"):
            folder(tmp_path / name)
    source = Folder(domains=("ward",))
    with pytest.raises(DataError, match="node's data-dir"):
        source.load("ward")
    with pytest.raises(DataError, match=r"data\.classes=\[a,b\]"):
        _ = source.class_names
    wards(tmp_path)
    with pytest.raises(DataError, match=r"data\.classes"):  # labels are never guessed from one domain
        Folder(domains=("ward_b", "ward_c")).load("ward_b", root=str(tmp_path))


@pytest.mark.parametrize("target", [".", "..", "../..", "../../other"])
def test_a_link_to_a_folder_that_it_lies_in_adds_no_images(
    target: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_classes(tmp_path / "ward", {"cat": 5, "dog": 5})
    (tmp_path / "other").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "ward" / "cat" / "again").symlink_to(target, target_is_directory=True)
    for path in ("", "domain/class/any"):
        with caplog.at_level("WARNING"):
            domain = folder(tmp_path, domains=("ward",), path=path).load("ward")
        assert (levels(domain.train), levels(domain.test)) == ([0, 1, 2, 3, 5, 6, 7, 8], [4, 9])
    assert "cat/again/ (a link to a folder that it lies in)" in caplog.text


@pytest.mark.parametrize("layout", ["split/domain/class", "class/domain", "split/class", ""])
def test_devices_without_the_others_images_do_not_number_the_classes_by_their_own(layout: str, tmp_path: Path) -> None:
    """The class 1 of a device would be another than that of its neighbour, who lacks another class."""
    for site, classes in (("a", ("cat", "dog")), ("b", ("cat", "fox"))):
        for number, name in enumerate(classes):
            for split in ("train", "test"):
                place = {"split/domain/class": f"{split}/{site}/{name}", "class/domain": f"{name}/{site}"}
                place["split/class"] = f"{split}/{name}"
                write_image(tmp_path / site / place.get(layout, f"{site}/{split}/{name}") / f"{split}.png", number)
        if not layout:
            (tmp_path / site / "a").mkdir(exist_ok=True)
            (tmp_path / site / "b").mkdir(exist_ok=True)
        for place in (tmp_path / site, None):
            source = folder(tmp_path / site, domains=("a", "b"), path=layout)
            with pytest.raises(DataError, match=r"has no (images of '.'|domain).* name the classes \(data.c"):
                source.load(site, root=str(place) if place else None)
        named = folder(tmp_path / site, domains=("a", "b"), path=layout, classes=("cat", "dog", "fox"))
        assert named.load(site).whole.labels.unique().tolist() == [0, 1 if site == "a" else 2]


DEVIATING = {
    "domain/any/class": (("a/images/{label}", "b/{label}"), "b/cat/0.png"),
    "domain/split/class": (("a/{part}/{label}", "b/{part}/{label}", "c/{label}"), "c/cat/0.png"),
    "domain/class": (("a/{label}", "b/{label}", "c/p1/{label}"), "c/p1/cat/0.png"),
}


@pytest.mark.parametrize("path", DEVIATING)
def test_a_site_that_lies_otherwise_than_the_path_says_is_not_left_out(path: str, tmp_path: Path) -> None:
    """It vanished without a word, and all others trained on."""
    patterns, named = DEVIATING[path]
    for pattern, label, part, number in product(patterns, ("cat", "dog"), ("train", "test"), range(2)):
        write_image(tmp_path / pattern.format(label=label, part=part) / f"{number}.png", number)
    source = folder(tmp_path, path=path)
    assert source.domains == tuple(sorted({pattern[0] for pattern in patterns}))
    with pytest.raises(DataError, match=f"{named} does not lie as data.path={path} says; .*move"):
        _ = source.class_names


@pytest.mark.parametrize("path", ["domain/class/any", "domain/any/class"])
def test_a_devices_own_folder_is_read_by_the_path_of_all(path: str, tmp_path: Path) -> None:
    for label, number in product(("cat", "dog"), range(4)):
        place = {"domain/class/any": f"{label}/p{number % 2}", "domain/any/class": f"scans/{label}"}[path]
        write_image(tmp_path / "site_a" / place / f"{number}.png", number)
    source = Folder(path=path, domains=("site_a", "site_b"), classes=("cat", "dog"), image_size=8)
    for root in (tmp_path / "site_a", tmp_path):
        assert len(source.load("site_a", root=str(root)).whole) == 8


def test_a_folder_may_be_called_like_an_image(tmp_path: Path) -> None:
    write_classes(tmp_path / "ward.tif", {"cat.png": 5, "dog": 5})
    domain = folder(tmp_path).load("ward.tif")
    assert domain.train.class_counts(2).tolist() == [4, 4]


def test_images_of_one_class_are_nothing_to_train_on(tmp_path: Path) -> None:
    for site in ("ward_a", "ward_b"):
        write_classes(tmp_path / site, {"cat": 10})
    settings = load_settings(["data=folder", f"data.root={tmp_path}", "data.domains=[ward_a,ward_b]"])
    with pytest.raises(ConfigError, match=r"nothing to learn of one class: add images of a second to \['cat'\]"):
        build_model(settings, 2)


@pytest.mark.parametrize(
    ("place", "setting"),
    [
        ("{part}/{domain}/{label}", "split/domain/class"),
        ("{label}/{domain}", "class/domain"),
        ("data/{domain}/{label}", "any/domain/class"),
    ],
)
def test_a_domain_that_is_named_and_lies_deeper_gets_the_setting(place: str, setting: str, tmp_path: Path) -> None:
    level = 0
    for domain, label, part in product(("ward_a", "ward_b"), ("cat", "dog"), ("train", "test")):
        folder = tmp_path / place.format(domain=domain, label=label, part=part)
        for _ in range(3):
            level += 1
            write_image(folder / f"{level}.png", level)
    named = Folder(root=str(tmp_path), domains=("ward_a", "ward_b"), image_size=8)
    with pytest.raises(DataError, match=f"ward_a does not exist; data.path={setting} reads ward_a"):
        _ = named.class_names
    assert replace(named, path=setting).class_names == ("cat", "dog")
