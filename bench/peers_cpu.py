"""PyTorch's attention on a CPU on the shapes of bench_attend, medians of 25 runs: scaled_dot_product_attention by its flash kernel, in
F32 and BF16. Outputs are checked against float64; a peer whose output is wrong gets no time.

usage: peers_cpu.py [--threads N]

K and V are dense, and each query head has its own copy of its kv head's. Copying is not in the times; that decode reads four times as
much is.
"""
import argparse
import statistics
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

Q_HEADS, KV_HEADS, D = 32, 8, 128
SHAPES = {"prefill": (256, 2304), "decode, 4096 tokens": (1, 4096), "decode, 32768 tokens": (1, 32768)}  # queries, keys
MOST = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # relative error


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    torch.set_num_threads(parser.parse_args().threads)
    torch.manual_seed(1)
    for name, (queries, keys) in SHAPES.items():
        q = torch.randn(1, Q_HEADS, queries, D)
        k, v = (torch.randn(1, KV_HEADS, keys, D).repeat_interleave(Q_HEADS // KV_HEADS, 1) for _ in "kv")
        mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        scores = (q.double() @ k.double().transpose(2, 3) * D**-0.5).masked_fill(~mask, -torch.inf)
        expected = scores.softmax(-1) @ v.double()
        for dtype, most in MOST.items():
            inputs = [x.to(dtype) for x in (q, k, v)]
            options = {"attn_mask": mask} if queries > 1 else {}
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION), torch.no_grad():
                times = []
                for _ in range(28):
                    start = time.perf_counter()
                    out = scaled_dot_product_attention(*inputs, **options)
                    times.append(time.perf_counter() - start)
            error = ((out.double() - expected).norm() / expected.norm()).item()
            text = f"{1e6 * statistics.median(times[3:]):9.0f} us" if error <= most else "wrong"
            print(f"{name:22} {str(dtype)[6:]:9} {text}  error {error:.2g}")


if __name__ == "__main__":
    main()
