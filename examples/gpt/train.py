"""A small GPT over characters under DistributedDataParallel, with a snapshot to resume from.

In: torchrun's environment (from `supervisor up` or from `torchrun`); options below; a text file, or this file itself.
Out: a line `step=… loss=…` every few steps; the snapshot file, one on each host; a sample at the end.

    supervisor up hosts.toml train.py --steps 2000
    torchrun --standalone --nproc-per-node 2 train.py --steps 2000
"""

from __future__ import annotations

import argparse
import io
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    """One transformer layer: causal attention, then a feed-forward part."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.norm_feed = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Map (batch, time, width) to the same shape."""
        batch, length, width = states.shape
        qkv = self.qkv(self.norm_attention(states)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        states = states + self.merge(mixed.transpose(1, 2).reshape(batch, length, width))
        output: torch.Tensor = states + self.feed(self.norm_feed(states))
        return output


class Gpt(nn.Module):
    """A decoder over a small alphabet."""

    def __init__(self, alphabet: int, options: argparse.Namespace) -> None:
        super().__init__()
        self.context = options.context
        self.tokens = nn.Embedding(alphabet, options.width)
        self.places = nn.Embedding(options.context, options.width)
        self.blocks = nn.Sequential(*(Block(options.width, options.heads) for _ in range(options.layers)))
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, alphabet, bias=False)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """Map character numbers (batch, time) to scores (batch, time, alphabet)."""
        places = torch.arange(indices.shape[1], device=indices.device)
        states = self.blocks(self.tokens(indices) + self.places(places))
        scores: torch.Tensor = self.head(self.norm(states))
        return scores

    @torch.no_grad()
    def sample(self, start: torch.Tensor, length: int) -> torch.Tensor:
        """Continue (1, time) character numbers by `length` more."""
        for _ in range(length):
            scores = self(start[:, -self.context :])[:, -1]
            chosen = torch.multinomial(functional.softmax(scores, dim=-1), 1)
            start = torch.cat([start, chosen], dim=1)
        return start


class Text:
    """The text as numbers; batches are drawn with the rank's and the step's own seed."""

    def __init__(self, path: Path) -> None:
        text = path.read_text()
        self.alphabet = sorted(set(text))
        numbers = {character: number for number, character in enumerate(self.alphabet)}
        self._data = torch.tensor([numbers[character] for character in text])

    def batch(self, step: int, options: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of one step: (batch, context) each."""
        generator = torch.Generator().manual_seed(step * 100_003 + dist.get_rank())
        high = len(self._data) - options.context - 1
        starts = torch.randint(high, (options.batch_size,), generator=generator)
        rows = torch.stack([self._data[start : start + options.context + 1] for start in starts.tolist()])
        return rows[:, :-1], rows[:, 1:]

    def decode(self, indices: list[int]) -> str:
        """The characters of these numbers."""
        return "".join(self.alphabet[index] for index in indices)


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write the snapshot so that a crash at any moment leaves either the old or the new one."""
    new = path.with_name(f"{path.name}.{dist.get_rank()}.new")
    with new.open("wb") as file:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def resume(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Take the newest snapshot that any host has, on every rank, and return the step it was saved after."""
    content = path.read_bytes() if path.exists() else b""
    step = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)["step"] if content else 0
    mine = torch.tensor([step, len(content)], device=device)
    everyone = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    found = [tuple(int(number) for number in one.tolist()) for one in everyone]
    newest, size = max(found)
    if not newest:
        return 0
    source = found.index((newest, size))
    shared = list(content) if dist.get_rank() == source else [0] * size
    buffer = torch.tensor(shared, dtype=torch.uint8, device=device)
    dist.broadcast(buffer, src=source)
    snapshot = torch.load(io.BytesIO(bytes(buffer.tolist())), map_location=device, weights_only=True)
    model.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    print(f"resumed from {path}: step={newest}", flush=True)
    return newest


def train(options: argparse.Namespace, device: torch.device) -> None:
    """Train from where the snapshot ends to the last step, then print a sample from rank 0."""
    text = Text(Path(options.text))
    torch.manual_seed(0)
    model = Gpt(len(text.alphabet), options).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    path = Path(options.snapshot)
    first = resume(path, model, optimizer, device)
    parallel = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    begin = time.monotonic()
    for step in range(first + 1, options.steps + 1):
        inputs, targets = (part.to(device) for part in text.batch(step, options))
        scores = parallel(inputs)
        loss = functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        if step % options.log_every == 0 or step == options.steps:
            speed = (step - first) / (time.monotonic() - begin)
            print(f"step={step}/{options.steps} loss={loss.item():.4f} steps/s={speed:.1f}", flush=True)
        if os.environ["LOCAL_RANK"] == "0" and (step % options.save_every == 0 or step == options.steps):
            save(path, model, optimizer, step)
    if dist.get_rank() == 0:
        start = torch.zeros((1, 1), dtype=torch.long, device=device)
        print(text.decode(model.sample(start, 200)[0].tolist()), flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", default=__file__, help="what to learn")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--context", type=int, default=64, help="characters that one prediction may look at")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--snapshot", default="snapshot.pt", help="saved on each host")
    return parser.parse_args()


def main() -> None:
    """Join the process group, train, leave it."""
    options = _options()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    train(options, device)
    # Only after a successful run: if a rank were missing, this would wait for it.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
