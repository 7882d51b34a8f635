from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.runs import run
from support.toy import Toy, toy_settings
from torch import nn

from server.results.groups import group_runs
from server.results.heat import coarseness
from server.results.report.activation_maps import (
    EACH,
    LARGEST_SIDE,
    UnseenError,
    _data_url,
    activation_maps,
    find_examples,
    trained_model,
)
from server.results.run import Run


@pytest.fixture(scope="module")
def record(finished_runs: Path) -> Run:
    return Run(finished_runs / "fpl-0")


def test_the_net_is_the_one_that_was_scored(record: Run) -> None:
    model, data = trained_model(record), Toy()
    for domain in record.domains:
        test = data.load(domain).test
        with torch.no_grad():
            guesses = model(data.augmentation.test(test.images))[1].argmax(1)
        accuracy = 100 * float((guesses == test.labels).double().mean())
        assert accuracy == pytest.approx(record.round_scores[-1].accuracy[domain])


def test_examples_are_wrong_ones_first_and_show_the_evidence(record: Run) -> None:
    model, data = trained_model(record), Toy()
    test = data.load("noisy").test
    examples = find_examples(model, test.images, test.labels, data.augmentation.test)
    wrong = [example for example in examples if example.label != example.prediction]
    assert examples[: len(wrong)] == wrong
    assert 0 < len(examples) <= 2 * EACH
    assert len(wrong) <= EACH
    right = examples[len(wrong) :]
    assert len({example.label for example in right}) == len(right)  # of different classes, since there are enough
    for example in examples:
        position = next(
            i for i, image in enumerate(test.images) if np.array_equal(image.permute(1, 2, 0), example.image)
        )
        with torch.no_grad():
            maps = model.feature_maps(data.augmentation.test(test.images[position : position + 1]))[0]
        weights = model.head.weight[example.prediction].detach()
        cam = sum(weight * part for weight, part in zip(weights, maps, strict=True))
        large = nn.functional.interpolate(cam[None, None], example.heat.shape, mode="bilinear")[0, 0].clamp_min(0)
        assert example.heat == pytest.approx((large / large.max().clamp_min(1e-12)).double().numpy(), abs=1e-5)


def test_large_images_are_made_small_for_the_page() -> None:
    import base64
    import io

    from PIL import Image

    url = _data_url(np.zeros((300, 200, 3), np.uint8))
    head, _, content = url.partition(",")
    assert head == "data:image/png;base64"
    with Image.open(io.BytesIO(base64.b64decode(content))) as image:
        assert max(image.size) == LARGEST_SIDE


def test_methods_without_one_shared_net_are_an_error(tmp_path: Path) -> None:
    settings = toy_settings("fedproto", tmp_path / "run", train={"rounds": 1}, hyper={"predict_with": "prototypes"})
    run(settings)
    with pytest.raises(UnseenError, match="all clients share"):
        trained_model(Run(tmp_path / "run"))
    (gallery,) = activation_maps(group_runs([Run(tmp_path / "run")]))
    assert gallery["note"].startswith("No images: this method")
    assert gallery["domains"] == {}


def test_maps_of_few_cells_are_called_coarse(record: Run) -> None:
    assert "2 x 2 cells" in coarseness((2, 2))
    assert coarseness((4, 4)) is None
    (gallery,) = activation_maps(group_runs([record]))
    model, data = trained_model(record), Toy()
    cells = model.feature_maps(data.augmentation.test(data.load("dark").test.images[:1])).shape[2:]
    assert gallery["note"] == coarseness(tuple(cells))
