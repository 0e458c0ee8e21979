"""A PyTorch loop on token files, in any number of processes: kill it and start it again with more or with fewer.

owt-data prepare book.txt tokens --tokenizer bytes
torchrun --nproc-per-node 2 examples/torch_loop.py tokens --steps 200
torchrun --nproc-per-node 4 examples/torch_loop.py tokens --steps 400    # goes on at the step of the last checkpoint
"""

# No package here needs torch.
# pyright: reportMissingImports=false

import argparse
import hashlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from owt_data import Batches, open_tokens, read_steps


def train(folder: str, checkpoint: Path, num_steps: int, save_every: int, batches: Batches) -> None:
    """Train from the checkpoint on, or from step 0. The batch of a step is the same for any number of processes."""
    data = open_tokens(folder, tokenizer="bytes")
    torch.manual_seed(0)
    # Your model: this one predicts a token from the token before it.
    model = nn.Sequential(nn.Embedding(data.vocab_size, 64), nn.Linear(64, data.vocab_size))
    optimizer, start = torch.optim.AdamW(model.parameters(), lr=1e-2), 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    if start >= num_steps:
        return
    parallel = DistributedDataParallel(model)
    # No state of the data is saved: the windows of a step follow from its number and the seed.
    for step, rows in read_steps(data.train, batches, start_step=start, stop_step=num_steps):
        windows = torch.from_numpy(rows.astype("int64"))
        loss = cross_entropy(parallel(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # DistributedDataParallel averages the gradients of the processes
        optimizer.step()
        of_all = [torch.empty_like(windows) for _ in range(batches.world_size)]
        dist.all_gather(of_all, windows)  # to show that the batch is the same: a loop of your own leaves it out
        dist.all_reduce(loss := loss.detach())
        if batches.rank == 0:
            digest = hashlib.sha256(torch.cat(of_all).numpy().tobytes()).hexdigest()[:16]
            print(f"step {step + 1} loss {loss.item() / batches.world_size:.4f} windows {digest}", flush=True)
            if (step + 1) % save_every == 0 or step + 1 == num_steps:
                state = {"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, checkpoint.with_suffix(".new"))
                checkpoint.with_suffix(".new").replace(checkpoint)  # a kill leaves the old one or the new one


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="token files, as `owt-data prepare` writes them")
    parser.add_argument("--checkpoint", type=Path, default=Path("torch_loop.pt"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=12, help="of all processes, whose number divides it")
    parser.add_argument("--seq-len", type=int, default=64)
    given = parser.parse_args()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        os.environ.setdefault(name, value)  # a start without torchrun is one process
    dist.init_process_group("gloo")
    of_this_process = Batches(
        seq_len=given.seq_len,
        global_batch_size=given.batch_size,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
    )
    train(given.folder, given.checkpoint, given.steps, given.save_every, of_this_process)
    dist.destroy_process_group()
