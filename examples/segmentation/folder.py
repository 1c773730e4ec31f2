# SPDX-License-Identifier: Apache-2.0
"""Pictures and masks from a folder of the user's own, in the layout of Pascal VOC.

DIR/JPEGImages/NAME.jpg            pictures (.jpeg and .png are found too)
DIR/SegmentationClass/NAME.png     masks, one byte a pixel (palette or grey): the class, 255 = void
DIR/ImageSets/Segmentation/train.txt and val.txt    names, one a line; optional

Without the two lists every fifth picture, in the order of names, is held out. The classes are
the values found in the masks.
"""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from data import background_light, normalize, stack, training_generator
from network import IGNORE, PixelTask

_SUFFIXES = (".jpg", ".jpeg", ".png")


class VocFolder(PixelTask):
    """A data.Source over a folder; pictures are read when needed, by the rank that needs them."""

    def __init__(self, directory: str | Path, num_test: int = 200, size: int = 128) -> None:
        self.root = Path(directory)
        self.size = size
        for name in ("JPEGImages", "SegmentationClass"):
            if not (self.root / name).is_dir():
                raise FileNotFoundError(f"{self.root} has no folder {name}/ (Pascal VOC layout)")
        self._files = {
            path.stem: path
            for path in (self.root / "JPEGImages").iterdir()
            if path.suffix.lower() in _SUFFIXES
        }
        masks = {path.stem for path in (self.root / "SegmentationClass").glob("*.png")}
        self.train_names, test_names = self._split(sorted(masks & self._files.keys()))
        self.test_names = test_names[:num_test]
        values = self._mask_values([*self.train_names, *self.test_names])
        self.num_classes = len(values)
        self.class_names = ["background" if value == 0 else str(value) for value in values]
        self.class_weights = background_light(
            self.num_classes, values.index(0) if 0 in values else None
        )
        # Mask values need not be contiguous; labels are.
        self._label_of_value = np.full(256, IGNORE, dtype=np.int64)
        self._label_of_value[values] = np.arange(len(values))

    def train_pictures(self, seed: int, step: int, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Pictures first..first+count-1 of the global batch of a step, each cropped at random."""
        made = []
        for index in range(first, first + count):
            generator = training_generator(seed, step, index)
            name = self.train_names[generator.integers(len(self.train_names))]
            enlarge = float(generator.uniform(1.0, 1.6))
            across, down = generator.uniform(0.0, 1.0, 2)
            made.append(self._crop(name, enlarge, across, down, bool(generator.integers(2))))
        return stack(made)

    def test_pictures(self) -> tuple[Tensor, Tensor]:
        """The middle square of every held-out picture."""
        return stack([self._crop(name, 1.0, 0.5, 0.5, False) for name in self.test_names])

    def _split(self, names: list[str]) -> tuple[list[str], list[str]]:
        """Names to train on and to test on."""
        lists = self.root / "ImageSets" / "Segmentation"
        if (lists / "train.txt").is_file() and (lists / "val.txt").is_file():
            known = set(names)
            train, test = (
                [n for n in (lists / file).read_text().split() if n in known]
                for file in ("train.txt", "val.txt")
            )
            held_out = set(test)
            train = [name for name in train if name not in held_out]
        else:
            test = names[::5]
            train = [name for i, name in enumerate(names) if i % 5]
        if not train or not test:
            raise ValueError(
                f"{self.root}: {len(train)} pictures with masks to train and {len(test)} to test; "
                "both must be at least 1"
            )
        return train, test

    def _mask(self, name: str) -> Image.Image:
        """One class number a pixel; a black-and-white mask means classes 0 and 1."""
        mask = Image.open(self.root / "SegmentationClass" / f"{name}.png")
        if mask.mode not in ("P", "L", "1"):
            raise ValueError(
                f"{mask.filename}: a mask holds one class number a pixel (palette or grey), "
                f"this one is {mask.mode}"
            )
        return mask if mask.mode != "1" else mask.convert("L").point(lambda v: v // 255)

    def _mask_values(self, names: list[str]) -> list[int]:
        found: set[int] = set()
        for name in tqdm(names, desc="looking for classes", leave=False, delay=1.0):
            found.update(np.unique(np.asarray(self._mask(name))).tolist())
        found.discard(IGNORE)
        return sorted(found)

    @lru_cache(maxsize=256)  # noqa: B019 - one source lives as long as its process
    def _pair(self, name: str) -> tuple[Image.Image, Image.Image]:
        """A picture and its mask, kept small: no crop needs more than twice the final size."""
        with Image.open(self._files[name]) as file:
            picture = file.convert("RGB")
        mask = self._mask(name)
        if picture.size != mask.size:
            raise ValueError(f"{name}: picture {picture.size} and mask {mask.size} differ in size")
        ratio = 2 * self.size / min(picture.size)
        if ratio < 1.0:
            size = (math.ceil(picture.width * ratio), math.ceil(picture.height * ratio))
            picture = picture.resize(size, Image.Resampling.BILINEAR)
            mask = mask.resize(size, Image.Resampling.NEAREST)
        return picture, mask

    def _crop(
        self, name: str, enlarge: float, across: float, down: float, mirror: bool
    ) -> tuple[Tensor, Tensor]:
        """A square whose side is the shorter side / enlarge, at (across, down) in 0..1."""
        picture, mask = self._pair(name)
        side = min(picture.size) / enlarge
        left, top = across * (picture.width - side), down * (picture.height - side)
        box = (left, top, left + side, top + side)
        size = (self.size, self.size)
        pixels = np.array(picture.resize(size, Image.Resampling.BILINEAR, box), dtype=np.float32)
        values = np.array(mask.resize(size, Image.Resampling.NEAREST, box))
        if mirror:
            pixels, values = pixels[:, ::-1], values[:, ::-1]
        channels = np.ascontiguousarray(pixels.transpose(2, 0, 1)) / np.float32(255.0)
        labels = torch.from_numpy(self._label_of_value[values])
        return normalize(torch.from_numpy(channels)), labels
