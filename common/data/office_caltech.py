"""Office-Caltech-10 (Gong et al., CVPR 2012): ten object classes seen by four sources."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from common.config import Names, checked
from common.data.image_folders import ImageFolders


@checked
class OfficeCaltech(ImageFolders):
    """``<root>[/office_caltech_10]/<domain>/<class>/<image>.jpg``; complete: 1123, 958, 295 and 157 images.

    ``split=index_rule`` gives FPL's 899/768/237/127 train images for caltech/amazon/webcam/dslr;
    ``split=per_class_fraction`` is FedPall's.
    """

    name: ClassVar[str] = "office_caltech"
    known_domains: ClassVar[tuple[str, ...]] = ("caltech", "amazon", "webcam", "dslr")
    known_classes: ClassVar[tuple[str, ...]] = (
        "backpack", "bike", "calculator", "headphones", "keyboard", "laptop", "monitor", "mouse", "mug", "projector",
    )  # fmt: skip
    wanted: ClassVar[str] = (
        "Put Office-Caltech-10 there as [office_caltech_10/]{amazon,caltech,dslr,webcam}/<class>/*.jpg."
    )
    folders: ClassVar[tuple[str, ...]] = ("office_caltech_10", "office_caltech", "Office-Caltech-10", "office")
    domain_aliases: ClassVar[Mapping[str, Sequence[str]]] = {"caltech": ("caltech10",)}
    class_aliases: ClassVar[Mapping[str, Sequence[str]]] = {
        "bike": ("touring_bike",),
        "headphones": ("head_phones",),
        "keyboard": ("computer_keyboard",),
        "laptop": ("laptop_computer", "laptop_101"),
        "monitor": ("computer_monitor",),
        "mouse": ("computer_mouse",),
        "mug": ("coffee_mug",),
        "projector": ("video_projector",),
    }

    domains: Names = known_domains
