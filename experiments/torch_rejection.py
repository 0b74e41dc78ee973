"""The two ops as one writes them in PyTorch, with the libraries' own softmax and multinomial: what `gpu_check.sh` compares with.

    python experiments/torch_rejection.py                  # needs PyTorch with CUDA; a few seconds on an H200

Shapes are those of the comparisons of `pallas_kernels.bench` at 128 requests: V = 151,936, G = 7, M = 256, bfloat16 weights and target
logits, float32 draft logits.
"""

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROWS, BLOCK, VOCAB, RANK = 128, 7, 151_936, 256


def markov_block(torch: Any, anchor: Any, base: Any, w1: Any, w2: Any) -> tuple[Any, Any]:
    """G tokens per request, left to right; ids and corrected logits."""
    previous, ids, logits = anchor, [], []
    for k in range(BLOCK):
        corrected = base[:, k] + (w1[previous] @ w2.T).float()
        previous = torch.multinomial(torch.softmax(corrected, dim=-1), 1)[:, 0]
        ids.append(previous)
        logits.append(corrected)
    return torch.stack(ids, 1), torch.stack(logits, 1)


def rejection(torch: Any, target: Any, draft_logits: Any, ids: Any) -> tuple[Any, Any]:
    """Accepted drafts and the token behind them."""
    p, q = torch.softmax(target.float(), dim=-1), torch.softmax(draft_logits, dim=-1)
    chance = p[:, :-1].gather(2, ids[:, :, None]) / q.gather(2, ids[:, :, None])
    accepted = torch.rand_like(chance[:, :, 0]) < chance[:, :, 0]
    count = accepted.int().cumprod(dim=1).sum(dim=1)
    rows = torch.arange(ROWS, device=target.device)
    residual = torch.where((count < BLOCK)[:, None], (p[rows, count] - q[rows, count.clamp(max=BLOCK - 1)]).clamp(min=0), p[rows, count])
    return count, torch.multinomial(residual, 1)[:, 0]


def median_seconds(torch: Any, call: Callable[[], Any], repetitions: int = 20) -> float:
    """Of calls that are waited for, behind three to warm up."""
    times = []
    for index in range(repetitions + 3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        if index >= 3:
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def main(arguments: Sequence[str] | None = None) -> int:
    """Time both and write a JSON file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("torch.json"), help="where the times go")
    options = parser.parse_args(arguments)
    try:
        # No dependency of the project: whoever has it may compare.
        torch = importlib.import_module("torch")
    except ImportError:
        print("PyTorch is not installed; this comparison needs it, with CUDA", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    on = {"device": "cuda"}
    base = 2 * torch.randn(ROWS, BLOCK, VOCAB, **on)
    w1, w2 = (torch.randn(VOCAB, RANK, dtype=torch.bfloat16, **on) for _ in range(2))
    w2 /= RANK**0.5
    anchor = torch.randint(0, VOCAB, (ROWS,), **on)
    ids, logits = markov_block(torch, anchor, base, w1, w2)
    target = torch.cat([logits, logits[:, -1:]], 1)
    target = (target + 0.3 * torch.randn_like(target)).bfloat16()
    seconds = {
        "markov_block": median_seconds(torch, lambda: markov_block(torch, anchor, base, w1, w2)),
        "rejection_sample": median_seconds(torch, lambda: rejection(torch, target, logits, ids)),
    }
    content = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": ROWS, "block_size": BLOCK, "seconds": seconds}
    options.out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(content))
    return 0


if __name__ == "__main__":
    sys.exit(main())
