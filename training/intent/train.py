"""Train and evaluate the bundled intent model on two CPU cores; see README.md in this folder.

    python training/intent/train.py --out DIR [--eval-only]

The last line on stdout is JSON with the accuracies and the cost.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import torch
from batches import NO_INTENTS, Stage, make_batch
from chat_format import train_tokenizer
from evaluation import evaluate
from export import save_model
from network import Batch, Network, Shape
from torch import nn
from torch.nn import functional
from tqdm import tqdm
from wiring import wire

from headstart_lab.intent.intent import NUM_LISTED

VOCAB_SIZE = 1536
STAGES = (
    Stage("copy", 20, 8, 4, 4, NO_INTENTS, True, 0),
    Stage("pairs", 400, 8, 6, 7, (2, 4), True, 1000),
    Stage("lists", 700, 3, 16, 18, (2, 6), False, 1000),
    Stage("full", 1000, 1, 48, 50, (NUM_LISTED, NUM_LISTED), False, 0),
)
MUON_LR = 1.5e-3
ADAMW_LR = 8e-4
WARMUP_STEPS = 60
FINAL_LR_SHARE = 0.02
CLIP = 1.0


def main() -> int:
    args = _parse()
    torch.set_num_threads(args.threads)
    result: dict[str, float | int] = {}
    if not args.eval_only:
        result |= train(args.out, args.seed, args.scale)
    result |= evaluate(args.out, args.sentences)
    print(json.dumps(result))
    return 0


def train(out: Path, seed: int, scale: float) -> dict[str, float | int]:
    """Train from initial weights, write the model folder, and return the cost."""
    started, cpu_started = time.monotonic(), time.process_time()
    torch.manual_seed(seed)
    tokenizer = train_tokenizer(VOCAB_SIZE, num_preambles=400)
    network = Network(Shape(len(tokenizer)))
    wire(network)
    optimizers = _optimizers(network)
    steps = [(stage, step) for stage in STAGES for step in range(round(stage.steps * scale))]
    num_tokens = 0
    bar = tqdm(steps, file=sys.stderr, mininterval=5, dynamic_ncols=True)
    for i, (stage, step) in enumerate(bar):
        batch = make_batch(stage, tokenizer, f"{seed}/{stage.name}/{step}")
        loss, is_right = _learn(network, optimizers, batch, _lr_share(i, len(steps)))
        num_tokens += batch.preamble.numel() + batch.segments.numel()
        if i % 20 == 0:
            bar.set_postfix_str(f"{stage.name} loss {loss:.3f} tokens {is_right:.3f}")
    save_model(network, tokenizer, out)
    return {
        "train_seconds": round(time.monotonic() - started),
        "train_cpu_seconds": round(time.process_time() - cpu_started),
        "train_tokens": num_tokens,
        "parameters": sum(weight.numel() for weight in network.parameters()),
    }


def _learn(
    network: Network, optimizers: list[torch.optim.Optimizer], batch: Batch, lr_share: float
) -> tuple[float, float]:
    """Run one step of every optimizer; return the loss and the share of answer tokens predicted correctly."""
    with torch.autocast("cpu", torch.bfloat16):
        logits, targets = network(batch)
    loss = functional.cross_entropy(logits.float(), targets)
    network.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(network.parameters(), CLIP)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * lr_share
        optimizer.step()
    return loss.item(), (logits.argmax(-1) == targets).float().mean().item()


def _optimizers(network: Network) -> list[torch.optim.Optimizer]:
    """Return Muon (Jordan et al. 2024) for the matrices of the layers, AdamW for embeddings and norms."""
    matrices = [w for name, w in network.named_parameters() if w.dim() == 2 and "embed" not in name]
    others = [w for name, w in network.named_parameters() if w.dim() < 2 or "embed" in name]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=ADAMW_LR, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return optimizers


def _lr_share(step: int, num_steps: int) -> float:
    """Return the learning-rate factor: linear warm-up, then a cosine down to a small share."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, num_steps - WARMUP_STEPS)
    return FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * 0.5 * (1 + math.cos(math.pi * progress))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the model folder to write (or to read, --eval-only)")
    parser.add_argument("--eval-only", action="store_true", help="evaluate the model in --out, train nothing")
    parser.add_argument("--seed", type=int, default=0, help="seed of data and weights (default 0)")
    parser.add_argument("--sentences", type=int, default=400, help="held-out sentences per figure (default 400)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument("--scale", type=float, default=1.0, help="multiply the steps of each stage, for a quick try")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
