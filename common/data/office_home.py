"""Office-Home (Venkateswara et al., CVPR 2017): 65 classes as art, clip art, product pictures and photographs."""

from typing import ClassVar

from common.config import Names, checked
from common.data.domain import ImageSize
from common.data.image_folders import ImageFolders


@checked
class OfficeHome(ImageFolders):
    """``<root>[/OfficeHomeDataset_10072016]/{Art,Clipart,Product,Real World}/<class>/*.jpg``.

    Complete, it has 2,427, 4,365, 4,439 and 4,357 images, by the domains' order. Labels follow the sorted names of the
    class folders. ``split=index_rule`` is that of MarsFL. The released code of FedDG-GA draws 90 % of list files in the
    order of the disk, which cannot be made again exactly; ``split=per_class_fraction train_fraction=0.9`` is near it.
    """

    name: ClassVar[str] = "office_home"
    known_domains: ClassVar[tuple[str, ...]] = ("art", "clipart", "product", "real_world")
    known_classes: ClassVar[tuple[str, ...]] = (
        "Alarm_Clock", "Backpack", "Batteries", "Bed", "Bike", "Bottle", "Bucket", "Calculator", "Calendar", "Candles",
        "Chair", "Clipboards", "Computer", "Couch", "Curtains", "Desk_Lamp", "Drill", "Eraser", "Exit_Sign", "Fan",
        "File_Cabinet", "Flipflops", "Flowers", "Folder", "Fork", "Glasses", "Hammer", "Helmet", "Kettle", "Keyboard",
        "Knives", "Lamp_Shade", "Laptop", "Marker", "Monitor", "Mop", "Mouse", "Mug", "Notebook", "Oven", "Pan",
        "Paper_Clip", "Pen", "Pencil", "Postit_Notes", "Printer", "Push_Pin", "Radio", "Refrigerator", "Ruler",
        "Scissors", "Screwdriver", "Shelf", "Sink", "Sneakers", "Soda", "Speaker", "Spoon", "TV", "Table", "Telephone",
        "ToothBrush", "Toys", "Trash_Can", "Webcam",
    )  # fmt: skip
    folders: ClassVar[tuple[str, ...]] = (
        "OfficeHomeDataset_10072016",
        "office_home",
        "OfficeHome",
        "OfficeHomeDataset",
    )
    wanted: ClassVar[str] = (
        "Put Office-Home there as [OfficeHomeDataset_10072016/]{Art,Clipart,Product,Real World}/<class>/*.jpg."
    )

    domains: Names = known_domains
    image_size: ImageSize = 64
