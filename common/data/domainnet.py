"""DomainNet (Peng et al., ICCV 2019): 345 classes in six styles, of which the papers use ten."""

from typing import Annotated, ClassVar

from pydantic import Field

from common.config import Names, checked
from common.data.domain import ImageSize
from common.data.image_folders import ImageFolders, SplitRule


@checked
class DomainNet(ImageFolders):
    """``<root>[/DomainNet]/<domain>/<class>/*.jpg`` with the published ``<domain>_train.txt`` and ``_test.txt``.

    Attributes:
        classes: folder names of the classes in use, in label order; by default the ten of FedPCL and FedPLCC. The
            numbers in the list files are not used: they count all 345 classes.
    """

    name: ClassVar[str] = "domainnet"
    known_domains: ClassVar[tuple[str, ...]] = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
    folders: ClassVar[tuple[str, ...]] = ("DomainNet", "domainnet", "domain_net")
    wanted: ClassVar[str] = (
        "Put DomainNet there as [DomainNet/]<domain>/<class>/*.jpg with <domain>_train.txt and <domain>_test.txt "
        "next to the domains (or in splits/)."
    )
    list_files: ClassVar[tuple[tuple[str, str], ...]] = (("{domain}_train.txt", "{domain}_test.txt"),)
    list_folders: ClassVar[tuple[str, ...]] = ("splits",)

    domains: Names = known_domains
    image_size: ImageSize = 64
    split: SplitRule = "lists"
    classes: Annotated[Names, Field(min_length=2)] = (
        "bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra",
    )  # fmt: skip

    @property
    def class_names(self) -> tuple[str, ...]:
        """``classes``."""
        return self.classes
