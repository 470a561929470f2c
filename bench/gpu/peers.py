"""PyTorch's attention on the shapes of bench_decode, bench_prefill and bench_throughput: cuDNN and FlashAttention-2 backends, F16, cold
L2, medians of 25. --json prints what Google Benchmark prints.

usage: peers.py [--json] [--only TEXT] [--sweep]
"""
import argparse
import json
import statistics

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
D = 128


def median_us(call):
    flush = torch.zeros(64 << 20, dtype=torch.int32, device="cuda")
    times = []
    for i in range(28):
        flush.sum()  # L2 then holds nothing else, and nothing that must be written back
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        if i >= 3:
            times.append(1e3 * start.elapsed_time(stop))
    return statistics.median(times)


def shapes(sweep):
    """name, batch, query heads, kv heads, new tokens, keys, causal"""
    if sweep:
        for n in (1024 << i for i in range(8)):
            yield f"decode b8 h32/8 n{n}", 8, 32, 8, 1, n, False
        for n in (512 << i for i in range(7)):
            for causal in (True, False):
                yield f"prefill n{n} {'causal' if causal else 'full'}", max(16384 // n, 1), 32, 8, n, n, causal
        return
    for batch, q_heads, kv_heads, n in (16, 32, 8, 32768), (16, 32, 8, 8192), (1, 32, 8, 131072), (64, 32, 8, 4096), \
            (64, 40, 10, 1024), (8, 32, 32, 8192):
        yield f"decode b{batch} h{q_heads}/{kv_heads} n{n}", batch, q_heads, kv_heads, 1, n, False
    yield "prefill b1 h32/8 n16384 full", 1, 32, 8, 16384, 16384, False
    for batch, n in (1, 16384), (4, 4096), (16, 1024):
        yield f"prefill b{batch} h32/8 n{n} causal", batch, 32, 8, n, n, True
    yield "chunk of 2048 over 30720", 1, 32, 8, 2048, 32768, False  # all keys: cuDNN's causal mask is top-left aligned


def step_of_32_layers():
    """A token for 16 sequences of 32768 in 32 layers, appended in place; one call per layer, the cache of each its own."""
    n, layers = 32768, 32
    k = [torch.randn(16, 8, n, D, device="cuda", dtype=torch.float16) for _ in range(layers)]
    v = [torch.randn_like(x) for x in k]
    q, new = torch.randn(16, 32, 1, D, device="cuda", dtype=torch.float16), torch.randn(16, 8, D, device="cuda", dtype=torch.float16)

    def step():
        for layer in range(layers):
            k[layer][:, :, n - 1] = new
            v[layer][:, :, n - 1] = new
            scaled_dot_product_attention(q, k[layer], v[layer], enable_gqa=True)

    with sdpa_kernel(BACKENDS["cudnn"]):
        return median_us(step)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    results = []

    def report(name, peer, us):
        results.append({"name": f"{name} {peer}", "run_type": "iteration", "iterations": 25, "real_time": us, "time_unit": "us"})
        if not options.json:
            print(f"{name:34} {peer:6} {us:10.2f} us", flush=True)

    for name, batch, q_heads, kv_heads, n_q, n_k, causal in shapes(options.sweep):
        if options.only not in name:
            continue
        q = torch.randn(batch, q_heads, n_q, D, device="cuda", dtype=torch.float16)
        k = torch.randn(batch, kv_heads, n_k, D, device="cuda", dtype=torch.float16)
        v = torch.randn_like(k)
        for peer, backend in BACKENDS.items():
            try:
                with sdpa_kernel(backend):
                    report(name, peer, median_us(
                        lambda: scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q_heads != kv_heads)))
            except RuntimeError as e:
                if not options.json:
                    print(f"{name}: {peer}: {str(e).splitlines()[0]}")
    name = "step of 32 layers b16 h32/8 n32768"
    if not options.sweep and options.only in name:
        report(name, "cudnn", step_of_32_layers())
    if options.json:
        print(json.dumps({"context": {"library": f"PyTorch {torch.__version__}", "device": torch.cuda.get_device_name()},
                          "benchmarks": results}, indent=0))


main()
