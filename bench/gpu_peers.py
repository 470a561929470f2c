"""PyTorch's attention on the shapes of bench_gpu: cuDNN and FlashAttention-2 backends, F16, cold L2, medians of 25.

usage: gpu_peers.py [--json]
"""
import json
import statistics
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

DECODE = [(16, 32, 8, 32768), (16, 32, 8, 8192), (1, 32, 8, 131072), (64, 32, 8, 4096), (64, 40, 10, 1024), (8, 32, 32, 8192)]
PREFILL = [(1, 32, 8, 4096, 4096), (1, 32, 8, 16384, 16384), (4, 32, 8, 4096, 4096), (1, 32, 8, 2048, 32768)]
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def median_us(call):
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times = []
    for i in range(28):
        flush.fill_(i)
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        if i >= 3:
            times.append(1e3 * start.elapsed_time(stop))
    return statistics.median(times)


def rows():
    for batch, q_heads, kv_heads, n in DECODE:
        yield f"decode b{batch} h{q_heads}/{kv_heads} n{n}", batch, q_heads, kv_heads, 1, n, False
    for batch, q_heads, kv_heads, n_q, n_k in PREFILL:
        name = f"prefill b{batch} h{q_heads}/{kv_heads} n{n_q} causal" if n_q == n_k else f"chunk of {n_q} over {n_k - n_q}"
        yield name, batch, q_heads, kv_heads, n_q, n_k, n_q == n_k


for name, batch, q_heads, kv_heads, n_q, n_k, causal in rows():
    q = torch.randn(batch, q_heads, n_q, 128, device="cuda", dtype=torch.float16)
    k = torch.randn(batch, kv_heads, n_k, 128, device="cuda", dtype=torch.float16)
    v = torch.randn_like(k)
    for backend, kind in BACKENDS.items():
        try:
            with sdpa_kernel(kind):
                us = median_us(lambda: scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q_heads != kv_heads))
        except RuntimeError as e:
            print(f"{name}: {backend}: {str(e).splitlines()[0]}", file=sys.stderr)
            continue
        row = {"case": name, "peer": backend, "attend_us": round(us, 2)}
        print(json.dumps(row) if "--json" in sys.argv else f"{name:34} {backend:6} {us:10.2f} us", flush=True)
