# SPDX-License-Identifier: Apache-2.0
"""Pictures for the demo: handwritten digits composed over photographs, and the common interface.

Both sources, this one and folder.VocFolder, offer
    num_classes, class_names, class_weights     labels are 0..num_classes-1, or network.IGNORE
    build_network(seed), loss, quality          those of network.PixelTask
    train_pictures(seed, step, first, count)    a slice of the global batch of one step
    test_pictures()                             the held-out pictures, the same in every run
Pictures are (N, 3, size, size) float32, normalized with MEAN and DEVIATION; labels are
(N, size, size) int64. Picture i of step t is drawn by a generator of its own, seeded with
(seed, t, i): a rank makes its slice and nothing else, and every split of the global batch
over ranks sees the same pictures.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from network import PixelTask

MEAN, DEVIATION = 0.35, 0.25
TRAIN_DIGITS = slice(0, 1297)
TEST_DIGITS = slice(1297, 1797)
TRAIN_COLUMNS = slice(0, 400)
TEST_COLUMNS = slice(430, 640)
_TRAIN_STREAM, _TEST_STREAM = 1, 2  # first words of the seeds, so that no two streams meet
_TEST_SEED = 20_000


class Source(Protocol):
    """What the training needs to know of a set of pictures."""

    num_classes: int
    class_names: list[str]
    class_weights: Tensor

    def train_pictures(
        self, seed: int, step: int, first: int, count: int
    ) -> tuple[Tensor, Tensor]: ...

    def test_pictures(self) -> tuple[Tensor, Tensor]: ...

    def build_network(self, seed: int) -> nn.Module: ...

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor: ...

    def quality(self, outputs: Tensor, labels: Tensor) -> float: ...


def normalize(picture: Tensor) -> Tensor:
    """0..1 to the network's range."""
    return (picture - MEAN) / DEVIATION


def denormalize(picture: Tensor) -> Tensor:
    """The network's range to 0..1."""
    return (picture * DEVIATION + MEAN).clamp(0.0, 1.0)


def background_light(num_classes: int, background: int | None = 0) -> Tensor:
    """Class weights of the loss: a quarter for the background, which fills most pixels."""
    weights = torch.ones(num_classes)
    if background is not None:
        weights[background] = 0.25
    return weights


def training_generator(seed: int, step: int, index: int) -> np.random.Generator:
    """The generator of picture `index` of the global batch at `step`."""
    return np.random.default_rng((_TRAIN_STREAM, seed, step, index))


def stack(made: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Single pictures and labels to one batch."""
    pictures, labels = zip(*made)
    return torch.stack(pictures), torch.stack(labels)


def _resize(picture: Tensor, size: int, mode: str) -> Tensor:
    """(C, H, W) to (C, size, size)."""
    corners = False if mode == "bilinear" else None
    return F.interpolate(picture[None], size=(size, size), mode=mode, align_corners=corners)[0]


class DigitsOnPhotos(PixelTask):
    """scikit-learn's 1797 handwritten digits over crops of its two photographs.

    11 classes: background and the ten digits. Digits and photographs are split once: the test
    pictures use digits and parts of the photographs that training never sees.
    """

    num_classes = 11
    class_names = ["background", *map(str, range(10))]

    def __init__(self, num_test: int = 200, size: int = 64) -> None:
        from sklearn.datasets import load_digits, load_sample_images

        digits = load_digits()
        self.digits = torch.from_numpy((digits.images / 16.0).astype(np.float32))
        self.digit_labels: list[int] = digits.target.tolist()
        self.photos = [
            torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))
            for image in load_sample_images().images
        ]
        self.num_test = num_test
        self.size = size
        self.class_weights = background_light(self.num_classes)

    def train_pictures(self, seed: int, step: int, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Pictures first..first+count-1 of the global batch of a step."""
        made = [
            self._compose(training_generator(seed, step, index), TRAIN_DIGITS, TRAIN_COLUMNS)
            for index in range(first, first + count)
        ]
        return stack(made)

    def test_pictures(self) -> tuple[Tensor, Tensor]:
        """The same num_test pictures in every run, whatever the training seed."""
        made = [
            self._compose(
                np.random.default_rng((_TEST_STREAM, _TEST_SEED, index)), TEST_DIGITS, TEST_COLUMNS
            )
            for index in range(self.num_test)
        ]
        return stack(made)

    def _compose(
        self, generator: np.random.Generator, digits: slice, columns: slice
    ) -> tuple[Tensor, Tensor]:
        """One picture (3, size, size) and its labels."""
        picture = self._background(generator, columns)
        placed: list[tuple[int, Tensor]] = []
        ink = _colour(generator, 0.6, 1.0)  # one colour a picture
        taken: list[tuple[int, int, int]] = []
        for _ in range(generator.integers(2, 5)):
            index = int(generator.integers(digits.start, digits.stop))
            side = int(generator.integers(24, 33))
            box = self._free_box(generator, side, taken)
            if box is None:
                continue
            taken.append(box)
            top, left, _ = box
            cut = (slice(top, top + side), slice(left, left + side))
            alpha = _resize(self.digits[index][None], side, "bilinear")[0]
            picture[:, cut[0], cut[1]] *= 1.0 - alpha
            picture[:, cut[0], cut[1]] += ink * alpha
            pixels = torch.zeros(self.size, self.size, dtype=torch.bool)
            pixels[cut] = alpha > 0.4
            placed.append((self.digit_labels[index] + 1, pixels))
        # Exposure and tint differ from picture to picture, as they do between cameras and hours.
        exposure = 2.0 ** generator.uniform(-1.0, 0.0)
        noise = generator.normal(0.0, 0.02, picture.shape).astype(np.float32)
        picture = picture * (exposure * _colour(generator, 0.8, 1.0)) + torch.from_numpy(noise)
        return normalize(picture.clamp(0.0, 1.0)), self.annotate(placed)

    def annotate(self, placed: list[tuple[int, Tensor]]) -> Tensor:
        """Labels (size, size) of the digits in a picture: each one's class and its pixels, bool."""
        labels = torch.zeros(self.size, self.size, dtype=torch.int64)
        for value, pixels in placed:
            labels[pixels] = value
        return labels

    def _background(self, generator: np.random.Generator, columns: slice) -> Tensor:
        """A darkened square crop of one of the photographs, (3, size, size) in 0..0.7."""
        photo = self.photos[generator.integers(len(self.photos))]
        side = int(generator.integers(64, 129))
        top = int(generator.integers(0, photo.shape[1] - side + 1))
        left = int(generator.integers(columns.start, columns.stop - side + 1))
        crop = photo[:, top : top + side, left : left + side].float() / 255.0
        return _resize(crop, self.size, "area") * 0.7

    def _free_box(
        self, generator: np.random.Generator, side: int, taken: list[tuple[int, int, int]]
    ) -> tuple[int, int, int] | None:
        """(top, left, side) that touches no taken box, or None after ten tries."""
        for _ in range(10):
            top, left = (int(v) for v in generator.integers(0, self.size - side + 1, 2))
            if all(
                top + side <= other_top
                or other_top + other_side <= top
                or left + side <= other_left
                or other_left + other_side <= left
                for other_top, other_left, other_side in taken
            ):
                return top, left, side
        return None


def _colour(generator: np.random.Generator, low: float, high: float) -> Tensor:
    """A random colour, (3, 1, 1)."""
    return torch.from_numpy(generator.uniform(low, high, (3, 1, 1)).astype(np.float32))
