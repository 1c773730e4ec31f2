# SPDX-License-Identifier: Apache-2.0
"""Lightning with synchronized batch norm:

    torchrun --nproc-per-node 2 examples/12_lightning.py

Leave Lightning's own sync_batchnorm=True off: it converts to torch.nn.SyncBatchNorm, which takes no
CPU tensors, and when training ends it makes plain layers of these. Exits with 1 if the ranks'
running statistics differ or training does not.
"""

import os
import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import syncbn


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        network = nn.Sequential(
            *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)),
        )
        # The process group comes with fit(); the first step then makes the layers' own.
        self.network = syncbn.convert_sync_batchnorm(network)
        self.losses: list[float] = []

    def training_step(self, batch, number):
        x, labels = batch
        loss = nn.functional.cross_entropy(self.network(x), labels)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def on_train_end(self) -> None:
        self.means = self.all_gather(self.network[1].running_mean).view(-1, 8)
        self.report = syncbn.report(self)


def main() -> int:
    lightning.seed_everything(0, verbose=False)
    x = torch.randn(64, 3, 8, 8)
    data = TensorDataset(x, x.mean((1, 2, 3)).gt(0).long())
    model = Classifier()
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        max_epochs=5,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=4))
    first, last = (sum(part) / 8 for part in (model.losses[:8], model.losses[-8:]))
    if trainer.is_global_zero:
        print(model.report)
        print(f"{trainer.world_size} ranks: loss {first:.3f} at first, {last:.3f} at last")
    return int(not (model.means == model.means[0]).all() or not last < first)


if __name__ == "__main__":
    sys.exit(main())
