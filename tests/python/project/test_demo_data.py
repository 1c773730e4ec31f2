# SPDX-License-Identifier: Apache-2.0
"""The demo's pictures, network and measure (examples/segmentation); nothing is trained here."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from support import PROJECT

pytest.importorskip("sklearn")
pytest.importorskip("tqdm")
Image = pytest.importorskip("PIL.Image")

DEMO = PROJECT / "examples" / "segmentation"


@pytest.fixture(scope="module")
def demo():
    """The demo's modules, which are found beside its main.py and not in a package."""
    names = ("data", "folder", "network")
    sys.path.insert(0, str(DEMO))
    try:
        modules = {name: __import__(name) for name in names}
    finally:
        sys.path.remove(str(DEMO))
    yield type("Demo", (), modules)
    for name in names:  # their names are common ones: leave none behind for other tests
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def digits(demo):
    return demo.data.DigitsOnPhotos(num_test=12)


def same(left, right) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_pictures_are_determined_by_seed_and_step(demo, digits):
    batch = digits.train_pictures(0, 7, 0, 3)
    assert same(batch, digits.train_pictures(0, 7, 0, 3))
    assert same(batch, demo.data.DigitsOnPhotos(num_test=1).train_pictures(0, 7, 0, 3))
    assert not same(batch, digits.train_pictures(1, 7, 0, 3))
    assert not same(batch, digits.train_pictures(0, 8, 0, 3))


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_ranks_share_one_global_batch(digits, ranks):
    whole = digits.train_pictures(3, 5, 0, 6)
    share = 6 // ranks
    slices = [digits.train_pictures(3, 5, rank * share, share) for rank in range(ranks)]
    assert same(whole, [torch.cat(part) for part in zip(*slices)])


def test_training_never_reads_test_digits_or_columns(demo):
    poisoned = demo.data.DigitsOnPhotos(num_test=1)
    clean = poisoned.train_pictures(0, 0, 0, 30)
    poisoned.digits[demo.data.TEST_DIGITS] = float("nan")
    for photo in poisoned.photos:
        photo[:, :, demo.data.TRAIN_COLUMNS.stop :] = 255
    assert same(clean, poisoned.train_pictures(0, 0, 0, 30))


def test_ranks_losses_average_to_the_whole_batchs(demo):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(4, 3, 8, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (4, 8, 8), generator=generator)
    labels[0, :5] = 255  # unequal weight in the shares, which must not matter
    weights = demo.data.background_light(3).double()
    whole = demo.network.pixel_loss(scores, labels, weights)
    shares = [
        demo.network.pixel_loss(scores[i : i + 1], labels[i : i + 1], weights) for i in range(4)
    ]
    torch.testing.assert_close(torch.stack(shares).mean(), whole, rtol=1e-14, atol=0)


@pytest.fixture
def voc(tmp_path):
    """Ten pictures of 60x40 in Pascal VOC layout; mask values 0, 7, 15 and 255."""
    for folder in ("JPEGImages", "SegmentationClass"):
        (tmp_path / folder).mkdir()
    generator = np.random.default_rng(0)
    palette = generator.integers(0, 256, 768).tolist()
    for index in range(10):
        pixels = generator.integers(0, 256, (40, 60, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "JPEGImages" / f"p{index}.jpg")
        values = np.zeros((40, 60), np.uint8)
        values[5:20, 20:40] = 7 if index % 2 else 15
        values[30:, 25:35] = 255
        mask = Image.fromarray(values)
        mask.putpalette(palette)
        assert mask.mode == "P"
        mask.save(tmp_path / "SegmentationClass" / f"p{index}.png")
    (tmp_path / "JPEGImages" / "no_mask.jpg").write_bytes(b"never opened")
    return tmp_path


def test_folder_in_voc_layout(demo, voc):
    source = demo.folder.VocFolder(voc, num_test=5, size=32)
    assert source.class_names == ["background", "7", "15"] and source.num_classes == 3
    assert source.class_weights.tolist() == [0.25, 1.0, 1.0]
    assert source.test_names == ["p0", "p5"]
    assert set(source.train_names).isdisjoint(source.test_names) and len(source.train_names) == 8
    pictures, labels = source.train_pictures(0, 0, 0, 6)
    assert pictures.shape == (6, 3, 32, 32) and pictures.dtype == torch.float32
    assert set(torch.unique(labels).tolist()) == {0, 1, 2, 255}
    slices = [source.train_pictures(0, 0, first, 2) for first in (0, 2, 4)]
    assert same((pictures, labels), [torch.cat(part) for part in zip(*slices)])
    assert source.test_pictures()[0].shape == (2, 3, 32, 32)
    loss = demo.network.pixel_loss(torch.zeros(6, 3, 32, 32), labels, source.class_weights)
    assert torch.isfinite(loss)
