"""Other libraries' attention on the shapes of bench_decode, bench_prefill, bench_distr and bench_throughput, cold L2, medians of
25: PyTorch with cuDNN and with FlashAttention-2 in F16, and FlashInfer, FlashAttention-3 and SageAttention 2, where they can be
imported. --json prints what Google Benchmark prints. Outputs are checked against float32 over the stored values; a peer whose output
is wrong gets no time.

usage: peers.py [--json] [--only TEXT] [--sweep]

cudnn, flash        scaled_dot_product_attention over dense F16 keys and values
flashinfer          F16: decode over pages of 64 tokens, prefill over packed sequences
flashinfer-fp8      the same with E4M3 keys and values; decode keeps F16 queries, prefill has E4M3 queries too
flashinfer-xqa-fp8  decode over the same E4M3 pages by XQA, which FlashInfer's trtllm_batch_decode_with_kv_cache takes on Hopper
fa3                 F16: flash_attn_with_kvcache over dense keys and values
fa3-fp8             the same with E4M3 queries, keys and values
sage                sageattn of F16 queries, keys and values, which it quantizes in the call (on Hopper Q and K to INT8, V and P to
                    E4M3); no decode
"""
import argparse
import json
import statistics
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

try:
    import flashinfer
except ImportError:
    flashinfer = None
try:
    from flash_attn_interface import flash_attn_with_kvcache  # FlashAttention-3
except ImportError:
    flash_attn_with_kvcache = None
try:
    from sageattention import sageattn
except ImportError:
    sageattn = None

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
D, PAGE = 128, 64
F16, FP8 = torch.float16, torch.float8_e4m3fn
BUSY_CYCLES = 1_000_000  # keeps the GPU busy until the call is enqueued, so that the host's time is not in the measurement


def median_us(call):
    """The median, and what the last of the timed calls returned."""
    flush = torch.zeros(64 << 20, dtype=torch.int32, device="cuda")
    times = []
    for i in range(28):
        torch.cuda._sleep(BUSY_CYCLES)
        flush.sum()  # L2 then holds nothing else, and nothing that must be written back
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        out = call()
        stop.record()
        stop.synchronize()
        if i >= 3:
            times.append(1e3 * start.elapsed_time(stop))
    return statistics.median(times), out


def worst_row_error(out, q, k, v, causal):
    """Relative L2 error against float32 of the worst of 16 tokens' rows, all heads, of the last sequence. Tensors are
    [batch, heads, tokens, D]."""
    n, rows = q.shape[2], torch.linspace(0, q.shape[2] - 1, min(q.shape[2], 16), device="cuda").long()
    q, k, v, d = q[-1].float()[:, rows], k[-1].float(), v[-1].float(), q.shape[3]
    scores = q.view(k.shape[0], -1, d) @ k.transpose(1, 2) * d**-0.5
    if causal:
        scores.view(k.shape[0], -1, len(rows), n).masked_fill_(torch.arange(n, device="cuda") > rows[:, None], -torch.inf)
    expected = (scores.softmax(-1) @ v).view(q.shape)
    return ((out[-1][:, rows].float() - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()


def shapes(sweep):
    """name, batch, query heads, kv heads, new tokens, keys, causal[, head_dim if not D]"""
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
    for batch, n in (1, 16384), (4, 4096), (16, 1024), (64, 512), (128, 256):
        yield f"prefill b{batch} h32/8 n{n} causal", batch, 32, 8, n, n, True
    for d in 64, 256:
        yield f"prefill b1 h32/8 d{d} n16384 causal", 1, 32, 8, 16384, 16384, True, d
    for d in 128, 64:
        for n in 4096, 16384, 20480:
            for causal in False, True:
                yield f"distr h32/32 d{d} n{n} {'causal' if causal else 'full'}", 1, 32, 32, n, n, causal, d
    yield "distr h32/32 d32 n16384 full", 1, 32, 32, 16384, 16384, False, 32
    for causal in False, True:
        yield f"distr h32/8 d128 n16384 {'causal' if causal else 'full'}", 1, 32, 8, 16384, 16384, causal
    for n in 2048, 512, 64:
        yield f"chunk of {n} over {32768 - n}", 1, 32, 8, n, 32768, False  # all keys: cuDNN's causal mask is top-left aligned


# A peer is made of q, k, v and gives a call that returns [batch, heads, tokens, D], and the values that it attends to.


def sdpa(backend):
    def peer(q, k, v, causal):
        def call():
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

        return call, (q, k, v)

    return peer


def in_pages(k, v):
    """[pages, kv heads, PAGE, D] of K and V, where sequences grew in turns, and the table [batch, pages of a sequence]."""
    batch, heads, n, _ = k.shape
    paged = tuple(x.view(batch, heads, n // PAGE, PAGE, D).permute(2, 0, 1, 3, 4).reshape(-1, heads, PAGE, D) for x in (k, v))
    return paged, torch.arange(len(paged[0]), dtype=torch.int32, device="cuda").view(-1, batch).t().contiguous()


def workspace():
    return torch.zeros(512 << 20, dtype=torch.uint8, device="cuda")


def flashinfer_decode(dtype):
    def peer(q, k, v, causal):
        k, v = k.to(dtype), v.to(dtype)
        paged, table = in_pages(k, v)
        tokens, (batch, pages), (q_heads, kv_heads) = q[:, :, 0].contiguous(), table.shape, (q.shape[1], k.shape[1])
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), "HND", use_tensor_cores=q_heads >= 4 * kv_heads)
        wrapper.plan(torch.arange(batch + 1, dtype=torch.int32) * pages, table.view(-1),
                     torch.full((batch,), PAGE, dtype=torch.int32), q_heads, kv_heads, D, PAGE, q_data_type=F16,
                     kv_data_type=dtype)
        return lambda: wrapper.run(tokens, paged)[:, :, None], (q, k, v)

    return peer


def flashinfer_xqa(q, k, v, causal):
    k, v = k.to(FP8), v.to(FP8)
    paged, table = in_pages(k, v)
    tokens, n, scratch = q[:, :, 0].contiguous(), k.shape[2], workspace()
    lengths = torch.full((len(q),), n, dtype=torch.int32, device="cuda").view(torch.uint32)
    return lambda: flashinfer.decode.trtllm_batch_decode_with_kv_cache(
        tokens, paged, scratch, table, lengths, n, bmm1_scale=D**-0.5, kv_layout="HND")[:, :, None], (q, k, v)


def flashinfer_prefill(dtype):
    def peer(q, k, v, causal):
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        batch, q_heads, n_q, _ = q.shape
        packed = [x.transpose(1, 2).reshape(-1, x.shape[1], D) for x in (q, k, v)]
        scales = (1.0, 1.0, 1.0) if dtype == FP8 else ()
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(), "NHD")
        starts = torch.arange(batch + 1, dtype=torch.int32)
        wrapper.plan(starts * n_q, starts * k.shape[2], q_heads, k.shape[1], D, causal=causal, q_data_type=dtype,
                     kv_data_type=dtype, o_data_type=F16)
        return lambda: wrapper.run(*packed, *scales).view(batch, n_q, q_heads, D).transpose(1, 2), (q, k, v)

    return peer


def flash_attention_3(dtype):
    def peer(q, k, v, causal):
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        rows = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        lengths = torch.full((len(k),), k.shape[2], dtype=torch.int32, device="cuda")
        return lambda: flash_attn_with_kvcache(*rows, cache_seqlens=lengths, causal=causal).transpose(1, 2), (q, k, v)

    return peer


def sage(q, k, v, causal):
    return lambda: sageattn(q, k, v, is_causal=causal), (q, k, v)


def peers_of(n_q):
    peers = {name: sdpa(backend) for name, backend in BACKENDS.items()}
    if flashinfer and n_q == 1:
        peers |= {"flashinfer": flashinfer_decode(F16), "flashinfer-fp8": flashinfer_decode(FP8)}
        peers["flashinfer-xqa-fp8"] = flashinfer_xqa
    elif flashinfer:
        peers |= {"flashinfer": flashinfer_prefill(F16), "flashinfer-fp8": flashinfer_prefill(FP8)}
    if flash_attn_with_kvcache:
        peers |= {"fa3": flash_attention_3(F16), "fa3-fp8": flash_attention_3(FP8)}
    if sageattn and n_q > 1:
        peers["sage"] = sage
    return peers


def step_of_32_layers():
    """A token for 16 sequences of 32768 in 32 layers, appended in place; one call per layer, the cache of each its own."""
    n, layers = 32768, 32
    k = [torch.randn(16, 8, n, D, device="cuda", dtype=F16) for _ in range(layers)]
    v = [torch.randn_like(x) for x in k]
    q, new = torch.randn(16, 32, 1, D, device="cuda", dtype=F16), torch.randn(16, 8, D, device="cuda", dtype=F16)

    def step():
        for layer in range(layers):
            k[layer][:, :, n - 1] = new
            v[layer][:, :, n - 1] = new
            out = scaled_dot_product_attention(q, k[layer], v[layer], enable_gqa=True)
        return out

    with sdpa_kernel(BACKENDS["cudnn"]):
        us, out = median_us(step)
    return us, worst_row_error(out, q, k[-1], v[-1], False)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    results, wrong = [], []

    def report(name, peer, us, error):
        # E4M3 products round P to 3 bits, and XQA the queries; SageAttention rounds V too.
        if not error < (0.1 if "fp8" in peer or peer == "sage" else 5e-3):
            wrong.append(f"{name}: {peer}: relative L2 error {error:.1e}")
            return
        results.append({"name": f"{name} {peer}", "run_type": "iteration", "iterations": 25, "real_time": us, "time_unit": "us",
                        "rel_l2": error})
        if not options.json:
            print(f"{name:34} {peer:18} {us:10.2f} us  {error:.1e}", flush=True)

    for name, batch, q_heads, kv_heads, n_q, n_k, causal, *other in shapes(options.sweep):
        if options.only not in name:
            continue
        d = other[0] if other else D
        q = torch.randn(batch, q_heads, n_q, d, device="cuda", dtype=F16)
        k = torch.randn(batch, kv_heads, n_k, d, device="cuda", dtype=F16)
        v = torch.randn_like(k)
        for peer, make in peers_of(n_q).items():
            if d != D and peer.startswith("flashinfer"):
                continue
            try:
                call, stored = make(q, k, v, causal)
                us, out = median_us(call)
            except Exception as e:  # what a library does not offer, and the kinds in which it says so differ
                print(f"{name}: {peer}: {str(e).splitlines()[0]}", file=sys.stderr)
                continue
            report(name, peer, us, worst_row_error(out, *stored, causal))
    name = "step of 32 layers b16 h32/8 n32768"
    if not options.sweep and options.only in name:
        report(name, "cudnn", *step_of_32_layers())
    if options.json:
        libraries = [f"PyTorch {torch.__version__}"]
        libraries += [f"FlashInfer {flashinfer.__version__}"] if flashinfer else []
        libraries += ["FlashAttention-3"] if flash_attn_with_kvcache else []
        libraries += ["SageAttention 2"] if sageattn else []
        print(json.dumps({"context": {"library": ", ".join(libraries), "device": torch.cuda.get_device_name()},
                          "benchmarks": results}, indent=0))
    sys.exit("\n".join(wrong) or 0)


main()
