"""Speed of the prototype losses as methods call them and of their opponents, of FINCH, and of what could be fused.

    python bench/kernels.py                      # CPU goals (CUDA when there is a device: --device cuda)
    python bench/kernels.py --grid full --seconds 0.3   # every shape of the GPU checklist: minutes on a GPU, not a CPU
    python bench/kernels.py --dry-run            # each subject once at its smallest shape; writes nothing

Appends rows to bench/results/kernels.csv and prints them. Runs from a checkout with PyTorch (and Triton for the fused
tier); says which optional packages are missing and goes on.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, before an installed copy

from bench.measuring import Row, Step, append, arguments, measure, start
from common.losses import PrototypeTerms, prototype_losses
from common.numerics import generator
from common.prototypes import Clustering, PrototypeSet, partition, unbiased_prototypes

CLASSES = 10
ROTATION = 4
HAS_TRITON = importlib.util.find_spec("triton") is not None
METHODS = {
    "fpl": PrototypeTerms(contrast=1, mse=1, temperature=0.02),
    "fedplcc": PrototypeTerms(contrast=1, alignment=1, temperature=0.07, alpha=0.5, fraction=0.5, weighted=True),
}


def main() -> None:
    """Measure what the command line asks for."""
    parser = arguments(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--grid", choices=["goal", "full"], default="goal")
    parser.add_argument("--shapes", nargs="+", help="BxMxD of the losses, e.g. 64x200x512, instead of a grid")
    parser.add_argument("--subjects", nargs="+", default=["losses", "finch", "edits", "sums", "aggregate"])
    parser.add_argument("--without", nargs="*", default=[], help="variants to leave out, e.g. per_sample")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="per variant and shape, about")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "kernels.csv")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    if not HAS_TRITON:
        print("Triton is missing: no fused tier")
    if options.dry_run:
        options.repeats, options.seconds = 1, 0.05
    rows: list[Row] = []
    for subject in options.subjects:
        for found in SUBJECTS[subject](options, device):
            rows += found
            if not options.dry_run:
                append(found, options.output)
    print(f"\n{len(rows)} rows" + ("" if options.dry_run else f" appended to {options.output}"))
    summarise(rows)


def losses(options: argparse.Namespace, device: torch.device) -> Iterator[list[Row]]:
    """Forward and backward of the prototype losses."""
    shapes = [(64, rows, 512) for rows in (10, 50, 100, 200)]
    if options.grid == "full":
        shapes = [
            (samples, rows, size)
            for size in (128, 512, 2048)
            for samples in (32, 64, 512, 4096)
            for rows in (10, 200, 512, 2048, 8192)
        ]
    if options.shapes:
        shapes = [(int(b), int(m), int(d)) for b, m, d in (shape.split("x") for shape in options.shapes)]
    dtypes = ["float32", "bfloat16"] if device.type == "cuda" else ["float32"]
    for samples, rows, size in shapes[:1] if options.dry_run else shapes:
        for dtype in dtypes:
            for method in METHODS:
                variants = loss_variants(method, samples, rows, size, dtype, device, options)
                yield measure(
                    f"losses {method}", f"B={samples} M={rows} D={size}", dtype, variants,
                    against="single losses", device=device, repeats=options.repeats, seconds=options.seconds,
                )  # fmt: skip


def loss_variants(
    method: str, samples: int, rows: int, size: int, dtype: str, device: torch.device, options: argparse.Namespace
) -> dict[str, Step]:
    """The call that the method makes, and its opponents, as steps on rotating inputs."""
    draw = generator(0, "bench", method, samples, rows, size)
    prototypes = PrototypeSet(
        torch.rand(rows, size, generator=draw), torch.arange(rows) % CLASSES, torch.rand(rows, generator=draw) + 0.1
    ).to(device)
    class_rows = unbiased_prototypes(prototypes)
    features = [
        torch.rand(samples, size, generator=draw).to(device, getattr(torch, dtype)).requires_grad_()
        for _ in range(ROTATION)
    ]
    labels = [torch.randint(0, min(CLASSES, rows), (samples,), generator=draw).to(device) for _ in range(ROTATION)]
    terms = METHODS[method]

    singles: list[PrototypeTerms] = []
    for name in ("contrast", "alignment", "mse"):
        if getattr(terms, name):
            others: dict[str, Any] = {"contrast": 0.0, "alignment": 0.0, "mse": 0.0}
            del others[name]
            singles.append(replace(terms, **others))

    def fused(z: Tensor, y: Tensor, backend: Literal["auto", "closed_form"] = "auto") -> Tensor:
        return prototype_losses(z, y, prototypes, terms, class_rows=class_rows, backend=backend).total

    def apart(z: Tensor, y: Tensor) -> Tensor:
        first, second = (prototype_losses(z, y, prototypes, one, class_rows=class_rows).total for one in singles)
        return first + second

    def step_of(function: object) -> Step:
        def step(index: int) -> Tensor:
            z, y = features[index % ROTATION], labels[index % ROTATION]
            return torch.autograd.grad(function(z, y), z)[0]  # type: ignore[operator]  # a callable of two tensors

        return step

    variants: dict[str, Step] = {"single losses": step_of(apart), "fused": step_of(fused)}
    if device.type == "cuda":
        variants["closed_form"] = step_of(lambda z, y: fused(z, y, "closed_form"))
    if "per_sample" not in options.without and method == "fpl" and samples <= 64 and rows <= 512:
        table = {label: list(prototypes.of_class(label).cpu()) for label in prototypes.classes}
        means = dict(zip(class_rows.classes, class_rows.vectors.cpu(), strict=True))
        variants["per_sample"] = step_of(lambda z, y: per_sample_losses(z, y, table, means, terms))
    return {name: step for name, step in variants.items() if name not in options.without}


def per_sample_losses(
    features: Tensor, labels: Tensor, table: dict[int, list[Tensor]], means: dict[int, Tensor], terms: PrototypeTerms
) -> Tensor:
    """FPL's two losses as released research code tends to have them: Python loops over the samples.

    The table is a dictionary of lists on the host. For each sample the class's rows and all others are picked by
    comparing keys, joined and moved to the device, the positives are marked by a list of ones and zeros, exponentials
    are summed raw (at temperature 0.02 just below float32's overflow), and the squared distance is a second loop.
    """
    contrasts, distances = [], []
    for index, label in enumerate(labels):
        z = features[index].unsqueeze(0)
        keys = [key for key, rows in table.items() for _ in rows]
        every = [row for rows in table.values() for row in rows]
        own = torch.stack([row for key, row in zip(keys, every, strict=True) if key == label.item()]).to(features)
        rest = [row for key, row in zip(keys, every, strict=True) if key != label.item()]
        joined = torch.cat([own, torch.stack(rest).to(features)]) if rest else own
        logits = torch.exp(torch.cosine_similarity(z, joined, dim=1) / terms.temperature).view(1, -1)
        marks = torch.tensor([1] * len(own) + [0] * len(rest)).to(features.device).view(1, -1)
        contrasts.append(-torch.log((logits * marks).sum(1) / logits.sum(1)))
    for index, label in enumerate(labels):
        distances.append(torch.nn.functional.mse_loss(features[index], means[label.item()].to(features)))
    return torch.cat(contrasts).mean() + torch.stack(distances).mean()


def clustering_step(rows: Tensor, clustering: Clustering) -> Step:
    """Return a step that clusters ``rows``."""

    def step(_: int) -> object:
        return partition(rows, clustering=clustering)

    return step


def finch(options: argparse.Namespace, device: torch.device) -> Iterator[list[Row]]:
    """Clustering of one class's features at a client: ours against the authors' package."""
    for count in (20,) if options.dry_run else (10, 30, 100, 300, 1000, 3000):
        rows = torch.randn(count, 512, generator=generator(0, "finch", count)).relu().to(device)
        variants: dict[str, Step] = {"torch": clustering_step(rows, "torch")}
        try:
            partition(rows, clustering="finch-clust")
            variants["finch-clust"] = clustering_step(rows, "finch-clust")
        except ImportError:
            print("finch-clust is missing: only our FINCH is timed")
        against = "finch-clust" if "finch-clust" in variants else "torch"
        yield measure(
            "finch", f"N={count} D=512", "float32", variants, against=against, device=device,
            repeats=options.repeats, seconds=options.seconds, details=False,
        )  # fmt: skip


def parameter_shapes() -> list[tuple[int, ...]]:
    """Tensors of a ResNet-10 with 512 features: 4.9 million parameters."""
    shapes: list[tuple[int, ...]] = [(64, 3, 3, 3), (64,), (64,)]
    width = 64
    for out in (64, 128, 256, 512):
        shapes += [(out, width, 3, 3), (out,), (out,), (out, out, 3, 3), (out,), (out,)]
        if out != width:
            shapes += [(out, width, 1, 1), (out,), (out,)]
        width = out
    return [*shapes, (10, 512), (10,)]


def edits(options: argparse.Namespace, device: torch.device) -> Iterator[list[Row]]:
    """FedDyn's gradient edit, g += alpha (w - w_ref) - h: a loop over tensors, multi-tensor, one flat buffer."""
    shapes = parameter_shapes()
    weights, references, states, gradients = (
        [torch.randn(shape, generator=generator(0, name, index)).to(device) for index, shape in enumerate(shapes)]
        for name in ("w", "ref", "h", "g")
    )
    flat = [torch.cat([tensor.flatten() for tensor in group]) for group in (weights, references, states, gradients)]

    def loop(_: int) -> None:
        for w, ref, h, g in zip(weights, references, states, gradients, strict=True):
            g.add_(w - ref, alpha=0.01).sub_(h)

    def multi_tensor(_: int) -> None:
        torch._foreach_add_(gradients, torch._foreach_sub(weights, references), alpha=0.01)
        torch._foreach_sub_(gradients, states)

    def one_buffer(_: int) -> None:
        flat[3].add_(flat[0] - flat[1], alpha=0.01).sub_(flat[2])

    variants: dict[str, Step] = {"loop": loop, "multi_tensor": multi_tensor, "one_buffer": one_buffer}
    yield measure(
        "gradient edit", f"{len(shapes)} tensors, {flat[0].numel()} floats", "float32", variants, against="loop",
        device=device, repeats=options.repeats, seconds=options.seconds,
    )  # fmt: skip


def sums(options: argparse.Namespace, device: torch.device) -> Iterator[list[Row]]:
    """Per-class feature sums of a batch: index_add, a one-hot product, and a loop over classes."""
    for samples, size in ((64, 512), (1024, 2048)):
        features = torch.rand(samples, size, generator=generator(0, "sums")).to(device)
        labels = torch.randint(0, CLASSES, (samples,), generator=generator(1, "sums")).to(device)
        table = torch.zeros(CLASSES, size, dtype=torch.float64, device=device)

        def index_add(_: int, features: Tensor = features, labels: Tensor = labels, table: Tensor = table) -> None:
            table.index_add_(0, labels, features.double())

        def one_hot(_: int, features: Tensor = features, labels: Tensor = labels, table: Tensor = table) -> None:
            table.addmm_(torch.nn.functional.one_hot(labels, CLASSES).T.double(), features.double())

        def class_loop(_: int, features: Tensor = features, labels: Tensor = labels, table: Tensor = table) -> None:
            for label in range(CLASSES):
                table[label] += features[labels == label].double().sum(0)

        variants: dict[str, Step] = {"index_add": index_add, "one_hot": one_hot, "class_loop": class_loop}
        yield measure(
            "class sums", f"B={samples} D={size} K={CLASSES}", "float32", variants, against="index_add",
            device=device, repeats=options.repeats, seconds=options.seconds,
        )  # fmt: skip


def aggregate(options: argparse.Namespace, device: torch.device) -> Iterator[list[Row]]:
    """One client's weights into the float64 accumulator of the average: tensor by tensor, multi-tensor, one axpy."""
    shapes = parameter_shapes()
    client = [torch.randn(shape, generator=generator(0, "client", i)).to(device) for i, shape in enumerate(shapes)]
    sums64 = [torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes]
    flat, flat64 = torch.cat([x.flatten() for x in client]), torch.cat([x.flatten() for x in sums64])

    def loop(_: int) -> None:
        for total, tensor in zip(sums64, client, strict=True):
            total.add_(tensor, alpha=0.1)

    def multi_tensor(_: int) -> None:
        torch._foreach_add_(sums64, client, alpha=0.1)

    def one_axpy(_: int) -> None:
        flat64.add_(flat, alpha=0.1)

    variants: dict[str, Step] = {"loop": loop, "multi_tensor": multi_tensor, "one_axpy": one_axpy}
    yield measure(
        "aggregation", f"{len(shapes)} tensors, {flat.numel()} floats", "float32", variants, against="loop",
        device=device, repeats=options.repeats, seconds=options.seconds,
    )  # fmt: skip


SUBJECTS = {"losses": losses, "finch": finch, "edits": edits, "sums": sums, "aggregate": aggregate}


def summarise(rows: list[Row]) -> None:
    """The goals, met or missed, from what was just measured."""
    for row in rows:
        if not row.subject.startswith("losses") or not row.shape.startswith("B=64") or not row.shape.endswith("D=512"):
            continue
        peers = {
            peer.variant: peer
            for peer in rows
            if (peer.subject, peer.shape, peer.dtype) == (row.subject, row.shape, row.dtype)
        }
        if row.variant == "fused":
            verdict(row, "two single losses", row.ratio, 1.2)
            for opponent, goal in (
                ("closed_form", 2.0),
                ("per_sample", 200 if row.device.startswith("NVIDIA") else 100),
            ):
                if opponent in peers:
                    verdict(row, opponent, row.ratio / peers[opponent].ratio, goal)


def verdict(row: Row, opponent: str, ratio: float, goal: float) -> None:
    """One line: how many times faster, and whether that is the goal."""
    result = "met" if ratio >= goal else "MISSED"
    where = f"{row.subject:18} {row.shape:20} {row.dtype:9} {row.variant}"
    print(f"{where} is {ratio:8.2f}x {opponent}: goal {goal} {result}")


if __name__ == "__main__":
    start(main)
