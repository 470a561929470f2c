"""The model of examples/tinylm in numpy, with exchangeable attention, and what is measured on it: bits per byte, KL to exact, retrieval.

The C++ program computes the same, so its `tinylm eval` is the judge of this file (tests/test_tinylm.py).
"""

import json
import math
import os
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

MODEL = Path(__file__).parents[2] / "examples/tinylm/model"
WINDOW = 4096
BLOCK = 256  # positions of one mean; single positions of a text are correlated


class Model:
    """A LlamaForCausalLM whose tokens are bytes, in float32. Attention is what the caller passes to forward."""

    def __init__(self, folder=MODEL):
        config = json.loads((Path(folder) / "config.json").read_text())
        self.layers, self.heads, self.kv_heads = (config[f"num_{name}"] for name in
                                                  ("hidden_layers", "attention_heads", "key_value_heads"))
        self.head_dim = config["head_dim"]
        self.eps = np.float32(config["rms_norm_eps"])
        theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        self.frequency = float(theta) ** (-np.arange(self.head_dim // 2) / (self.head_dim // 2))
        self.weights = {name: w.astype(np.float32) for name, w in load_file(Path(folder) / "model.safetensors").items()}

    def forward(self, tokens, first, attend):
        """Hidden states [n, hidden] of tokens uint8 [n] at the positions from `first` on.

        attend(layer, q [n, heads, head_dim], k [n, kv_heads, head_dim], v) gives [n, heads, head_dim].
        """
        x = self.weights["model.embed_tokens.weight"][tokens]
        angle = np.outer(np.arange(first, first + len(tokens)), self.frequency)
        cos, sin = np.cos(angle).astype(np.float32)[:, None], np.sin(angle).astype(np.float32)[:, None]
        for layer in range(self.layers):
            def w(name):
                return self.weights[f"model.layers.{layer}.{name}.weight"]

            h = self._normalise(x, w("input_layernorm"))
            q, k, v = ((h @ w(f"self_attn.{name}_proj").T).reshape(len(tokens), -1, self.head_dim) for name in "qkv")
            out = attend(layer, _turn(q, cos, sin), _turn(k, cos, sin), v)
            x = x + out.reshape(len(tokens), -1) @ w("self_attn.o_proj").T
            h = self._normalise(x, w("post_attention_layernorm"))
            gate = h @ w("mlp.gate_proj").T
            gate *= 1 / (1 + np.exp(-gate))
            x = x + (gate * (h @ w("mlp.up_proj").T)) @ w("mlp.down_proj").T
        return self._normalise(x, self.weights["model.norm.weight"])

    def logits(self, hidden):
        return hidden @ self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"]).T

    def _normalise(self, x, weight):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.eps) * weight


def _turn(x, cos, sin):
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def predict(model, attention, tokens):
    """Logits [len(tokens) - 1, 256] for the bytes after the first, each given all bytes before it, from an empty cache."""
    attention.reset()
    hidden = []
    for at in range(0, len(tokens), attention.chunk):
        part = tokens[at:at + attention.chunk]
        with attention.step(at, len(part)) as attend:
            hidden.append(model.forward(part, at, attend))
    return model.logits(np.concatenate(hidden)[:-1])


def log_softmax(logits):
    logits = logits.astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def kl_bits(exact, logits):
    """KL(exact || logits) of each row in bits."""
    p, q = log_softmax(exact), log_softmax(logits)
    return (np.exp(p) * (p - q)).sum(axis=-1) / np.log(2)


def loss_bits(logits, tokens):
    """-log2 p of each byte after the first."""
    return -np.take_along_axis(log_softmax(logits), tokens[1:, None].astype(np.int64), axis=-1)[:, 0] / np.log(2)


def mean_and_error(windows):
    """Mean over all positions of a list of windows, and its standard error from runs of neighbouring blocks of BLOCK positions
    (docs/numerics.md, section 5); a block ends with its window. Blocks weigh as many positions as they have."""
    blocks = [w[at:at + BLOCK] for w in windows for at in range(0, len(w), BLOCK)]
    sums, counts = np.array([b.sum() for b in blocks]), np.array([len(b) for b in blocks])
    mean, n = sums.sum() / counts.sum(), len(blocks)
    if n < 2:
        return float(mean), np.inf
    off, run = sums - counts * mean, math.isqrt(n)
    runs = sum(np.roll(off, -i) for i in range(run))
    return float(mean), float(np.sqrt((runs**2).sum() / run * n / (n - run)) / counts.sum())


def read_windows(path, count, size=WINDOW):
    text = np.frombuffer(Path(path).read_bytes()[:count * size], np.uint8)
    size = min(size, len(text))
    return [text[i * size:(i + 1) * size] for i in range(len(text) // size)]


def read_prompts(path, limit):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file][:limit]


def answers_found(model, attention, prompts):
    """Share of the prompts whose every answer byte is the likeliest one."""
    found = 0
    for prompt in prompts:
        tokens = np.frombuffer((prompt["prompt"] + prompt["answer"]).encode(), np.uint8)
        length = len(prompt["answer"].encode())
        found += bool(np.array_equal(predict(model, attention, tokens)[-length:].argmax(axis=-1), tokens[-length:]))
    return found / len(prompts)


def add_options(parser):
    texts = os.environ.get("TA_TINYLM_TEXTS")
    parser.add_argument("--text", type=Path, default=Path(texts) / "heldout.txt" if texts else MODEL / "sample.txt",
                        help="default: heldout.txt in the folder TA_TINYLM_TEXTS, else the model's sample.txt")
    parser.add_argument("--windows", type=int, default=5, help=f"of {WINDOW} bytes of the text (5)")
    parser.add_argument("--prompts", type=Path, default=MODEL / "retrieval.jsonl")
    parser.add_argument("--limit", type=int, default=12, help="prompts (12)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")


def texts(options):
    """Windows and prompts"""
    if options.short:
        return read_windows(options.text, 1, 1024), read_prompts(options.prompts, 1)
    return read_windows(options.text, options.windows), read_prompts(options.prompts, options.limit)
