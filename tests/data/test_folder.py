from __future__ import annotations

from pathlib import Path

import pytest
from data_makers import levels, write_classes, write_image

from common.data.folder import Folder
from common.errors import DataError


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
    assert source.class_count == 3
    domain = source.load("ward_b")
    assert domain.train.class_counts(3).tolist() == [4, 0, 8]
    assert levels(domain.test) == [104, 113, 114]


def test_train_and_test_folders_are_taken_as_they_are(tmp_path: Path) -> None:
    write_classes(tmp_path / "clinic" / "train", {"x": 1, "y": 2})
    write_classes(tmp_path / "clinic" / "val", {"x": 1, "z": 1}, start=50)
    source = folder(tmp_path)
    domain = source.load("clinic")
    assert source.class_names == ("x", "y", "z")
    assert (levels(domain.train), domain.train.labels.tolist()) == ([0, 1, 2], [0, 1, 1])
    assert (levels(domain.test), domain.test.labels.tolist()) == ([50, 51], [0, 2])


def test_test_images_that_are_training_images_can_be_dropped(tmp_path: Path) -> None:
    write_classes(tmp_path / "clinic" / "train", {"x": 2, "y": 2})
    write_classes(tmp_path / "clinic" / "test", {"x": 2, "y": 2}, start=50)
    copied = (tmp_path / "clinic" / "train" / "y" / "image_001.png").read_bytes()
    (tmp_path / "clinic" / "test" / "x" / "image_000.png").write_bytes(copied)
    assert levels(folder(tmp_path).load("clinic").test) == [3, 51, 52, 53]
    dropped = folder(tmp_path, duplicates="drop").load("clinic")
    assert (levels(dropped.train), levels(dropped.test)) == ([0, 1, 2, 3], [51, 52, 53])


def test_a_nodes_directory_may_be_the_domains_own(tmp_path: Path) -> None:
    wards(tmp_path)
    source = Folder(domains=("ward_a", "ward_b"), classes=("benign", "malignant", "unclear"), image_size=8)
    for place in (tmp_path, tmp_path / "ward_b"):
        assert source.load("ward_b", root=str(place)).train.class_counts(3).tolist() == [4, 0, 8]
    renamed = tmp_path / "images"
    (tmp_path / "ward_b").rename(renamed)
    assert len(source.load("ward_b", root=str(renamed)).train) == 12


def test_labels_are_never_guessed_from_one_domain(tmp_path: Path) -> None:
    wards(tmp_path)
    source = Folder(domains=("ward_a", "ward_b", "ward_c"), image_size=8)
    with pytest.raises(DataError, match=r"ward_c does not exist.*data\.classes"):
        source.load("ward_b", root=str(tmp_path))


def test_a_folder_that_is_no_class_is_named_with_the_nearest(tmp_path: Path) -> None:
    wards(tmp_path)
    with pytest.raises(DataError, match=r"ward_b/unclear is not one of data\.classes"):
        folder(tmp_path, classes=("benign", "malignant")).load("ward_b")
    write_classes(tmp_path / "ward_c", {"benigne": 5})
    with pytest.raises(DataError, match="did you mean 'benign'"):
        folder(tmp_path, classes=("benign", "malignant", "unclear")).load("ward_c")


@pytest.mark.parametrize("name", ["", "..", "../elsewhere", "a/b", ".hidden", " a"])
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="cannot be a name"):
        folder(tmp_path, domains=(name,))


def test_a_class_of_one_image_is_trained_on(tmp_path: Path) -> None:
    write_classes(tmp_path / "ward", {"rare": 1, "usual": 10})
    domain = folder(tmp_path).load("ward")
    assert domain.train.class_counts(2).tolist() == [1, 8]
    assert domain.test.class_counts(2).tolist() == [0, 2]


@pytest.mark.parametrize("layout", ["nothing", "no test"])
def test_an_empty_domain_is_an_error(tmp_path: Path, layout: str) -> None:
    wards(tmp_path)
    target = tmp_path / "ward_c"
    target.mkdir()
    if layout == "no test":
        write_image(target / "benign" / "only.png", 1)
    wanted = "no test images" if layout == "no test" else "no images"
    with pytest.raises(DataError, match=f"'ward_c' in .* has {wanted}"):
        folder(tmp_path, domains=("ward_a", "ward_c")).load("ward_c")


@pytest.mark.parametrize("classes", [(), ("benign", "malignant", "unclear")], ids=["found", "named"])
def test_an_empty_class_folder_is_an_error_that_names_it(tmp_path: Path, classes: tuple[str, ...]) -> None:
    wards(tmp_path)
    (tmp_path / "ward_a" / "unclear").mkdir()
    (tmp_path / "ward_a" / "unclear" / "notes.txt").write_text("none yet")
    with pytest.raises(DataError, match=r"class folder .*ward_a/unclear has no images"):
        folder(tmp_path, classes=classes).load("ward_a")


@pytest.mark.parametrize("place", ["unclear/2021/a/image.png", "image.png", "train/cat/image.png"])
def test_an_image_that_lies_too_deep_or_in_no_class_is_named(tmp_path: Path, place: str) -> None:
    wards(tmp_path)
    write_image(tmp_path / "ward_b" / place, 3)
    with pytest.raises(DataError, match=rf"ward_b/{place} lies (deeper than its class|in no class)"):
        folder(tmp_path).load("ward_b")


def test_what_programs_made_is_neither_a_domain_nor_a_class(tmp_path: Path) -> None:
    wards(tmp_path)
    for place in (tmp_path, tmp_path / "ward_a", tmp_path / "ward_a" / "benign"):
        for name in ("__pycache__", ".hidden", "@eaDir", "__MACOSX", "Cache", "tagged"):
            write_image(place / name / "image.png", 9)
        (place / "tagged" / "CACHEDIR.TAG").touch()
    source = folder(tmp_path)
    assert source.domains == ("ward_a", "ward_b")
    assert source.class_names == ("benign", "malignant", "unclear")
    assert len(source.load("ward_a").whole) == 10


def test_a_missing_domain_is_named_with_what_is_there(tmp_path: Path) -> None:
    wards(tmp_path)
    source = folder(tmp_path, domains=("ward_a", "ward_bb"), classes=("benign",))
    with pytest.raises(DataError, match=r"domain 'ward_bb' is not in .*did you mean 'ward_b'"):
        source.load("ward_bb")
    with pytest.raises(DataError, match="is not a directory"):
        source.load("ward_a", root=str(tmp_path / "nowhere"))


def test_without_any_directory_the_message_names_the_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GOLDFINCH_DATA", raising=False)
    with pytest.raises(ValueError, match=r"data\.domains=\[a,b\]"):
        Folder()
    with pytest.raises(ValueError, match="does not exist"):
        folder(tmp_path / "nowhere")
    source = Folder(domains=("ward",))
    with pytest.raises(DataError, match="node's data-dir"):
        source.load("ward")
    with pytest.raises(DataError, match=r"data\.classes=\[a,b\]"):
        _ = source.class_names
