"""turboattention.transformers with the small language model of examples/tinylm, on its sample.txt or, where TA_TINYLM_TEXTS names a
folder, on the heldout.txt there. Eager attention is the reference.

Run by scripts/test-transformers, which installs PyTorch. On a GPU, too, where there is one and the library has CUDA.
"""

import json
import math
import os
import pathlib

import numpy as np
import pytest
import torch
import transformers

import turboattention as ta
import turboattention.transformers as tt

MODEL = pathlib.Path(__file__).resolve().parents[3] / "examples/tinylm/model"
transformers.utils.logging.disable_progress_bar()
HELD_OUT = "TA_TINYLM_TEXTS" in os.environ
TEXT = (pathlib.Path(os.environ["TA_TINYLM_TEXTS"]) / "heldout.txt" if HELD_OUT else MODEL / "sample.txt").read_bytes()
needs_held_out = pytest.mark.skipif(not HELD_OUT, reason="its prompts and bounds are those of the held-out text: TA_TINYLM_TEXTS")
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() and "cuda: no" not in ta.build_info() else [])


@pytest.fixture(scope="module", params=DEVICES)
def models(request):
    def load(name):
        model = transformers.LlamaForCausalLM.from_pretrained(MODEL, attn_implementation=name, dtype=torch.float32)
        model.generation_config.pad_token_id = 0
        return model.to(request.param).eval()

    return load("eager"), load("turboattention")


@pytest.fixture(autouse=True)
def options():
    tt.set_options(bits=8)
    yield
    tt.set_options()


def ids(*texts, device):
    """Padded on the left to one length; with its mask."""
    length = max(map(len, texts))
    rows = [[0] * (length - len(text)) + list(text) for text in texts]
    mask = [[0] * (length - len(text)) + [1] * len(text) for text in texts]
    return {"input_ids": torch.tensor(rows, device=device), "attention_mask": torch.tensor(mask, device=device)}


def generate(model, *texts, n=32, **options):
    inputs = ids(*texts, device=model.device)
    out = model.generate(**inputs, max_new_tokens=n, do_sample=False, **options)
    return [bytes(row) for row in out[:, inputs["input_ids"].shape[1]:].tolist()]


def bits_per_byte(model, windows, **options):
    """Of the first windows of 4096 bytes, fed in chunks of 512 bytes to an empty cache."""
    total = 0.0
    with torch.no_grad():
        for window in range(windows):
            tokens = torch.tensor([list(TEXT[window * 4096:(window + 1) * 4096])], device=model.device)
            cache = tt.TurboCache(model.config, **options) if options else None
            logits = []
            for at in range(0, 4096, 512):
                out = model(tokens[:, at:at + 512], cache=cache, use_cache=True)
                cache = out.cache
                logits.append(out.logits)
            scores = torch.cat(logits, 1)[0, :-1].log_softmax(-1)
            total -= scores.gather(1, tokens[0, 1:, None]).sum().item()
    return total / math.log(2) / (windows * 4095)


def test_the_text_is_that_of_eager_attention(models):
    eager, turbo = models
    for offset in range(0, 15_000, 3000):
        prompt = TEXT[offset:offset + 500]
        (got,), (want,) = generate(turbo, prompt, n=64), generate(eager, prompt, n=64)
        assert got[:16] == want[:16]
        same = len(os.path.commonprefix([got, want]))
        if same < 64:  # only where two bytes are nearly as likely
            with torch.no_grad():
                logits = eager(**ids(prompt + want[:same], device=eager.device)).logits[0, -1]
            print(f"\n{turbo.device.type}, prompt at {offset}: another text from byte {same} of 64 on, where eager attention's "
                  f"best logits are {(logits[want[same]] - logits[got[same]]).item():.4f} apart")
            assert logits[want[same]] - logits[got[same]] < 0.1


def test_bits_per_byte(models):
    eager, turbo = models
    windows = int(os.environ.get("TA_WINDOWS", 4))
    exact = bits_per_byte(eager, windows)
    for bits, within in ((8, 0.001), (4, 0.003), (2, 0.2)):
        got = bits_per_byte(turbo, windows, bits=bits)
        print(f"\n{turbo.device.type}, {windows} windows of 4096 bytes: eager {exact:.5f} bits per byte, turboattention at {bits} bits "
              f"{got:.5f} ({100 * (got / exact - 1):+.3f} %)")
        # Of a text of n bytes the perplexity is 2 ** bits per byte.
        assert abs(2 ** got / 2 ** exact - 1) < within
        assert got != exact


def test_batches_with_padding(models):
    eager, turbo = models
    texts = [TEXT[1000:1700], TEXT[5000:5041], TEXT[9000:9300]]
    together = generate(turbo, *texts)
    assert together == generate(eager, *texts)
    for text, of_batch in zip(texts, together):
        assert generate(turbo, text) == [of_batch]


def test_padding_is_never_stored(models):
    _, turbo = models
    cache = tt.TurboCache(turbo.config, bits=8)
    generate(turbo, TEXT[:300], TEXT[:17], n=5, cache=cache)
    assert [len(s) for s in cache.sequences] == [304, 21]
    assert cache.get_seq_length() == 304 and cache.pool.describe().bits == 8


def test_padding_on_the_right(models):
    """Logits of real tokens are those without padding."""
    _, turbo = models
    tokens = torch.tensor([list(TEXT[:100])], device=turbo.device)
    with torch.no_grad():
        alone = turbo(tokens, use_cache=True).logits
        padded = torch.cat([tokens, torch.zeros_like(tokens[:, :20])], 1)
        mask = (torch.arange(120, device=turbo.device) < 100).long()[None]
        assert torch.equal(turbo(padded, attention_mask=mask, use_cache=True).logits[:, :100], alone)


@needs_held_out
def test_beams(models):
    eager, turbo = models
    texts = [TEXT[1000:1300], TEXT[5000:5041]]
    for options in ({"num_beams": 4}, {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5}):
        assert generate(turbo, *texts, **options) == generate(eager, *texts, **options)


def test_sampling_and_returned_sequences(models):
    _, turbo = models
    inputs = ids(TEXT[:200], device=turbo.device)
    torch.manual_seed(1)
    out = turbo.generate(**inputs, max_new_tokens=8, do_sample=True, num_return_sequences=3)
    assert out.shape == (3, 208)


def test_a_cache_goes_on(models):
    """Turns of a conversation in one cache, then a crop: as one text."""
    eager, turbo = models
    prompt, more = TEXT[2000:2300], TEXT[7000:7100]
    cache = tt.TurboCache(turbo.config, bits=8)
    first = generate(turbo, prompt, n=10, cache=cache)[0]
    second = generate(turbo, prompt + first + more, n=20, cache=cache)
    assert second == generate(eager, prompt + first + more, n=20)
    assert cache.get_seq_length() == len(prompt + first + more) + 19
    cache.crop(-(len(more) + 19))
    assert [len(s) for s in cache.sequences] == [310] and generate(turbo, prompt + first + more, n=20, cache=cache) == second
    cache.reset()
    assert cache.get_seq_length() == 0 and generate(turbo, prompt, n=10, cache=cache)[0] == first


def test_rows_of_a_cache(models):
    _, turbo = models
    cache = tt.TurboCache(turbo.config, bits=8)
    with torch.no_grad():
        turbo(torch.tensor([list(TEXT[:64]), list(TEXT[64:128])], device=turbo.device), cache=cache)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 3]))
        assert len(cache.sequences) == 2 == cache.batch_size
        next_token = torch.tensor([[65], [65]], device=turbo.device)
        got = turbo(next_token, cache=cache).logits
        again = tt.TurboCache(turbo.config, bits=8)
        turbo(torch.tensor([list(TEXT[:64]), list(TEXT[64:128])], device=turbo.device), cache=again)
        assert torch.equal(turbo(next_token, cache=again).logits, got)


def test_without_a_cache(models):
    """Attention over plain tensors, padded or not."""
    eager, turbo = models
    inputs = ids(TEXT[:300], TEXT[:90], device=turbo.device)
    with torch.no_grad():
        want, got = (model(**inputs, use_cache=False).logits for model in (eager, turbo))
    real = inputs["attention_mask"].bool()
    assert (want[real] - got[real]).abs().max() < 0.5 and (want[real].argmax(-1) == got[real].argmax(-1)).float().mean() > 0.98
    assert generate(turbo, TEXT[:300], n=8, use_cache=False) == generate(eager, TEXT[:300], n=8)


def test_half_precision(models):
    eager, turbo = models
    for dtype in torch.bfloat16, torch.float16:
        half = transformers.LlamaForCausalLM.from_pretrained(MODEL, attn_implementation="turboattention", dtype=dtype).to(turbo.device)
        half.generation_config.pad_token_id = 0
        assert generate(half, TEXT[:300], n=4) == generate(eager, TEXT[:300], n=4)


def test_causality(models):
    """Later tokens change nothing before them."""
    _, turbo = models
    tokens = torch.tensor([list(TEXT[:200])], device=turbo.device)
    other = tokens.clone()
    other[:, 150:] = 65
    with torch.no_grad():
        for use_cache in True, False:
            a, b = (turbo(t, use_cache=use_cache).logits[:, :128] for t in (tokens, other))
            # Without a cache V has one scale for 64 tokens.
            assert torch.equal(a, b) if not use_cache else (a - b).abs().max() < 0.05


def test_a_pass_that_fails_leaves_the_cache_as_it_was(models):
    _, turbo = models
    cache = tt.TurboCache(turbo.config, bits=8)
    tokens = torch.tensor([list(TEXT[:100])], device=turbo.device)
    with torch.no_grad():
        turbo(tokens, cache=cache)
        hook = turbo.model.layers[3].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            turbo(tokens, cache=cache)
        hook.remove()
        assert cache.get_seq_length() == 100 and generate(turbo, TEXT[:130], n=4, cache=cache) == generate(turbo, TEXT[:130], n=4)


def test_what_cannot_work_is_refused(models):
    eager, turbo = models
    tokens = torch.tensor([list(TEXT[:10])], device=turbo.device)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="attn_implementation"):
            eager(tokens, cache=tt.TurboCache(turbo.config))
        with pytest.raises(NotImplementedError):
            turbo(tokens, attention_mask=torch.zeros(1, 1, 10, 10, device=turbo.device))
        cache = tt.TurboCache(turbo.config)
        turbo(tokens, cache=cache)
        with pytest.raises(ValueError):
            turbo(tokens.repeat(2, 1), cache=cache)
        with pytest.raises(NotImplementedError):
            turbo(torch.tensor([list(TEXT[:8])], device=turbo.device), position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]], device=turbo.device),
                  use_cache=False)
    with pytest.raises(NotImplementedError):
        tt.TurboCache(transformers.T5Config())


def small(name, attention, device):
    """A model of random weights whose layers differ."""
    shape = dict(vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=32, sliding_window=100, max_position_embeddings=2048, pad_token_id=0)
    windows = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = {
        "gemma3": lambda: transformers.Gemma3TextConfig(**shape, layer_types=windows),
        "gemma2": lambda: transformers.Gemma2Config(**shape, layer_types=windows, attn_logit_softcapping=2.0),
        "gemma3n": lambda: transformers.Gemma3nTextConfig(**shape | dict(intermediate_size=[96] * 6), layer_types=windows,
                                                          num_kv_shared_layers=2, hidden_size_per_layer_input=8, laurel_rank=8,
                                                          vocab_size_per_layer_input=256, activation_sparsity_pattern=[0.0] * 6),
        "gpt-oss": lambda: transformers.GptOssConfig(**shape, layer_types=windows, num_local_experts=2, num_experts_per_tok=2),
        "mistral": lambda: transformers.MistralConfig(**shape),
        "qwen3": lambda: transformers.Qwen3Config(**shape | dict(head_dim=48)),  # 64 channels in blocks; no windows
    }[name]()
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    return model.to(device).eval()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["gemma3", "gemma3n", "gpt-oss", "mistral", "qwen3"])
def test_layers_that_differ(name, device):
    """Logits are those of eager attention, over chunks and token by token; what windows have passed is given back."""
    tokens = torch.tensor([list(TEXT[:700]), list(TEXT[900:1600])], device=device)
    logits = []
    for attention in "eager", "turboattention":
        model, cache, got = small(name, attention, device), None, []
        if attention == "turboattention":
            cache = tt.TurboCache(model.config, bits=8)
        with torch.no_grad():
            for at, n in [(at, 128) for at in range(0, 640, 128)] + [(at, 1) for at in range(640, 700)]:
                out = model(tokens[:, at:at + n], cache=cache, use_cache=True)
                cache = out.cache
                got.append(out.logits)
        logits.append(torch.cat(got, 1))

    def off(a, b):
        return ((a - b).norm() / b.norm()).item()

    # With a window of 90 in place of 100 ten times as much.
    within = 0.06 if name == "gemma3n" else 0.025
    print(f"\n{device}, {name}: logits are off by {off(logits[1], logits[0]):.4f} of their norm")
    assert 0 < off(logits[1], logits[0]) < within
    passed, windows = cache.pool.stats().passed_blocks, name != "qwen3"
    assert (passed > 0) == windows
    with torch.no_grad():
        cache.crop(0)
        cache.crop(-64)
        again = model(tokens[:, 636:637], cache=cache).logits
        assert off(again, logits[0][:, 636:637]) < 2 * within
        if windows:
            with pytest.raises(ta.Error):
                cache.crop(-400)
            assert [len(s) for s in cache.sequences] == [637, 637] == [cache.get_seq_length()] * 2
        cache.reset()
        assert torch.equal(model(tokens[:, :128], cache=cache).logits, logits[1][:, :128])
        lengths = [5, 128]  # padded on the left
        mask = torch.tensor([[0] * (128 - n) + [1] * n for n in lengths], device=device)
        cache.reset()
        padded = model(tokens[:, :128], attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(0), cache=cache).logits
        assert torch.equal(padded[1], logits[1][1, :128]) and [len(s) for s in cache.sequences] == lengths
    tt.release_pools()


def kl_from_8_bits(model, tokens, **options):
    """In bits per token, of the predictions with these bits from those with 8; fed in chunks of 64."""
    scores = []
    with torch.no_grad():
        for of in {"bits": 8}, options:
            cache, logits = tt.TurboCache(model.config, **of), []
            for at in range(0, tokens.shape[1], 64):
                logits.append(model(tokens[:, at:at + 64], cache=cache, use_cache=True).logits[0])
            scores.append(torch.cat(logits).double().log_softmax(-1))
    return ((scores[0].exp() * (scores[0] - scores[1])).sum(-1).mean() / math.log(2)).item()


@needs_held_out
def test_what_bits_cost(models):
    """Estimates are near what single heads cost, in the last layer within a quarter, and so is their sum over the map that they choose."""
    _, turbo = models
    texts = [list(TEXT[at:at + 2048]) for at in range(0, 4 * 2048, 2048)]
    costs = tt.bit_costs(turbo, texts)
    assert costs.k.shape == costs.v.shape == (6, 2, 3) and costs.tokens == 4 * 2048
    assert (costs.k[..., 0] == 0).all() and (costs.k[..., 1] > 0).all() and (costs.k[..., 2] > costs.k[..., 1]).all()
    assert all(p.requires_grad for p in turbo.parameters())
    tokens = torch.tensor(texts[:2], device=turbo.device)

    def measured(k_bits, v_bits):
        return sum(kl_from_8_bits(turbo, row[None], k_bits=k_bits, v_bits=v_bits) for row in tokens) / len(tokens)

    for tensor, of_tensor in ("k", costs.k), ("v", costs.v):
        order = of_tensor[..., 2].ravel().argsort()
        last = 10 + of_tensor[5, :, 2].argmax()  # nothing but its own layer comes after it
        for unit in order[0], order[-1], last:
            maps = {"k_bits": [[8] * 2 for _ in range(6)], "v_bits": [[8] * 2 for _ in range(6)]}
            maps[f"{tensor}_bits"][unit // 2][unit % 2] = 2
            want, got = measured(**maps), of_tensor[unit // 2, unit % 2, 2]
            print(f"\n{turbo.device.type}: 2 bits for {tensor} of layer {unit // 2}, head {unit % 2}: {got:.6f}, measured {want:.6f}")
            # Any change makes later layers round otherwise, which costs up to 1e-4 by itself, whatever the change.
            assert 0.4 * (want - 1e-4) < got < 1.6 * want
            if unit == last:
                assert 0.8 < got / want < 1.25
    assert (costs.choose(8)[0] == 8).all() and (costs.choose(2)[1] == 2).all()
    k_bits, v_bits = costs.choose(3)
    assert np.concatenate([k_bits, v_bits]).mean() <= 3.2
    best, worst = measured(k_bits, v_bits), measured(6 - k_bits.clip(2, 4), 6 - v_bits.clip(2, 4))
    estimate, error = costs.cost_of(k_bits, v_bits)
    print(f"\n{turbo.device.type}: KL of the map {best:.5f}, estimated {estimate:.5f} +- {error:.5f}, of its complement {worst:.5f}")
    assert 0 < error < 0.2 * estimate and len(costs.block_tokens) == 32
    assert (costs.v_error[..., 0] == 0).all() and (0 < costs.v_error[..., 1:]).all()
    assert 0.5 < estimate / best < 1.3
    assert best < 0.5 * worst
    tt.release_pools()


def test_errors_of_costs(tmp_path):
    """Errors of sums come from sums of blocks: K and V that err in opposite ways cost 4 in every block."""
    k = np.zeros((1, 1, 3, 2), np.float32)
    k[..., 2, :] = 1, 3
    costs = tt.BitCosts(k.mean(-1), k.mean(-1), 64, 512, np.array([256, 256]), k, k[..., ::-1])
    assert costs.k_error.tolist() == costs.v_error.tolist() == [[[0, 0, 1]]]
    assert costs.cost_of([[2]], [[8]]) == (2, 1) and costs.cost_of([[2]], [[2]]) == (4, 0)
    # Of four blocks each two neighbours together, the last and the first, too: they are off the mean by -4, 0, 4, 0 blocks.
    alike = np.zeros((1, 1, 3, 4), np.float32)
    alike[..., 2, :] = 3, 3, 7, 7
    of_four = tt.BitCosts(alike.mean(-1), alike.mean(-1), 64, 1024, np.array([256] * 4), alike, alike)
    np.testing.assert_allclose(of_four.k_error, [[[0, 0, np.sqrt(2)]]])
    costs.k[0, 0, 0] = np.inf
    costs.save(tmp_path / "costs")
    saved = json.loads((tmp_path / "costs").read_text())
    assert saved["block_tokens"] == [256, 256] and saved["k_blocks"] == [[[None, None, [1, 3]]]]
    with pytest.raises(ValueError, match="no blocks"):
        tt.BitCosts(costs.k, costs.v, 64, 512).k_error


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt-oss", "mistral", "qwen3"])
def test_costs_come_of_exact_attention(name):
    """Windows, sinks and soft caps are those of the model."""
    tokens = torch.tensor([list(TEXT[:400])])
    model = small(name, "turboattention", "cpu")
    with torch.no_grad():
        want = small(name, "eager", "cpu")(tokens).logits
        tt._passes.costs = tt._Costing(None)
        tt._passes.costs.begin(400)
        try:
            got = model(tokens, use_cache=False).logits
        finally:
            tt._passes.costs = None
    assert torch.allclose(got, want, atol=2e-5)
    # The library is asked for the same.
    torch.manual_seed(6)
    q, k, v = torch.randn(1, 4, 300, 32), torch.randn(1, 2, 300, 32), torch.randn(1, 2, 300, 32)
    options = {"mask": ta.Mask.CAUSAL, "scale": 0.3, "window": 100, "softcap": 2.0, "sinks": torch.tensor([0.5, 1.0, -1.0, 0.0])}
    exact = tt._exact(q, k, v, 0, options)[0]
    library = tt._Costing(None)._library("k", 8, *(x[0].transpose(0, 1).contiguous() for x in (q, k, v)), options)
    assert ((library - exact).norm() / exact.norm()).item() < 0.02
    costs = tt.bit_costs(model, tokens)
    assert np.isfinite(costs.k).all() and (costs.v[..., 2] > 0).all()


def test_costs_that_cannot_be_measured(models):
    eager, turbo = models
    with pytest.raises(NotImplementedError, match="attn_implementation"):
        tt.bit_costs(eager, [list(TEXT[:300])])
    with pytest.raises(NotImplementedError, match="of their own"):
        tt.bit_costs(small("gemma3n", "turboattention", turbo.device), [list(TEXT[:300])])
    for texts in [], [[1] * 255], [[[1, 2]] * 300]:
        with pytest.raises(ValueError):
            tt.bit_costs(turbo, texts)
    with pytest.raises(ValueError, match="together"):
        tt.TurboCache(turbo.config, k_bits=[[4, 4]] * 6)
    with pytest.raises(NotImplementedError, match="eval"):
        tt.bit_costs(turbo.train(), [list(TEXT[:300])])
    turbo.eval()
    nothing = tt.BitCosts(np.zeros((6, 2, 3), np.float32), np.zeros((6, 2, 3), np.float32), 64, 0)
    for bits in 1.9, 8.1, float("nan"):
        with pytest.raises(ValueError, match="2 to 8"):
            nothing.choose(bits)
    assert all(p.requires_grad for p in turbo.parameters())
    assert generate(turbo, TEXT[:100], n=4) == generate(eager, TEXT[:100], n=4)  # nothing is left behind


def test_caches_share_a_pool_by_what_their_options_say(models):
    _, turbo = models

    def pool(number):
        cache = tt.TurboCache(turbo.config, numerics=ta.Numerics(k_offset=np.full((6, 2, 64), number)))
        generate(turbo, TEXT[:70], n=1, cache=cache)
        return cache.pool

    first = pool(0)
    for number in 1, 2, 3:
        assert (pool(number).describe().numerics.k_offset == number).all()
    assert pool(0) is first and pool(np.float32(1)) is pool(1)
    tt.release_pools()


def test_tiers(models):
    """Most of the cache in host memory: the same text."""
    eager, turbo = models
    cache = tt.TurboCache(turbo.config, bits=8, budget_bytes=2 << 20, tiers=ta.Tiers(host_bytes=16 << 20))
    assert generate(turbo, TEXT[:3000], n=20, cache=cache, prefill_chunk_size=256) == generate(eager, TEXT[:3000], n=20)
    assert cache.sequences[0].residency().host_blocks > 20
    tt.release_pools()
