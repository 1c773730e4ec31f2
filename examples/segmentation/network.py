# SPDX-License-Identifier: Apache-2.0
"""A small dilated residual network for per-pixel classification, its loss and its measure."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORE = 255  # label of pixels that count neither in the loss nor in the measure


def _conv3x3(inputs: int, outputs: int, stride: int = 1, dilation: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, padding=dilation, dilation=dilation, bias=False)


class ResidualBlock(nn.Module):
    """relu(x + bn(conv(relu(bn(conv(x)))))); (N, C, H, W) to the same shape."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.conv1 = _conv3x3(width, width, dilation=dilation)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = _conv3x3(width, width, dilation=dilation)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(inner)))


class SegmentationNet(nn.Module):
    """(N, 3, H, W) pictures to (N, classes, H, W) scores; H and W are multiples of 4.

    Two convolutions of stride 2, five residual blocks at a quarter of the resolution (dilation
    instead of further strides keeps the maps), a 1x1 convolution, and a bilinear enlargement.
    220,019 parameters for 11 classes, twelve batch norm layers.
    """

    def __init__(self, num_classes: int, width: int = 48) -> None:
        super().__init__()
        self.conv1 = _conv3x3(3, width // 2, stride=2)
        self.norm1 = nn.BatchNorm2d(width // 2)
        self.conv2 = _conv3x3(width // 2, width, stride=2)
        self.norm2 = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(*(ResidualBlock(width, d) for d in (1, 1, 2, 4, 2)))
        self.head = nn.Conv2d(width, num_classes, 1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.normal_(self.head.weight, 0.0, 0.01)
        nn.init.zeros_(self.head.bias)

    def maps(self, x: Tensor) -> Tensor:
        """(N, classes, H / 4, W / 4)."""
        maps = F.relu(self.norm1(self.conv1(x)))
        maps = F.relu(self.norm2(self.conv2(maps)))
        return self.head(self.blocks(maps))

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[-2:]
        return F.interpolate(self.maps(x), size=size, mode="bilinear", align_corners=False)


def build_network(
    num_classes: int, seed: int, kind: type[SegmentationNet] = SegmentationNet, width: int = 48
) -> SegmentationNet:
    """The same weights for the same seed in every process; the caller's generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = kind(num_classes, width)
    return network.to(memory_format=torch.channels_last)  # a quarter faster on CPUs


def pixel_loss(scores: Tensor, labels: Tensor, class_weights: Tensor) -> Tensor:
    """Weighted cross entropy of (N, C, H, W) scores, divided by the number of ALL pixels.

    A division by the sum of the weights would differ between ranks; with this one the average
    of the ranks' losses is the whole batch's loss, whatever is in the pictures.
    """
    total = F.cross_entropy(scores, labels, class_weights, ignore_index=IGNORE, reduction="sum")
    return total / labels.numel()


def confusion_matrix(predicted: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Pixel counts, int64 (true class, predicted class), without the pixels marked IGNORE."""
    counted = labels != IGNORE
    pairs = labels[counted] * num_classes + predicted[counted]
    return torch.bincount(pairs, minlength=num_classes**2).view(num_classes, num_classes)


def mean_iou(confusion: Tensor) -> float:
    """Mean over classes of intersection / union; a class in neither truth nor prediction is left
    out."""
    matrix = confusion.double()
    intersection = matrix.diagonal()
    union = matrix.sum(0) + matrix.sum(1) - intersection
    present = union > 0
    return float((intersection[present] / union[present]).mean())


class PixelTask:
    """What is learned from pictures, as the base of their source: a class for each pixel."""

    num_classes: int
    class_weights: Tensor
    width = 48  # channels of the network

    def build_network(self, seed: int) -> nn.Module:
        """The same weights for the same seed in every process."""
        return build_network(self.num_classes, seed, width=self.width)

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The average of the ranks' losses is the whole batch's loss."""
        return pixel_loss(outputs, labels, self.class_weights.to(outputs.device))

    def quality(self, outputs: Tensor, labels: Tensor) -> float:
        """Mean IoU."""
        return mean_iou(confusion_matrix(outputs.argmax(1), labels, self.num_classes))
