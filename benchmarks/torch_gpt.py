"""GPT-2 in plain PyTorch, and the training of `--preset baby` with it: the baseline of `train_step.py` and `baby.py`.

    python benchmarks/torch_gpt.py TEXT FOLDER

The model is the one of nnx-gpt2: pre-norm blocks, the tanh form of GELU, a tied head, and PyTorch's own attention
(scaled_dot_product_attention). It runs eager in float32 with a thread per core.
"""

# torch is not a dependency of this workspace.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUntypedBaseClass=false, reportUnknownParameterType=false
# pyright: reportUnknownLambdaType=false

import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

BABY = {"vocab_size": 257, "seq_len": 64, "num_layers": 4, "num_heads": 4, "embed_dim": 128}
BATCH_SIZE, MAX_STEPS, EVAL_EVERY, SAVE_EVERY, LOG_EVERY, WARMUP = 12, 2000, 500, 250, 20, 100
LEARNING_RATE, MIN_LEARNING_RATE = 1e-3, 1e-4


class Block(torch.nn.Module):
    """Attention and MLP, each after a norm and on a residual."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.ln_1, self.ln_2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.c_attn, self.c_proj = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.c_fc, self.c_out = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        """Apply the block to activations `[B, T, C]`."""
        heads = (part.unflatten(2, (self.num_heads, -1)) for part in self.c_attn(self.ln_1(x)).chunk(3, dim=2))
        y = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in heads), is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT(torch.nn.Module):
    """The model. `config` has the names of nnx-gpt2's `GPT2Config`."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width = config["embed_dim"]
        self.wte = torch.nn.Embedding(config["vocab_size"], width)
        self.wpe = torch.nn.Embedding(config["seq_len"], width)
        self.h = torch.nn.ModuleList([Block(width, config["num_heads"]) for _ in range(config["num_layers"])])
        self.ln_f = torch.nn.LayerNorm(width)
        for name, values in self.named_parameters():
            if values.ndim == 2:
                residual = name.endswith(("c_proj.weight", "c_out.weight"))
                std = 0.02 / math.sqrt(2 * config["num_layers"]) if residual else 0.02
                torch.nn.init.normal_(values, std=std)
            elif name.endswith("bias"):
                torch.nn.init.zeros_(values)

    def forward(self, tokens: Any) -> Any:
        """Return the logits `[B, T, V]` of tokens `[B, T]`."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight)


def learning_rate(step: int) -> float:
    """Return the learning rate of a step: linear warm-up, then half a cosine."""
    if step < WARMUP:
        return LEARNING_RATE * step / WARMUP
    part = (step - WARMUP) / (MAX_STEPS - WARMUP)
    return MIN_LEARNING_RATE + (LEARNING_RATE - MIN_LEARNING_RATE) * 0.5 * (1 + math.cos(math.pi * part))


def main() -> None:
    """Train on a text, with the validations, the checkpoints and the log lines of the preset baby."""
    text, folder = Path(sys.argv[1]), Path(sys.argv[2])
    torch.manual_seed(0)
    torch.set_num_threads(os.cpu_count() or 1)
    tokens = np.frombuffer(text.read_bytes(), np.uint8).astype(np.int64)
    num_val = len(tokens) // 10
    train, val = (torch.from_numpy(part) for part in (tokens[:-num_val], tokens[-num_val:]))
    model = GPT(BABY)
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.99))
    rng, seq_len, vocab_size = np.random.default_rng(0), BABY["seq_len"], BABY["vocab_size"]

    def loss_of(windows: Any) -> Any:
        return F.cross_entropy(model(windows[:, :-1]).view(-1, vocab_size), windows[:, 1:].reshape(-1))

    @torch.no_grad()
    def val_loss() -> float:
        windows = val[: 1 + (len(val) - 1) // seq_len * seq_len].unfold(0, seq_len + 1, seq_len)
        return sum(loss_of(part).item() * len(part) for part in windows.split(BATCH_SIZE)) / len(windows)

    print(f"step 0: validation loss {val_loss():.4f}", flush=True)
    losses, began = [], time.perf_counter()
    for step in range(1, MAX_STEPS + 1):
        starts = torch.from_numpy(rng.integers(0, len(train) - seq_len, BATCH_SIZE))
        windows = train[starts[:, None] + torch.arange(seq_len + 1)]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step - 1)
        loss = loss_of(windows)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(loss.detach())
        if step % LOG_EVERY == 0:
            rate = len(losses) * BATCH_SIZE * seq_len / (time.perf_counter() - began)
            print(f"step {step}: loss {torch.stack(losses).mean():.4f}, {rate:.0f} tokens/s", flush=True)
            losses, began = [], time.perf_counter()
        if step % SAVE_EVERY == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / f"{step}.pt")
        if step % EVAL_EVERY == 0:
            print(f"step {step}: validation loss {val_loss():.4f}", flush=True)


if __name__ == "__main__":
    main()
