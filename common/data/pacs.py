"""PACS (Li et al., ICCV 2017): seven classes as art painting, cartoon, photo and sketch."""

from typing import ClassVar, Literal

from common.config import Names, checked
from common.data.domain import ImageSize
from common.data.image_folders import ImageFolders, SplitRule


@checked
class PACS(ImageFolders):
    """``<root>[/PACS]/<domain>/<class>/<image>``; complete: 2048, 2344, 1670 and 3929 images.

    ``split=lists`` reads train_list.txt/test_list.txt, or the published ``<domain>_train_kfold.txt`` and
    ``<domain>_crossval_kfold.txt`` next to the domains or in ``pacs_label/``; ``split=per_class_fraction``
    rounds down, as FedPall does here and not for Office.
    """

    name: ClassVar[str] = "pacs"
    known_domains: ClassVar[tuple[str, ...]] = ("art_painting", "cartoon", "photo", "sketch")
    known_classes: ClassVar[tuple[str, ...]] = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
    folders: ClassVar[tuple[str, ...]] = ("PACS", "pacs", "pacs_data", "kfold", "PACS/kfold")
    wanted: ClassVar[str] = (
        "Put PACS there as [PACS/]{art_painting,cartoon,photo,sketch}/<class>/*.{jpg,png} with its list files."
    )
    rounding: ClassVar[Literal["round", "floor"]] = "floor"
    list_files: ClassVar[tuple[tuple[str, str], ...]] = (
        ("train_list.txt", "test_list.txt"),
        ("{domain}_train_kfold.txt", "{domain}_crossval_kfold.txt"),
    )
    list_folders: ClassVar[tuple[str, ...]] = ("pacs_label", "PACS_label", "splits")

    domains: Names = known_domains
    image_size: ImageSize = 64
    split: SplitRule = "lists"
