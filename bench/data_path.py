"""Cost of an augmented training image: batched transforms against torchvision's on PIL images in a DataLoader.

    python bench/data_path.py             # 32x32 and 64x64; about a minute
    python bench/data_path.py --dry-run   # a few images, writes nothing

Both paths shuffle the same uint8 images and give normalised float32 batches of 64, with the same changes (random crop
with padding, flip, rotation). The opponent is what the papers' code does: one PIL image at a time, ``transforms`` of
torchvision, a DataLoader without worker processes, since both sides have the one core. Appends rows to
bench/results/system.csv.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, before an installed copy

from bench.measuring import arguments, start
from bench.ratios import Ratio, append, compare, in_turn
from common.data.batches import Augmentation, split_batches
from common.numerics import generator

BATCH = 64
CASES = {
    "normalise": Augmentation(),
    "crop": Augmentation(crop_padding=4),
    "crop+flip": Augmentation(crop_padding=4, flip=True),
    "crop+flip+rotation": Augmentation(crop_padding=4, flip=True, rotation=15.0),
}


class PILImages(Dataset[tuple[Tensor, int]]):
    """Images as the papers' data sets hold them: one array each, changed one by one."""

    def __init__(self, images: Tensor, labels: Tensor, augmentation: Augmentation) -> None:
        self.arrays = [image.permute(1, 2, 0).contiguous().numpy() for image in images]
        self.labels = labels.tolist()
        size = images.shape[2]
        steps: list[Callable[..., object]] = []
        if augmentation.crop_padding:
            steps.append(transforms.RandomCrop(size, padding=augmentation.crop_padding))
        if augmentation.flip:
            steps.append(transforms.RandomHorizontalFlip())
        if augmentation.rotation:
            steps.append(
                transforms.RandomRotation(augmentation.rotation, interpolation=transforms.InterpolationMode.BILINEAR)
            )
        steps += [transforms.ToTensor(), transforms.Normalize(augmentation.mean, augmentation.std)]
        self.transform = transforms.Compose(steps)

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.arrays[index])), self.labels[index]


def main() -> None:
    """Measure what the command line asks for."""
    parser = arguments(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.dry_run:
        options.sizes, options.images, options.repeats = [32], 128, 2
    for size in options.sizes:
        for case in options.cases:
            rows = data_path(size, case, options.images, options.repeats)
            if not options.dry_run:
                append(rows)


def data_path(size: int, case: str, count: int, repeats: int) -> list[Ratio]:
    """Microseconds per image of both paths."""
    images = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator(0, "images"))
    labels = torch.randint(0, 10, (count,), generator=generator(0, "labels"))
    augmentation = CASES[case]
    loader = DataLoader(PILImages(images, labels, augmentation), batch_size=BATCH, shuffle=True)
    draws = generator(0, "batches")

    def goldfinch() -> None:
        for indices in split_batches(torch.randperm(count, generator=draws), BATCH, "keep"):
            augmentation.train(images.index_select(0, indices), draws)
            _ = labels[indices]

    def pil() -> None:
        for _ in loader:
            pass

    seconds = in_turn({"pil": pil, "goldfinch": goldfinch}, repeats)
    each = {name: [1e6 * value / count for value in values] for name, values in seconds.items()}
    return compare("data path", f"{case} {size}x{size} B={BATCH}", "us", each, "pil", {"goldfinch": 5.0})


if __name__ == "__main__":
    start(main)
