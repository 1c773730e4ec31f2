# SPDX-License-Identifier: Apache-2.0
"""A one-stage detector of the demo's digits, after FCOS: each cell of the last map has scores for
the classes and the distances from its centre to the four sides of a box.

Boxes are (top, left, bottom, right) in pixels. Labels of a picture are (4, 5): the class and the
box of up to four digits; class 0 is none.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data import DigitsOnPhotos
from network import SegmentationNet, build_network

MOST_DIGITS = 4  # of a picture
STRIDE = 4  # pixels a cell
UNIT = 12.0  # pixels; a box has about twice as many a side


class Detector(SegmentationNet):
    """(N, 3, H, W) pictures to (N, 11 + 4, H / 4, W / 4): scores, and logarithms of distances."""

    def forward(self, x: Tensor) -> Tensor:
        return self.maps(x)


class BoxesOfDigits(DigitsOnPhotos):
    """The demo's pictures, with the boxes of the digits in place of a class for each pixel."""

    def annotate(self, placed: list[tuple[int, Tensor]]) -> Tensor:
        labels = torch.zeros(MOST_DIGITS, 5)
        for label, (value, pixels) in zip(labels, placed):
            low, high = pixels.nonzero().aminmax(dim=0)
            label[:] = torch.tensor([value, *low, *(high + 1)])
        return labels

    def build_network(self, seed: int) -> nn.Module:
        return build_network(self.num_classes + 4, seed, Detector, self.width)

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy of all cells and 1 - IoU of those in the middle of a box, both divided by
        the number of all cells: the average of the ranks' losses is the whole batch's loss."""
        scores, distances = split(outputs, self.num_classes)
        truth = distances_to(labels[..., 1:], outputs.shape[-2:])  # (N, digits, 4, H, W)
        extent = truth[:, :, :2] + truth[:, :, 2:]
        middle = (truth.unflatten(2, (2, 2)) > extent[:, :, None] / 4).flatten(2, 3).all(2)
        middle &= labels[..., 0, None, None] > 0
        classes = (middle * labels[..., 0, None, None]).sum(1).long()
        weights = self.class_weights.to(outputs.device)
        loss = F.cross_entropy(scores, classes, weights, reduction="sum")
        found = distances[:, None].expand_as(truth).movedim(2, -1)[middle]
        loss = loss + (1 - overlap(found, truth.movedim(2, -1)[middle])).sum()
        return loss / classes.numel()

    def quality(self, outputs: Tensor, labels: Tensor) -> float:
        """Mean average precision of boxes at an IoU of 0.5."""
        truth = [
            (value, picture, box)
            for picture, digits in enumerate(labels)
            for value, *box in digits.tolist()
            if value
        ]
        found = []
        for picture, output in enumerate(outputs):
            found += [(*rest, picture, box) for *rest, box in self.boxes(output)]
        precisions = []
        for value in range(1, self.num_classes):
            mine = sorted((f[1:] for f in found if f[0] == value), key=lambda f: -f[0])
            theirs = [(picture, torch.tensor(box)) for kind, picture, box in truth if kind == value]
            precisions += [average_precision(mine, theirs)] if theirs else []
        return sum(precisions) / len(precisions)

    def boxes(self, output: Tensor, most: int = 20) -> list[tuple[int, float, Tensor]]:
        """(class, probability, box) of a picture's cells, best first, without those that overlap
        with a better one."""
        scores, distances = split(output[None], self.num_classes)
        best, kinds = scores[0].softmax(0)[1:].max(0)
        best, order = best.flatten().sort(descending=True)
        size = output.shape[-2:]
        sides = distances[0].flatten(1).T * torch.tensor([-1, -1, 1, 1])
        every = centres(size).flatten(1).T.repeat(1, 2) + sides
        kept: list[tuple[int, float, Tensor]] = []
        for probability, cell in zip(best[:most].tolist(), order.tolist()):
            box = every[cell]
            if all(box_iou(box, other) < 0.5 for _, _, other in kept):
                kept.append((int(kinds.flatten()[cell]) + 1, probability, box))
        return kept


def split(outputs: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Scores, and distances in pixels."""
    return outputs[:, :classes], outputs[:, classes:].exp() * UNIT


def centres(size: torch.Size) -> Tensor:
    """(2, H, W): the row and the column of each cell's centre, in pixels."""
    rows, columns = (STRIDE * torch.arange(n) + STRIDE / 2 for n in size)
    return torch.stack(torch.meshgrid(rows, columns, indexing="ij"))


def distances_to(boxes: Tensor, size: torch.Size) -> Tensor:
    """(..., 4) to (..., 4, H, W): how far each cell's centre is inside of each side."""
    corners, at = boxes[..., None, None], centres(size).to(boxes.device)
    return torch.cat([at - corners[..., :2, :, :], corners[..., 2:, :, :] - at], -3)


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """IoU of boxes around the same point; a and b are distances (..., 4)."""
    areas = [(d[..., :2] + d[..., 2:]).prod(-1) for d in (a, b, torch.minimum(a, b))]
    return areas[2] / (areas[0] + areas[1] - areas[2])


def box_iou(a: Tensor, b: Tensor) -> float:
    """IoU of two boxes."""
    both = torch.minimum(a[2:], b[2:]) - torch.maximum(a[:2], b[:2])
    common = float(both.clamp(min=0).prod())
    areas = [float((box[2:] - box[:2]).prod()) for box in (a, b)]
    return common / (sum(areas) - common)


def average_precision(
    found: list[tuple[float, int, Tensor]], truth: list[tuple[int, Tensor]]
) -> float:
    """Area under precision over recall. found: (probability, picture, box), best first; truth:
    (picture, box), each found once at most."""
    left = dict(enumerate(truth))
    hits = []
    for _, picture, box in found:
        fitting = {k: box_iou(box, other) for k, (at, other) in left.items() if at == picture}
        best = max(fitting, key=fitting.__getitem__, default=-1)
        hits.append(best >= 0 and fitting[best] >= 0.5)
        if hits[-1]:
            del left[best]
    right = torch.tensor(hits, dtype=torch.float64)
    precision = right.cumsum(0) / torch.arange(1, len(hits) + 1)
    at_least = precision.flip(0).cummax(0).values.flip(0)  # at this recall or a higher one
    return float((at_least * right).sum()) / len(truth)
