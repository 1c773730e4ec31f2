# SPDX-License-Identifier: Apache-2.0
"""Makes a folder for `main.py --data` of Debian's package openclipart-png, which is dedicated to
the public domain: drawings with an alpha channel, sorted into folders.

    python examples/segmentation/clipart.py build/clipart
    python examples/segmentation/main.py --data build/clipart --size 64

The class of a drawing is its folder, its mask what the alpha channel covers (half transparent
pixels are void). It lies on a crop of one of scikit-learn's two photographs.
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

from network import IGNORE

PACKAGE = Path("/usr/share/openclipart/png")
CLASSES = ("animals", "food", "plants", "transportation")
SIDE = 128


def drawings(package: Path, name: str) -> list[Image.Image]:
    """Those that are not huge, have an alpha channel, and cover 10 to 80 % of their square."""
    Image.MAX_IMAGE_PIXELS = None  # some are huge; what is not used is not decoded
    found = []
    for path in sorted((package / name).rglob("*.png")):
        with Image.open(path) as file:
            if file.mode == "RGBA" and max(file.size) <= 2000:
                file.thumbnail((SIDE, SIDE))
                square = Image.new("RGBA", (SIDE, SIDE))
                square.paste(file, ((SIDE - file.width) // 2, (SIDE - file.height) // 2))
                if 0.1 <= np.mean(np.asarray(square)[..., 3] > 127) <= 0.8:
                    found.append(square)
    return found


def write_folder(package: Path, out: Path) -> int:
    """The number of pictures."""
    generator = np.random.default_rng(0)
    photos = [Image.fromarray(image) for image in load_sample_images().images]
    for name in ("JPEGImages", "SegmentationClass"):
        (out / name).mkdir(parents=True, exist_ok=True)
    made = 0
    for value, name in enumerate(CLASSES, 1):
        for drawing in drawings(package, name):
            photo = photos[generator.integers(len(photos))]
            left, top = (int(generator.integers(n - SIDE)) for n in photo.size)
            picture = photo.crop((left, top, left + SIDE, top + SIDE))
            picture.paste(drawing, (0, 0), drawing)
            alpha = np.asarray(drawing)[..., 3]
            mask = np.where(alpha > 191, value, np.where(alpha < 64, 0, IGNORE)).astype(np.uint8)
            picture.save(out / "JPEGImages" / f"{made:04}_{name}.png")
            Image.fromarray(mask).save(out / "SegmentationClass" / f"{made:04}_{name}.png")
            made += 1
    return made


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--package", type=Path, default=PACKAGE, help="its folder of pictures")
    options = parser.parse_args()
    if not options.package.is_dir():
        parser.error(
            f"--package: got {options.package}, which is no folder; `apt install openclipart-png`"
        )
    print(f"{write_folder(options.package, options.out)} pictures in {options.out}")
