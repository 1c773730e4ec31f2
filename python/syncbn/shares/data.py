# SPDX-License-Identifier: Apache-2.0
"""The batches of shares: which samples a share has in a step, and with what random numbers they are
made and put together, does not depend on the processes or on a DataLoader's workers."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

from ..step.options import check_integer
from .streams import number_of, seeded
from .together import Together


class _Place(NamedTuple):
    """The part of a batch of one share. samples: their indices in the dataset."""

    epoch: int
    batch: int
    share: int
    samples: list[int]


class _Parts(Dataset):
    """The collated parts of batches. A sample's random numbers come from its epoch and index, those
    of collate from the epoch, the batch and the share."""

    def __init__(self, dataset: Any, seed: int, collate: Callable[[list], Any]) -> None:
        self.dataset, self.seed, self.collate = dataset, seed, collate
        self._looks = True  # in each worker

    def __getitem__(self, place: _Place) -> Any:
        if not self._looks:
            return self._of(*place)
        self._looks = False
        before = self._draws()
        part = self._of(*place)
        for name, state in self._draws().items():
            if before.get(name) != state:
                raise ValueError(
                    f"dataset: got random numbers from the generator {name!r}, expected those of "
                    "PyTorch's, NumPy's and Python's default ones, which depend on the sample alone"
                )
        return part

    def _draws(self) -> dict[str, Any]:
        others = {"dataset": self.dataset, "__getitem__": type(self.dataset).__getitem__}
        return Together(nn.Module(), others | {"collate_fn": self.collate}).draws

    def _of(self, epoch: int, batch: int, share: int, indices: list[int]) -> Any:
        samples = []
        for index in indices:
            with seeded(self.seed, "sample", epoch, index):
                samples.append(self.dataset[index])
        with seeded(self.seed, "batch", epoch, batch, share):
            return self.collate(samples)


def _as_it_is(parts: list) -> list:
    return parts


class Loader:
    """The batches of epochs, as Shares.loader() makes it. An iteration is an epoch, or what is left
    of one, and gives for each batch a list of parts, one for each share of this process. len() is
    the number of batches in an epoch.

    epoch: of the iteration that runs, or else of the next one.
    """

    def __init__(
        self, dataset: Any, batch_size: int, shuffle: bool, seed: int, parties: Any, options: dict
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ValueError(
                f"dataset: got {type(dataset).__name__}, whose order is its own, expected one with "
                "indices and a length"
            )
        shares = parties.shares
        if not isinstance(batch_size, int) or batch_size < 1 or batch_size % shares:
            raise ValueError(
                f"batch_size: got {batch_size!r}, expected a multiple of the {shares} shares, "
                "which have equal parts of the batch"
            )
        for name in ("sampler", "batch_sampler", "drop_last"):
            if name in options:
                raise ValueError(f"{name}: got one, expected none: the loader chooses the samples")
        self.dataset, self.batch_size, self.shuffle = dataset, batch_size, shuffle
        self.epoch = self._batch = 0
        self._seed, self._of_share, self._parties = seed, batch_size // shares, parties
        collate = options.pop("collate_fn", None) or default_collate
        # The program's own generator is left alone.
        options = {"generator": torch.Generator(), "collate_fn": _as_it_is} | options
        parts = _Parts(dataset, seed, collate)
        self._batches = DataLoader(parts, batch_sampler=_Order(self), **options)

    def __len__(self) -> int:
        return len(self.dataset) // self.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Chooses the next iteration's epoch. Without it epochs follow each other."""
        check_integer("epoch", epoch, 0)
        if epoch != self.epoch:
            self.epoch, self._batch = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """Says which batch comes next."""
        return {"epoch": self.epoch, "batch": self._batch, "samples": len(self.dataset)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Has the next iteration begin with the batch that came next in another run.

        Raises:
            ValueError: the state is not of such a loader, or of another number of samples.
        """
        for name in ("epoch", "batch", "samples"):
            check_integer(f"state_dict[{name!r}]", state.get(name), 0)
        if state["samples"] != len(self.dataset) or state["batch"] > len(self):
            raise ValueError(
                f"state_dict: got batch {state['batch']} of {state['samples']} samples, expected "
                f"one of {len(self.dataset)} samples"
            )
        self.epoch, self._batch = state["epoch"], state["batch"]

    def said(self) -> dict[str, object]:
        """Says what processes must have alike in a step."""
        return {
            "samples": len(self.dataset),
            "batch size": self.batch_size,
            "shuffle": self.shuffle,
            "epoch": self.epoch,
            "batch": self._batch,
        }

    def __iter__(self) -> Iterator[list[Any]]:
        try:
            for parts in self._batches:
                self._batch += 1
                yield parts
        except Exception as error:  # of the dataset or collate_fn, on this process
            self._parties.refuse("step", error)
            raise
        finally:
            if self._batch == len(self):
                self.epoch, self._batch = self.epoch + 1, 0

    def places(self) -> Iterator[list[_Place]]:
        """The samples of this process's shares in the batches that are left of the epoch."""
        order, size = list(range(len(self.dataset))), self._of_share
        if self.shuffle:
            generator = torch.Generator().manual_seed(number_of(self._seed, "order", self.epoch))
            order = torch.randperm(len(order), generator=generator).tolist()
        epoch = self.epoch
        for batch in range(self._batch, len(self)):
            begin = batch * self.batch_size
            begins = {share: begin + share * size for share in self._parties.mine}
            yield [_Place(epoch, batch, v, order[i : i + size]) for v, i in begins.items()]


class _Order(Sampler[list[_Place]]):
    """The sampler that the DataLoader asks for its batches."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[list[_Place]]:
        return self._loader.places()
