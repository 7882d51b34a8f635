"""VLCS (Fang, Xu and Rockmore, ICCV 2013): five classes in four photo collections."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from common.config import Names, checked
from common.data.domain import ImageSize
from common.data.image_folders import ImageFolders


@checked
class VLCS(ImageFolders):
    """``<root>[/VLCS]/{Caltech101,LabelMe,SUN09,VOC2007}/<class>/*.jpg``, as DomainBed arranges it.

    Complete, it has 1,415, 2,656, 3,282 and 3,376 images. The names CALTECH, LABELME, SUN and PASCAL of other releases
    are read, too. ``split=lists`` reads ``splits/<domain>_train.txt`` and ``<domain>_test.txt``. The classes are very
    uneven: report ``--metric balanced_accuracy`` as well.
    """

    name: ClassVar[str] = "vlcs"
    known_domains: ClassVar[tuple[str, ...]] = ("caltech101", "labelme", "sun09", "voc2007")
    domain_aliases: ClassVar[Mapping[str, Sequence[str]]] = {
        "caltech101": ("caltech",),
        "sun09": ("sun",),
        "voc2007": ("pascal", "voc"),
    }
    known_classes: ClassVar[tuple[str, ...]] = ("bird", "car", "chair", "dog", "person")
    folders: ClassVar[tuple[str, ...]] = ("VLCS", "vlcs", "VLCS/images")
    wanted: ClassVar[str] = "Put VLCS there as [VLCS/]{Caltech101,LabelMe,SUN09,VOC2007}/<class>/*.jpg."
    list_files: ClassVar[tuple[tuple[str, str], ...]] = (("{domain}_train.txt", "{domain}_test.txt"),)
    list_folders: ClassVar[tuple[str, ...]] = ("splits",)

    domains: Names = known_domains
    image_size: ImageSize = 64
