import itertools
import math

import pytest
import torch
from omegaconf import OmegaConf

from common.choices import CONF
from common.config import build, checked
from common.data import views as views_module
from common.data.views import Augmented, NoViews, RandConv, Views, convolve, draw_kernel, standardise
from common.errors import ConfigError
from common.numerics import generator

CHOICES = sorted(path.stem for path in (CONF / "views").glob("*.yaml"))
EXTRA = [RandConv(2), RandConv(2, mix=False), RandConv(2, repeats=3)]


def choice(name: str, **changes: object) -> Views:
    node = OmegaConf.to_container(OmegaConf.load(CONF / "views" / f"{name}.yaml"))
    assert isinstance(node, dict)
    views = build({**node, **changes}, "views")
    assert isinstance(views, Views)
    return views


def batch(count: int = 4, size: int = 12, channels: int = 3) -> torch.Tensor:
    return torch.randn(count, channels, size, size, generator=generator(0, "test-images"))


def convolve_by_loops(images: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
    size = kernel.shape[-1]
    padded = torch.nn.functional.pad(images.double(), [size // 2] * 4)
    result = torch.zeros(images.shape, dtype=torch.float64)
    for n, out, row, column in itertools.product(*map(range, images.shape)):
        patch = padded[n, :, row : row + size, column : column + size]
        result[n, out, row, column] = (patch * kernel[out]).sum()
    return result.float()


def test_files_name_the_published_settings():
    assert choice("none") == NoViews()
    assert choice("augmented") == Augmented(1)
    assert choice("randconv") == RandConv(1, mix=True, identity_probability=0.0, repeats=1)
    assert choice("randconv_image") == RandConv(1, mix=False, identity_probability=0.5, repeats=1)


@pytest.mark.parametrize("name", [name for name in CHOICES if name != "none"])
@pytest.mark.parametrize("count", [1, 3])
def test_originals_come_first_and_views_follow_batch_by_batch(name, count):
    views = choice(name, count=count)
    images = batch()
    extended = views(images, generator(3, "views"))
    assert extended.shape == ((1 + count) * 4, 3, 12, 12)
    assert extended.dtype == torch.float32
    assert torch.equal(extended[:4], images)
    assert bool(torch.isfinite(extended).all())
    assert views.repeat(torch.tensor([5, 6, 7, 8])).tolist() == [5, 6, 7, 8] * (1 + count)


@pytest.mark.parametrize("views", [NoViews(), RandConv(0)])
def test_no_views_leave_images_labels_and_generator_alone(views):
    images, labels, draws = batch(), torch.tensor([1, 2, 3, 4]), generator(0, "views")
    before = draws.get_state()
    assert views(images, draws) is images
    assert views.repeat(labels) is labels
    assert torch.equal(draws.get_state(), before)


@pytest.mark.parametrize("views", EXTRA)
def test_views_are_a_function_of_the_generator_alone(views):
    images = batch()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = views(images, generator(1, "views", 0))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert torch.equal(first, views(images, generator(1, "views", 0)))
    other = views(images, generator(1, "views", 1))
    assert not torch.equal(first[4:], other[4:])
    assert not torch.equal(first[4:8], first[8:])  # each view draws anew


def test_one_draw_serves_the_whole_batch():
    views, images = RandConv(mix=False), batch()
    together = views(images, generator(1, "views"))[4:]
    alone = torch.cat([views(row[None], generator(1, "views"))[1:] for row in images])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("views", EXTRA)
def test_views_carry_no_gradient_and_change_no_input(views):
    images = batch().requires_grad_()
    assert not views(images, generator(0, "views")).requires_grad
    assert torch.equal(images, batch())


@pytest.mark.parametrize("views", EXTRA)
def test_channels_last_and_autocast_keep_format_and_values(views):
    expected = views(batch(), generator(0, "views"))
    result = views(batch().to(memory_format=torch.channels_last), generator(0, "views"))
    assert result.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        coarse = views(batch(), generator(0, "views"))
    assert coarse.dtype == torch.float32
    assert torch.equal(coarse, expected)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("views", EXTRA)
def test_any_channel_count_and_a_single_pixel(views, channels):
    images = batch(2, 1, channels)
    extended = views(images, generator(0, "views"))
    assert extended.shape == (6, channels, 1, 1)
    assert bool(torch.isfinite(extended).all())


@pytest.mark.parametrize("size", [1, 3, 5])
def test_convolution_against_loops(size):
    images = batch(2, 4)
    kernel = draw_kernel(images, size, generator(2, "kernel"))
    torch.testing.assert_close(convolve(images, kernel), convolve_by_loops(images, kernel), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1, 7])
def test_kernel_weights_have_variance_one_over_three_k_squared(size):
    draws = generator(4, "kernel")
    weights = torch.stack([draw_kernel(batch(), size, draws) for _ in range(2000)])
    assert weights.shape == (2000, 3, 3, size, size)
    deviation, count = 1 / math.sqrt(3 * size * size), weights.numel()
    assert float(weights.std()) == pytest.approx(deviation, rel=5 / math.sqrt(2 * count))
    assert abs(float(weights.mean())) < 5 * deviation / math.sqrt(count)
    kurtosis = float((weights / deviation).pow(4).mean())
    assert kurtosis == pytest.approx(3.0, abs=0.25)  # a normal distribution's, a uniform one's is 1.8


def test_kernel_sizes_are_all_drawn_about_equally_often():
    # a 1-pixel impulse shows the size of the kernel that was used
    impulse = torch.zeros(1, 1, 9, 9)
    impulse[..., 4, 4] = 1.0
    draws, counts = generator(6, "views"), {1: 0, 3: 0, 5: 0, 7: 0}
    views = RandConv(1, mix=False)
    for _ in range(400):
        rows = (views(impulse, draws)[1, 0] != 0).any(dim=1)
        counts[int(rows.sum())] += 1
    assert min(counts.values()) > 65
    assert max(counts.values()) < 135


def test_mixed_view_lies_between_image_and_convolution():
    images, shares = batch(), []
    for seed in range(200):
        plain = RandConv(1, mix=False)(images, generator(seed, "views"))[4:]
        mixed = RandConv(1, mix=True)(images, generator(seed, "views"))[4:]
        difference = plain - images
        share = float(((mixed - images) * difference).sum() / difference.square().sum())
        torch.testing.assert_close(mixed, images + share * difference, rtol=1e-4, atol=1e-4)
        assert -1e-5 <= share <= 1 + 1e-5
        shares.append(share)
    values = torch.tensor(shares)
    assert float(values.mean()) == pytest.approx(0.5, abs=0.08)  # U(0, 1)
    assert float(values.std()) == pytest.approx(12**-0.5, abs=0.04)


def test_identity_probability():
    images = batch(1, 4)
    draws = generator(7, "views")
    views = RandConv(400, mix=False, identity_probability=0.5)
    extended = views(images, draws)[1:]
    same = sum(torch.equal(view, images[0]) for view in extended)
    assert 160 < same < 240
    always = RandConv(3, identity_probability=1.0)(images, draws)
    assert torch.equal(always, images.expand(4, -1, -1, -1))


def test_repeats_apply_one_kernel_with_standardisation_between(monkeypatch):
    monkeypatch.setattr(views_module, "KERNEL_SIZES", (3,))
    images = batch(2, 6)
    result = RandConv(1, mix=False, repeats=3)(images, generator(8, "views"))[2:]
    draws = generator(8, "views")
    torch.randint(1, (), generator=draws)  # the choice among one kernel size
    kernel = draw_kernel(images, 3, draws)
    expected = convolve_by_loops(images, kernel)
    for _ in range(2):
        expected = convolve_by_loops(standardise(expected), kernel)
    torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-4)


def test_repeats_may_be_drawn_for_every_view(monkeypatch):
    monkeypatch.setattr(views_module, "KERNEL_SIZES", (3,))
    images = batch(1, 5)
    drawn = RandConv(16, mix=False, repeats=4, random_repeats=True)(images, generator(9, "views"))[1:]
    draws = generator(9, "views")
    passes = []
    for view in drawn:
        torch.randint(1, (), generator=draws)
        kernel = draw_kernel(images, 3, draws)
        torch.randint(4, (), generator=draws)
        candidate, count = convolve_by_loops(images, kernel), 1
        while count < 4 and not torch.allclose(view, candidate[0].float(), rtol=1e-2, atol=1e-3):
            candidate, count = convolve_by_loops(standardise(candidate), kernel), count + 1
        torch.testing.assert_close(view, candidate[0].float(), rtol=1e-2, atol=1e-3)
        passes.append(count)
    assert set(passes) == {1, 2, 3, 4}


def test_standardise_against_loops_and_on_flat_channels():
    images = 3 * batch(2, 5) + 7
    images[1, 2] = 4.0
    result = standardise(images)
    for row in range(2):
        for channel in range(3):
            values = images[row, channel].double()
            expected = (values - values.mean()) / (values.var(correction=0) + 1e-5).sqrt()
            torch.testing.assert_close(result[row, channel].double(), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(result[1, 2], torch.zeros(5, 5))


@pytest.mark.parametrize(
    ("name", "node", "message"),
    [
        ("RandConv", {"count": -1, "repeats": 0}, "views.count=-1: .*repeats=0: "),
        ("RandConv", {"identity_probability": 1.5}, "identity_probability=1.5: "),
        ("RandConv", {"counts": 1}, "did you mean 'count'"),
        ("NoViews", {"count": 1}, "views.count: no such key"),
    ],
)
def test_values_out_of_range_are_refused(name, node, message):
    with pytest.raises(ConfigError, match=message):
        build({"_target_": f"common.data.views.{name}", **node}, "views")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("views", EXTRA)
def test_views_agree_between_devices(views):
    expected = views(batch(), generator(0, "views"))
    result = views(batch().cuda(), generator(0, "views"))
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-2, atol=1e-2)


@checked
class Darker(Views):
    """A view of one's own, which says nothing of ``count`` and works in place."""

    def view(self, images, generator):
        return images.mul_(0.5)


def test_a_view_of_one_s_own_is_made_once_and_leaves_the_images() -> None:
    images = torch.ones(2, 3, 4, 4)
    views = Darker()
    assert views.count == 1
    assert views(images, generator(0)).unique().tolist() == [0.5, 1.0]
    assert torch.equal(images, torch.ones(2, 3, 4, 4))
