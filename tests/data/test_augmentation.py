from __future__ import annotations

import pytest
import torch

from common.data.batches import Augmentation
from common.numerics import generator

PLAIN = {"mean": (0.0,), "std": (1.0,)}
EVERYTHING = Augmentation(crop_padding=4, flip=True, rotation=30.0, erasing=0.5)


def noise(count: int = 16, height: int = 12, width: int = 12) -> torch.Tensor:
    return torch.randint(256, (count, 3, height, width), generator=generator(0, "images"), dtype=torch.uint8)


def test_test_transform_is_the_formula() -> None:
    images = noise()
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (EVERYTHING.mean, EVERYTHING.std))
    torch.testing.assert_close(EVERYTHING.test(images), (images.float() / 255 - mean) / std)


def test_normalisation_by_image_is_the_formula() -> None:
    images = noise(4)
    images[3] = 200  # of one colour
    for image, result in zip(images, Augmentation(normalisation="image").test(images), strict=True):
        values = image.double() / 255
        expected = (values - values.mean()) / values.std(correction=0).clamp(min=1e-3)
        torch.testing.assert_close(result.double(), expected, atol=1e-4, rtol=1e-5)


def test_nothing_switched_on_is_the_test_transform_and_still_draws() -> None:
    images, augmentation = noise(), Augmentation()
    draw = generator(0, "draw")
    assert torch.equal(augmentation.train(images, draw), augmentation.test(images))
    assert not torch.equal(draw.get_state(), generator(0, "draw").get_state())


def test_same_key_same_result_other_key_other_result() -> None:
    images, before = noise(), torch.random.get_rng_state()
    first = EVERYTHING.train(images, generator(0, "draw", 1))
    assert torch.equal(first, EVERYTHING.train(images, generator(0, "draw", 1)))
    assert not torch.equal(first, EVERYTHING.train(images, generator(0, "draw", 2)))
    assert torch.equal(images, noise()), "the input is untouched"
    assert torch.equal(before, torch.random.get_rng_state()), "and the global generator"


def test_a_sample_does_not_depend_on_the_others() -> None:
    images = noise()
    changed = images.clone()
    changed[1:] = 255 - changed[1:]
    first, second = (EVERYTHING.train(each, generator(0, "draw")) for each in (images, changed))
    assert torch.equal(first[0], second[0])
    shorter = EVERYTHING.train(images[:5], generator(0, "draw"))
    torch.testing.assert_close(first[:5], shorter)


def test_crop_shows_a_window_of_the_padded_image() -> None:
    images = noise(64, 6, 9)
    output = (Augmentation(crop_padding=2, **PLAIN).train(images, generator(0, "draw")) * 255).round().to(torch.uint8)
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2))
    seen = set()
    for sample, wanted in zip(padded, output, strict=True):
        places = [(y, x) for y in range(5) for x in range(5) if torch.equal(sample[:, y : y + 6, x : x + 9], wanted)]
        assert len(places) == 1
        seen.add(places[0])
    assert {y for y, _ in seen} == {x for _, x in seen} == {0, 1, 2, 3, 4}


def test_flip_mirrors_about_half_of_the_samples() -> None:
    images = noise(200)
    output = (Augmentation(flip=True, **PLAIN).train(images, generator(0, "draw")) * 255).round().to(torch.uint8)
    mirrored = [torch.equal(after, before.flip(2)) for before, after in zip(images, output, strict=True)]
    kept = [torch.equal(after, before) for before, after in zip(images, output, strict=True)]
    assert all(one or other for one, other in zip(mirrored, kept, strict=True))
    assert 70 < sum(mirrored) < 130


def test_rotation_keeps_a_disc_and_moves_a_bar() -> None:
    axis = torch.arange(33) - 16
    radius = (axis[:, None] ** 2 + axis[None, :] ** 2).sqrt()
    disc = (radius <= 10).to(torch.uint8) * 255
    bar = torch.zeros(33, 33, dtype=torch.uint8)
    bar[14:19, :] = 255
    images = torch.stack([disc, bar])[:, None].expand(2, 3, 33, 33)
    output = Augmentation(rotation=90.0, **PLAIN).train(images, generator(3, "draw"))
    torch.testing.assert_close(output[0][:, radius <= 8], torch.ones_like(output[0][:, radius <= 8]))
    assert (output[0][:, radius >= 12] == 0).all()
    assert (output[1] - bar / 255).abs().mean() > 0.05


def test_rotation_of_an_oblong_image_keeps_lengths() -> None:
    images = torch.zeros(64, 3, 40, 80, dtype=torch.uint8)
    images[:, :, 15:25, 35:45] = 255
    output = Augmentation(rotation=180.0, **PLAIN).train(images, generator(0, "draw"))
    torch.testing.assert_close(output.sum(dim=(1, 2, 3)), torch.full((64,), 300.0), rtol=0.03, atol=0)
    assert len(output.flatten(1).unique(dim=0)) > 30, "each image has an angle of its own"


def test_erasing_blanks_one_rectangle_of_the_announced_size() -> None:
    images = torch.full((300, 3, 40, 40), 255, dtype=torch.uint8)
    output = Augmentation(erasing=0.5, **PLAIN).train(images, generator(0, "draw"))
    erased = output[:, 0] == 0
    assert (erased == (output[:, 2] == 0)).all()
    touched = erased.flatten(1).any(1)
    assert 110 < int(touched.sum()) < 190
    for mask in erased[touched]:
        rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
        height, width = int(rows.max() - rows.min()) + 1, int(columns.max() - columns.min()) + 1
        assert int(mask.sum()) == height * width
        assert 0.015 * 1600 <= height * width <= 0.34 * 1600


def test_switching_one_part_on_leaves_the_others_draws_alone() -> None:
    images = noise()
    cropped = Augmentation(crop_padding=3, **PLAIN).train(images, generator(0, "draw"))
    erased_too = Augmentation(crop_padding=3, erasing=1.0, **PLAIN).train(images, generator(0, "draw"))
    kept = erased_too != 0
    assert torch.equal(cropped[kept], erased_too[kept])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_device_does_not_change_the_result() -> None:
    images = noise()
    on_cpu = EVERYTHING.train(images, generator(0, "draw"))
    on_cuda = EVERYTHING.train(images.cuda(), generator(0, "draw"))
    assert on_cuda.is_cuda
    torch.testing.assert_close(on_cpu, on_cuda.cpu(), rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"crop_padding": -1},
        {"rotation": 181.0},
        {"erasing": 1.5},
        {"mean": (0.5, 0.5)},
        {"std": (0.5, 0.0, 0.5)},
        {"mean": (float("nan"),)},
    ],
)
def test_values_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Augmentation(**wrong)  # type: ignore[arg-type]
