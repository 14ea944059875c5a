"""Trains a PyTorch model on batches of grainmill: the loop, workers, several ranks, and resuming.

    python examples/torch_loop.py
    torchrun --nproc-per-node 2 examples/torch_loop.py

Batches are NumPy arrays, of which `torch.from_numpy` makes tensors without a copy; there is no
`torch.utils.data.DataLoader` around them, as the pipeline has threads and workers of its own. The
data goes into the checkpoint beside model and optimizer, so that a run continues at the next batch.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import grainmill as grain

try:
    import torch
except ImportError:
    print("this example needs PyTorch (`pip install torch`); nothing was run")
    sys.exit()

NUM_FEATURES = 8
RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
Batch = dict[str, "torch.Tensor"]


def element(number: int) -> dict[str, np.ndarray]:
    """Numbers, and a sum of them that the model is to find."""
    x = np.random.default_rng(number).normal(size=NUM_FEATURES).astype(np.float32)
    return {"x": x, "y": x[:4].sum(keepdims=True)}


def pipeline(batch_size: int, num_workers: int) -> grain.IterDataset:
    """Endless batches for this rank."""
    ds = grain.MapDataset.range(10_000).shuffle(seed=42).repeat()[RANK::WORLD_SIZE].map(element)
    options = grain.ReadOptions(num_workers=num_workers)
    return ds.batch(batch_size // WORLD_SIZE).to_iter_dataset(options)


def on_device(batch: dict[str, np.ndarray], device: torch.device) -> Batch:
    """The tensors of a batch: its own memory on the CPU, a copy that does not wait on a GPU."""
    tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
    if device.type == "cpu":
        return tensors
    return {n: t.pin_memory().to(device, non_blocking=True) for n, t in tensors.items()}


class Training:
    """Model, optimizer and data, which are saved together."""

    def __init__(self, batch_size: int, num_workers: int) -> None:
        torch.manual_seed(0)
        own_gpu = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        self.device = own_gpu if torch.cuda.is_available() else torch.device("cpu")
        self.model: torch.nn.Module = torch.nn.Linear(NUM_FEATURES, 1).to(self.device)
        if WORLD_SIZE > 1:
            self.model = torch.nn.parallel.DistributedDataParallel(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.batches = iter(pipeline(batch_size, num_workers))

    def step(self) -> float:
        """Trains on the next batch; returns the loss before."""
        batch = on_device(next(self.batches), self.device)
        loss = torch.nn.functional.mse_loss(self.model(batch["x"]), batch["y"])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def save(self, path: Path) -> None:
        parts: dict[str, Any] = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "data": self.batches.get_state(),
        }
        torch.save(parts, path)

    def restore(self, path: Path) -> None:
        parts = torch.load(path)
        self.model.load_state_dict(parts["model"])
        self.optimizer.load_state_dict(parts["optimizer"])
        self.batches.set_state(parts["data"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    if WORLD_SIZE > 1:
        torch.distributed.init_process_group()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        training = Training(options.batch_size, options.workers)
        losses = []
        for step in range(options.steps):
            if step == options.steps // 2:
                training.save(path)
            losses.append(training.step())
        print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} after {options.steps} steps")

        resumed = Training(
            options.batch_size, num_workers=0
        )  # any number: the batches are the same
        resumed.restore(path)
        again = [resumed.step() for _ in losses[options.steps // 2 :]]
    if again != losses[options.steps // 2 :]:
        sys.exit("the losses after resuming differ")
    print(f"resumed at step {options.steps // 2}: all {len(again)} losses are the same")
    if WORLD_SIZE > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
