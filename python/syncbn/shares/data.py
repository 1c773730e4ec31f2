# SPDX-License-Identifier: Apache-2.0
"""The samples of shares: which ones a step has, and with what random numbers they are made, does
not depend on the processes or on a DataLoader's workers."""

import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

from .checks import number_of

#: Of a sample: the epoch, and its index in the dataset.
Place = tuple[int, int]


class Batches(Sampler[list[Place]]):
    """For each step the samples of this process's shares, share by share. The last samples, which
    make no whole batch, are left out.

    mine: the process's shares, of `shares`.
    """

    def __init__(
        self, dataset: Any, batch_size: int, shuffle: bool, seed: int, shares: int, mine: range
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ValueError(
                f"dataset: got {type(dataset).__name__}, whose order is its own, expected one with "
                "indices and a length"
            )
        if not isinstance(batch_size, int) or batch_size < 1 or batch_size % shares:
            raise ValueError(
                f"batch_size: got {batch_size!r}, expected a multiple of the {shares} shares, "
                "which have equal parts of the batch"
            )
        self.length, self.shuffle, self.seed = len(dataset), shuffle, seed
        self.batch_size = batch_size
        self._of_share, self._mine = batch_size // shares, mine
        self.epoch = self.start = 0

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Chooses the order of an epoch, of which the next iteration takes the batches from number
        `start` on. To be called before each epoch, as that of DistributedSampler."""
        self.epoch, self.start = epoch, start

    def __len__(self) -> int:
        return max(0, self.length // self.batch_size - self.start)

    def __iter__(self) -> Iterator[list[Place]]:
        order = list(range(self.length))
        if self.shuffle:
            generator = torch.Generator().manual_seed(number_of(self.seed, "order", self.epoch))
            order = torch.randperm(self.length, generator=generator).tolist()
        first, last = self._mine.start * self._of_share, self._mine.stop * self._of_share
        for batch in range(self.start, self.length // self.batch_size):
            begin = batch * self.batch_size
            yield [(self.epoch, index) for index in order[begin + first : begin + last]]


class Samples(Dataset):
    """The samples of a dataset, each made with random numbers that its epoch and index decide:
    PyTorch's, Python's, and NumPy's if it is imported. The program's own go on as if nothing had
    been drawn."""

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, place: Place) -> Any:
        epoch, index = place
        seed = number_of(self.seed, "sample", epoch, index)
        numpy = sys.modules.get("numpy")
        before = random.getstate(), numpy and numpy.random.get_state()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            if numpy:
                numpy.random.seed(seed % 2**32)
            try:
                return self.dataset[index]
            finally:
                random.setstate(before[0])
                if numpy:
                    numpy.random.set_state(before[1])
