"""Hugging Face models on the compressed cache, by naming it::

    import turboattention.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="turboattention")
    model.generate(**inputs)                                    # keys and values at 4 bits
    model.generate(**inputs, cache=TurboCache(model.config, bits=8))

Importing this module registers the name: an attention function, the mask function that goes with it, and caches: a ``DynamicCache``
that is made for a config of this name keeps its keys and values in a pool of turboattention, with the options of ``set_options``.

Batches with padding on any side, beams, ``crop`` (assisted generation) and continued caches work. So do models whose layers differ
(Gemma 3, gpt-oss, Mistral). Layers with sliding windows keep the last tokens alone: ``crop`` removes up to 64 tokens, and more where no
window has passed what is needed. With ``falling_precision`` or universal open scales they keep all. Layers may have kv heads and
head_dims of their own, up to 256 channels. Those that take the keys and values of an earlier layer (Gemma 3n) keep nothing.

Tokens that the attention mask leaves out are never stored. For inference: there is no backward pass, no dropout, and no weights of
attention. Models with other masks (prefix LMs, packed sequences, chunked attention, masks of four axes), cross-attention or states that
are no keys and values are refused.

Without such a cache attention is ``Context.attend_dense``: keys and values are quantized to 8 bits on the way.

``bit_costs`` says which heads bear few bits, from a forward and a backward pass over some texts::

    costs = bit_costs(model, texts)
    k_bits, v_bits = costs.choose(3)  # on average
    model.generate(**inputs, cache=TurboCache(model.config, k_bits=k_bits, v_bits=v_bits))
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, get_layer_types_and_kwargs

from . import Context, Device, LayerGroup, Mask, Numerics, OpenScale, Pool, Sequence, Step, Tiers

__all__ = ["BitCosts", "TurboCache", "TurboLayer", "bit_costs", "release_pools", "set_options"]

NAME = "turboattention"


class _Passes(threading.local):
    """Of each thread."""

    open: _Store | None = None  # whose pass through the model has begun
    costs: _Costing | None = None  # of bit_costs


_passes = _Passes()
_lock = threading.Lock()
_contexts: dict[tuple, Context] = {}
_pools: dict[tuple, Pool] = {}


@dataclass(frozen=True)
class _Options:
    """Values: pools are found by them."""

    bits: int = 4
    budget_bytes: int | None = None
    numerics: Numerics | None = None  # without k_offset
    k_offset: tuple[tuple[int, ...], bytes] | None = None  # shape and float32 numbers
    tiers: Tiers | None = None
    k_bits: tuple[tuple[int, ...], ...] | None = None  # [layers][kv_heads]
    v_bits: tuple[tuple[int, ...], ...] | None = None

    @classmethod
    def of(cls, bits, budget_bytes, numerics, tiers, k_bits, v_bits) -> _Options:
        if (k_bits is None) != (v_bits is None):
            raise ValueError("k_bits and v_bits are given together")
        maps = (None if b is None else tuple(tuple(map(int, layer)) for layer in b) for b in (k_bits, v_bits))
        offset = None
        if numerics is not None and numerics.k_offset is not None:
            array = np.asarray(numerics.k_offset, np.float32)
            numerics, offset = replace(numerics, k_offset=None), (array.shape, array.tobytes())
        return cls(bits, budget_bytes, numerics, offset, tiers, *maps)

    def all_numerics(self) -> Numerics | None:
        """Of ``Context.create_pool``."""
        if self.numerics is None or self.k_offset is None:
            return self.numerics
        shape, numbers = self.k_offset
        return replace(self.numerics, k_offset=np.frombuffer(numbers, np.float32).reshape(shape))


_options = _Options()


def set_options(*, bits: int = 4, budget_bytes: int | None = None, numerics: Numerics | None = None, tiers: Tiers | None = None,
                k_bits=None, v_bits=None) -> None:
    """Sets how caches made from now on keep their keys and values, unless they get options of their own.

    Args:
        bits: 8, 4 or 2
        budget_bytes: of a pool's device tier. None: on a CPU the memory of the machine, taken as it is needed; on a GPU a half of
            what is free, taken at once. All caches of models of the same shape with the same options share a pool
        numerics, tiers: as for ``Context.create_pool``
        k_bits, v_bits: [layers, kv_heads], each 8, 4 or 2, in place of bits; for models whose layers have one shape
    """
    global _options
    _options = _Options.of(bits, budget_bytes, numerics, tiers, k_bits, v_bits)


def release_pools() -> None:
    """Forgets the pools that caches share; the memory goes when the caches do."""
    with _lock:
        _pools.clear()


def _context(device: torch.device) -> Context:
    """One for each device and process: a child of fork makes its own."""
    index = (device.index or 0) if device.type == "cuda" else 0
    key = os.getpid(), device.type, index
    with _lock:
        if key not in _contexts:
            if device.type == "cuda":
                _contexts[key] = Context(device=Device.CUDA, device_ordinal=index)
            elif device.type == "cpu":
                _contexts[key] = Context(threads=torch.get_num_threads())
            else:
                raise ValueError(f"turboattention computes on CPUs and on NVIDIA GPUs, not on {device.type!r}")
        return _contexts[key]


@dataclass(frozen=True)
class _Shape:
    """Of a layer: kv heads, channels, and how many tokens its queries see (0: all)."""

    kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int


def _groups(shapes: tuple[_Shape, ...]) -> list[LayerGroup]:
    """The layers that are not as the pool says: it has the first one's shape and no window."""
    pools = _Shape(shapes[0].kv_heads, shapes[0].head_dim, shapes[0].v_head_dim, 0)
    return [LayerGroup(first=i, layers=1, window=s.window, kv_heads=s.kv_heads, head_dim=s.head_dim, v_head_dim=s.v_head_dim)
            for i, s in enumerate(shapes) if s != pools]


def _pool(device: torch.device, shapes: tuple[_Shape, ...], options: _Options) -> Pool:
    context = _context(device)
    key = os.getpid(), device, shapes, options
    with _lock:
        if key not in _pools:
            budget = options.budget_bytes
            if budget is None and device.type == "cuda":
                budget = torch.cuda.mem_get_info(device)[0] // 2
            elif budget is None:
                budget = os.sysconf("SC_PAGESIZE") * os.sysconf("SC_PHYS_PAGES")
            _pools[key] = context.create_pool(layers=len(shapes), kv_heads=shapes[0].kv_heads, head_dim=shapes[0].head_dim,
                                              v_head_dim=shapes[0].v_head_dim, budget_bytes=budget, numerics=options.all_numerics(),
                                              tiers=options.tiers, layer_groups=_groups(shapes), **_bits(options))
        return _pools[key]


def _bits(options: _Options) -> dict[str, Any]:
    """Of ``Context.create_pool``."""
    if options.k_bits is None:
        return {"bits": options.bits}
    return {"k_bits": np.array(options.k_bits, np.uint8), "v_bits": np.array(options.v_bits, np.uint8)}


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


@dataclass
class _Rows:
    """The tokens of [batch, tokens] that count: those the attention mask does not leave out."""

    counts: list[int]
    keep: torch.Tensor | None  # [batch, tokens] bool; None: all

    @classmethod
    def of(cls, batch: int, tokens: int, mask: torch.Tensor | None) -> _Rows:
        if mask is None:
            return cls([tokens] * batch, None)
        if mask.ndim != 2:
            raise NotImplementedError(f"turboattention takes attention masks of [batch, tokens], not of {mask.ndim} axes")
        keep = mask[:, -tokens:].bool()
        counts = keep.sum(-1).tolist()
        return cls(counts, None if counts == [tokens] * batch else keep)

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, heads, tokens, head_dim] -> [tokens that count, heads, head_dim]"""
        x = x.detach().transpose(1, 2)
        return x.flatten(0, 1) if self.keep is None else x[self.keep]

    def unpack(self, packed: torch.Tensor, batch: int, tokens: int) -> torch.Tensor:
        """-> [batch, tokens, heads, head_dim], zeros elsewhere"""
        if self.keep is None:
            return packed.view(batch, tokens, *packed.shape[1:])
        out = packed.new_zeros(batch, tokens, *packed.shape[1:])
        out[self.keep] = packed
        return out


@dataclass
class _Store:
    """What the layers of a cache share: a sequence for each row of the batch, and the step of a forward pass."""

    shapes: tuple[_Shape, ...]  # of the layers that keep keys and values
    attends: int  # layers of the model that attend
    options: _Options
    seen: int = 0  # tokens of each row, padding included
    sequences: list[Sequence] = field(default_factory=list)
    pool: Pool | None = None
    plan: Any = None
    step: Step | None = None
    rows: _Rows | None = None
    next_layer: int = 0  # to be appended
    attended: int = 0  # layers of the model in this pass
    waiting: int | None = None  # the layer that got keys and values, and no attention yet

    def update(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        if self.waiting is not None and layer != 0:
            raise RuntimeError(f"keys and values went into a cache of turboattention, and the model attends by other means: load it "
                               f"with attn_implementation={NAME!r}")
        self.waiting = layer
        if self.pool is None:
            self.pool = _pool(k.device, self._shapes_of(k, v), self.options)
            self.plan = self.pool.create_plan()
            self.sequences = [self.pool.create_sequence() for _ in range(k.shape[0])]
        if len(self.sequences) != k.shape[0]:
            raise ValueError(f"the cache has {len(self.sequences)} rows and the batch {k.shape[0]}")

    def _shapes_of(self, k: torch.Tensor, v: torch.Tensor) -> tuple[_Shape, ...]:
        """The shape of the first layer holds for all layers that are like it by the config. If there are several ranks, a rank has
        a part of the heads."""
        first, heads = self.shapes[0], k.shape[1]
        windows = not (self.options.tiers and self.options.tiers.falling_precision) and not (
            self.options.numerics and self.options.numerics.open_scale == OpenScale.UNIVERSAL)
        return tuple(
            _Shape(heads, k.shape[3], v.shape[3], s.window * windows) if replace(s, window=first.window) == first else
            replace(s, kv_heads=max(1, s.kv_heads * heads // first.kv_heads), window=s.window * windows) for s in self.shapes)

    def attend(self, layer: int, q, k, v, mask, options) -> torch.Tensor:
        batch, _, tokens, _ = q.shape
        if layer == 0 and self.waiting == 0:
            if self.step is not None:  # a pass that an error ended
                self.step.abort()
                self.step = None
            self.next_layer = self.attended = 0
            self.rows = _Rows.of(batch, tokens, mask)
            if q.device.type == "cuda":
                self.plan.set_stream(_stream(q.device))
            self.step = self.plan.step(self.sequences, self.rows.counts)
            _passes.open = self
        elif self.step is None or layer > self.next_layer:
            raise RuntimeError(f"layer {layer} attends out of turn; layer {self.next_layer} is next")
        if tokens != k.shape[2]:
            raise NotImplementedError("a layer that takes keys and values of an earlier one has fewer queries than that one")
        packed = self.rows.pack(q)
        out = torch.empty((*packed.shape[:2], v.shape[3]), dtype=q.dtype, device=q.device)
        if layer == self.next_layer:  # else these are the keys and values of an earlier layer
            self.step.append(layer, self.rows.pack(k), self.rows.pack(v))
            self.next_layer += 1
        self.step.attend(layer, packed, out, **options)
        self.waiting = None
        self.attended += 1
        if self.attended == self.attends:
            step, self.step, _passes.open = self.step, None, None
            step.end()
            self.seen += tokens
        return self.rows.unpack(out, batch, tokens)

    def select(self, indices: list[int]) -> None:
        """Row i becomes what row indices[i] was. Rows that are taken twice share their blocks."""
        old, taken = self.sequences, set()
        self.sequences = [old[i].fork() if i in taken or taken.add(i) else old[i] for i in indices]

    def crop(self, tokens: int) -> None:
        if tokens == 0:
            return
        # All rows or none: windows may have passed what one needs.
        several = len(self.sequences) > 1 and any(s.window for s in self.shapes)
        cropped = [sequence.fork() for sequence in self.sequences] if several else self.sequences
        for sequence in cropped:
            sequence.truncate(max(0, len(sequence) - tokens))
        self.sequences = cropped
        self.seen = max(0, self.seen - tokens)

    def reset(self) -> None:
        if self.step is not None:
            self.step.abort()
        self.step, self.waiting, self.seen = None, None, 0
        for sequence in self.sequences:
            sequence.truncate(0)


class TurboLayer(CacheLayerMixin):
    """A layer of a cache in a pool of turboattention. Made by ``TurboCache``: the layers of a model belong together. `index` is None
    where the model's layer keeps no keys and values of its own."""

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, store: _Store, index: int | None):
        super().__init__()
        self.store, self.index = store, index

    @property
    def batch_size(self) -> int:
        return len(self.store.sequences) or -1

    def lazy_initialization(self, key_states, value_states) -> None:
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        """Hands the new keys and values on to the attention function, which knows what is padding."""
        self.lazy_initialization(key_states, value_states)
        self.store.update(self.index, key_states, value_states)
        key_states = key_states.view_as(key_states)  # an object of its own
        key_states.turboattention_layer = self
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.store.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.store.seen

    def get_max_length(self) -> int:
        return -1

    # What concerns all layers is done once, by the first.

    def reset(self) -> None:
        if self.index == 0:
            self.store.reset()

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError("crop takes the tokens to remove as a negative number")
        if self.index == 0:
            self.store.crop(-tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        if self.index == 0:
            self.store.select(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.index == 0:
            self.store.select(torch.arange(len(self.store.sequences))[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.index == 0:
            self.store.select([i for i in range(len(self.store.sequences)) for _ in range(repeats)])

    def offload(self) -> None:
        raise NotImplementedError("blocks of turboattention move by tiers: set_options(tiers=...)")

    prefetch = offload


def _layers(config: PreTrainedConfig, options: _Options) -> list[TurboLayer]:
    config = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise NotImplementedError("turboattention has no cross-attention")
    kinds, arguments = get_layer_types_and_kwargs(config)
    shapes: list[_Shape] = []
    indices: list[int | None] = []  # [layers of the model] of shapes
    for kind, of_kind, layer in zip(kinds, arguments, config.per_layer_config):
        if kind not in ("full_attention", "sliding_attention", "dummy"):
            raise NotImplementedError(f"turboattention has no layers of {kind!r}")
        indices.append(None if kind == "dummy" else len(shapes))
        if kind == "dummy":
            continue
        heads = layer.num_attention_heads
        head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        if head_dim > 256 or getattr(layer, "kv_lora_rank", None):
            raise NotImplementedError("turboattention takes head_dims up to 256, and keys that are no part of a latent")
        shapes.append(_Shape(getattr(layer, "num_key_value_heads", None) or heads, head_dim,
                             getattr(layer, "v_head_dim", None) or head_dim, of_kind.get("sliding_window") or 0))
    shared = (getattr(config, "kv_sharing_modes", None) or []).count("reuse")
    store = _Store(tuple(shapes), len(shapes) + shared, options)
    return [TurboLayer(store, index) for index in indices]


class TurboCache(Cache):
    """A cache for ``attn_implementation="turboattention"`` with options of its own.

    Args:
        config: the model's
        bits, budget_bytes, numerics, tiers, k_bits, v_bits: as for ``set_options``
    """

    def __init__(self, config: PreTrainedConfig, *, bits: int = 4, budget_bytes: int | None = None,
                 numerics: Numerics | None = None, tiers: Tiers | None = None, k_bits=None, v_bits=None):
        super().__init__(layers=_layers(config, _Options.of(bits, budget_bytes, numerics, tiers, k_bits, v_bits)))

    @property
    def pool(self) -> Pool | None:
        """Where keys and values are; None before the first token."""
        return self.layers[0].store.pool

    @property
    def sequences(self) -> list[Sequence]:
        """One for each row of the batch."""
        return self.layers[0].store.sequences


def attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
              scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None, softcap: float | None = None,
              is_causal: bool | None = None, s_aux: torch.Tensor | None = None, **kwargs) -> tuple[torch.Tensor, None]:
    """The attention function: query [batch, heads, tokens, head_dim], out [batch, tokens, heads, head_dim]."""
    if dropout:
        raise NotImplementedError("turboattention is for inference: dropout is not 0")
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    options: dict[str, Any] = {"mask": Mask.CAUSAL if causal else Mask.FULL}
    if scaling is not None:
        options["scale"] = scaling
    if softcap:
        options["softcap"] = softcap
    if sliding_window:
        options["window"] = sliding_window
    if s_aux is not None:
        options["sinks"] = s_aux.detach().float().contiguous()
    if _passes.costs is not None:
        if getattr(module, "is_kv_shared_layer", False):
            raise NotImplementedError("bit_costs takes models whose layers have keys and values of their own")
        return _passes.costs.attend(query, key, value, options), None
    layer = getattr(key, "turboattention_layer", None)
    if layer is not None:
        return layer.store.attend(layer.index, query, key, value, attention_mask, options), None
    if not getattr(module, "is_kv_shared_layer", False):
        _passes.open = None
    elif _passes.open is not None:
        raise NotImplementedError("keys and values of an earlier layer of a cache came on another device")

    batch, _, tokens, _ = query.shape
    of_q, of_k = _Rows.of(batch, tokens, attention_mask), _Rows.of(batch, key.shape[2], attention_mask)
    packed = of_q.pack(query)
    out = torch.empty(packed.shape, dtype=query.dtype, device=query.device)
    _context(query.device).attend_dense(packed, of_k.pack(key), of_k.pack(value), out, q_offsets=_offsets(of_q.counts),
                                        k_offsets=_offsets(of_k.counts), stream=_stream(query.device), **options)
    return of_q.unpack(out, batch, tokens), None


def _offsets(counts: list[int]) -> list[int]:
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    return offsets


def mask(*, attention_mask: torch.Tensor | None = None, allow_is_causal_skip: bool = True, use_vmap: bool = False,
         **kwargs) -> torch.Tensor | None:
    """The mask function: returns only the padding, since the library masks later tokens. Other masks are refused. transformers
    calls it by keyword; the sizes and offsets among these are not needed."""
    if use_vmap or not allow_is_causal_skip:
        raise NotImplementedError("turboattention masks by causality, windows and padding; this model or call wants another mask")
    return attention_mask


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)

_dynamic_cache_init = DynamicCache.__init__


def _init_dynamic_cache(self, ddp_cache_data=None, config=None, *args, **kwargs) -> None:
    named = config is not None and config.get_text_config(decoder=True)._attn_implementation == NAME
    if not named or ddp_cache_data is not None:
        _dynamic_cache_init(self, ddp_cache_data, config, *args, **kwargs)
    elif kwargs.get("offloading") or any(args):
        raise NotImplementedError("blocks of turboattention move by tiers: set_options(tiers=...)")
    else:
        Cache.__init__(self, layers=_layers(config, _options))


# generate() and models make their caches themselves, by this class and their config.
DynamicCache.__init__ = _init_dynamic_cache


# What bits cost -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BitCosts:
    """What keys and values of single heads cost with fewer bits than 8: how far a model's predictions are, with fewer bits in this
    head alone, from those with
    8 bits in all heads, as KL in bits per token. An estimate: see ``bit_costs``."""

    k: np.ndarray  # float32 [layers, kv_heads, 3]: with 8 bits (0), 4, 2
    v: np.ndarray
    head_dim: int
    tokens: int  # of the texts that it comes from
    block_tokens: np.ndarray | None = None  # [blocks]: of 256 tokens or, at the end of a text, fewer; None: errors are not known
    k_blocks: np.ndarray | None = None  # float32 [layers, kv_heads, 3, blocks]: the costs in each block
    v_blocks: np.ndarray | None = None

    @property
    def k_error(self) -> np.ndarray:
        """Standard errors of k, from runs of neighbouring blocks, since places near each other are correlated. Infinite for one block."""
        return self._error(self.k_blocks)

    @property
    def v_error(self) -> np.ndarray:
        """Standard errors of v."""
        return self._error(self.v_blocks)

    def cost_of(self, k_bits, v_bits) -> tuple[float, float]:
        """What maps cost, in bits per token, and the standard error of that, from the sums of blocks. Heads that cost much in the
        same places add to it. The error says how well the texts are sampled, not how good the estimate is."""
        cost, blocks = 0.0, 0.0
        for bits, costs, of_blocks in (k_bits, self.k, self.k_blocks), (v_bits, self.v, self.v_blocks):
            at = np.select([np.asarray(bits) == b for b in (8, 4, 2)], [0, 1, 2])[..., None]
            cost += float(np.take_along_axis(costs, at, 2).sum(dtype=np.float64))
            if of_blocks is not None:
                blocks = blocks + np.take_along_axis(of_blocks, at[..., None], 2).sum((0, 1, 2), dtype=np.float64)
        return cost, float(self._error(blocks))

    def _error(self, means) -> np.ndarray:
        if self.block_tokens is None:
            raise ValueError("these costs have no blocks, so their errors are not known")
        weights, n = self.block_tokens / self.block_tokens.sum(), len(self.block_tokens)
        if n < 2:
            return np.full(np.shape(means)[:-1], np.inf)
        means = np.asarray(means, np.float64)
        off = weights * (means - (weights * means).sum(-1, keepdims=True))
        run = math.isqrt(n)  # docs/numerics.md, section 5
        runs = sum(np.roll(off, -i, -1) for i in range(run))
        return np.sqrt(np.square(runs).sum(-1) / run * n / (n - run))

    def save(self, path: str | os.PathLike) -> None:
        """As JSON, which ``ta calibrate`` reads: it says how sure the maps are that it chooses. An infinite cost becomes null: never
        with these bits."""
        k, v = (np.where(np.isposinf(costs), None, costs.astype(object)).tolist() for costs in (self.k, self.v))
        values = {"head_dim": self.head_dim, "tokens": self.tokens, "k": k, "v": v}
        if self.block_tokens is not None and len(self.block_tokens) > 1:
            values["block_tokens"] = self.block_tokens.tolist()
            for name, costs, blocks in ("k_blocks", self.k, self.k_blocks), ("v_blocks", self.v, self.v_blocks):
                measured = ~np.isposinf(costs) & blocks.any(-1)  # not with 8 bits
                values[name] = [[[means.tolist() if is_measured else None for is_measured, means in zip(*of_head)]
                                 for of_head in zip(*of_layer)] for of_layer in zip(measured, blocks)]
        text = json.dumps(values, allow_nan=False)
        with open(path, "w") as file:
            file.write(text)

    def choose(self, bits: float) -> tuple[np.ndarray, np.ndarray]:
        """The maps of least total cost whose blocks are no larger than those with this number of bits for each element of K and
        V on average, 2 to 8, over all layers at once.

        Returns:
            k_bits, v_bits: uint8 [layers, kv_heads], for ``TurboCache`` and ``Context.create_pool``
        """
        if not 2 <= bits <= 8:
            raise ValueError(f"bits is {bits}; it takes 2 to 8")
        layers, heads, _ = self.k.shape
        context = Context(threads=1)
        shape = {"layers": layers, "kv_heads": heads, "head_dim": self.head_dim}
        low = 2 if bits <= 4 else 4
        about = [context.create_pool(**shape, bits=b, budget_bytes=1 << 40).describe() for b in (low, 2 * low)]
        of_low, of_high = (a.channel_block_bytes or a.token_block_bytes for a in about)
        calibrator = context.create_calibrator(**shape)
        return calibrator.choose(self.k, self.v, int(of_low + (bits - low) / low * (of_high - of_low)))


def bit_costs(model: torch.nn.Module, texts: Iterable[Any], *, numerics: Numerics | None = None, seed: int = 0) -> BitCosts:
    """Estimates what fewer bits cost in each head, for K and V separately, by one forward and one backward pass for each text.

    To second order, KL is half the square of the effect that a change of attention's output has on the log-probability of a token,
    in expectation over tokens that the model itself predicts. So at each place of the text a token is drawn from the model's
    prediction, and the gradient of the sum of their log-probabilities is taken with respect to attention's output in each layer.
    The change is the difference between the library's results with 4 or 2 bits and with 8 bits, with the text in steps of 64
    tokens. Its effect is squared separately for each place. Each text gives one draw for each place: ten thousand tokens rank heads
    well. In the first layers of a model the estimated costs of 2 bits are too low, by half on the model in examples/tinylm
    (bench/results/tinylm.md).

    Args:
        model: loaded with ``attn_implementation="turboattention"``, in eval mode, in float32 or bfloat16. Layers with windows, sinks and
            soft caps work; layers of different shapes, and keys of an earlier layer, do not. A backward pass is made: weights must not
            be quantized in a way that has none, and memory is taken as for training with that many tokens
        texts: token ids, each a list or a tensor of one axis, of 256 tokens or more: the first 64 and the newest ones have 8 bits
            anyway. Best of the length in use, since errors are larger where attention is spread over many keys
        numerics: as for ``Context.create_pool``, without k_offset
        seed: of the draws

    Raises:
        NotImplementedError: the model cannot be measured
        ValueError: there are no texts, one is too short, or gradients are not finite
    """
    if model.training:
        raise NotImplementedError("bit_costs measures models in eval mode")
    if numerics is not None and numerics.k_offset is not None:
        raise NotImplementedError("bit_costs takes no numerics with k_offset")
    if getattr(model.config.get_text_config(decoder=True), "_attn_implementation", None) != NAME:
        raise NotImplementedError(f"bit_costs measures models that are loaded with attn_implementation={NAME!r}")
    costing = _Costing(numerics)
    random: torch.Generator | None = None
    wanted = [p for p in model.parameters() if p.requires_grad]
    try:
        for p in wanted:  # gradients begin at the first layer's attention
            p.requires_grad_(False)
        for text in texts:
            ids = torch.as_tensor(text, device=model.device)
            if ids.ndim != 1 or len(ids) < 256:
                raise ValueError("a text is of one axis and has 256 tokens or more")
            costing.begin(len(ids))
            _passes.costs = costing
            with torch.enable_grad():
                scores = model(input_ids=ids[None], use_cache=False).logits[0].float().log_softmax(-1)
                _passes.costs = None
                random = random or torch.Generator(scores.device).manual_seed(seed)
                drawn = torch.multinomial(scores.detach().exp(), 1, generator=random)
                scores.gather(1, drawn).sum().backward()
                del scores  # and with it what the layers kept
    finally:
        _passes.costs = None
        for p in wanted:
            p.requires_grad_(True)
    return costing.finish()


class _Costing:
    """The sums of bit_costs. In a pass through the model it attends with exact attention in float32."""

    UNITS = [(tensor, bits) for tensor in "kv" for bits in (4, 2)]
    ROWS = 512  # queries whose scores are there at once
    BLOCK = 256  # tokens whose costs are kept as one mean

    def __init__(self, numerics: Numerics | None):
        self.numerics = numerics
        self.layer = 0
        self.block_tokens: list[int] = []
        self.shape: tuple[int, int] | None = None  # kv heads, head_dim
        self.plans: dict[tuple, tuple] = {}  # of a unit and a device: for how many tokens, a plan, a sequence
        self.sums: dict[int, dict[tuple[str, int], list[np.ndarray]]] = {}  # of a layer and a unit: of each block [kv_heads]

    def begin(self, tokens: int) -> None:
        self.block_tokens += [min(self.BLOCK, tokens - at) for at in range(0, tokens, self.BLOCK)]
        self.layer = 0

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        """[1, heads, tokens, head_dim] -> [1, tokens, heads, head_dim]"""
        shape = k.shape[1], k.shape[3]
        if q.shape[2] != k.shape[2] or options["mask"] != Mask.CAUSAL or v.shape != k.shape or (self.shape or shape) != shape:
            raise NotImplementedError("bit_costs takes causal models whose layers have one shape, K's and V's heads of one size")
        self.shape = shape
        layer, self.layer = self.layer, self.layer + 1
        out = torch.cat([checkpoint(_exact, q, k, v, at, options, use_reentrant=False) for at in range(0, q.shape[2], self.ROWS)], 1)
        if not out.requires_grad:
            out.requires_grad_()
        stored = [x.detach()[0].transpose(0, 1).contiguous() for x in (q, k, v)]
        out.register_hook(lambda gradient: self._take(layer, gradient.detach()[0].float(), *stored, options))
        return out.to(q.dtype)

    def finish(self) -> BitCosts:
        if not self.sums:
            raise ValueError("there are no texts")
        heads, head_dim = self.shape
        block_tokens = np.array(self.block_tokens)
        blocks = {tensor: np.zeros((len(self.sums), heads, 3, len(block_tokens))) for tensor in "kv"}
        for layer, sums in self.sums.items():
            for (tensor, bits), of_blocks in sums.items():
                blocks[tensor][layer, :, (8, 4, 2).index(bits)] = np.transpose(of_blocks) / (2 * math.log(2) * block_tokens)
        if not (np.isfinite(blocks["k"]).all() and np.isfinite(blocks["v"]).all()):
            raise ValueError("gradients are not finite: load the model in float32 or bfloat16")
        k, v = (np.average(blocks[tensor], -1, block_tokens).astype(np.float32) for tensor in "kv")
        return BitCosts(k, v, head_dim, int(block_tokens.sum()), block_tokens, blocks["k"].astype(np.float32),
                        blocks["v"].astype(np.float32))

    def _take(self, layer: int, gradient: torch.Tensor, q, k, v, options) -> None:
        heads = k.shape[1]
        with_8 = self._library("k", 8, q, k, v, options)
        sums = self.sums.setdefault(layer, {unit: [] for unit in self.UNITS})
        for unit in self.UNITS:
            change = self._library(*unit, q, k, v, options) - with_8
            of_token = (gradient * change).unflatten(1, (heads, -1)).sum((2, 3))  # [tokens, kv_heads]
            sums[unit] += [block.sum(0).cpu().numpy() for block in of_token.double().square().split(self.BLOCK)]

    def _library(self, tensor: str, bits: int, q, k, v, options) -> torch.Tensor:
        """Attention of the library with so many bits for K or for V of all heads, and 8 for the other."""
        tokens, heads, head_dim = k.shape
        key = tensor, bits, k.device
        if self.plans.get(key, (0,))[0] < tokens:
            of = {name: np.full((1, heads), bits if name == tensor else 8, np.uint8) for name in "kv"}
            shape = {"layers": 1, "kv_heads": heads, "head_dim": head_dim, "numerics": self.numerics}
            block = Context(threads=1).create_pool(**shape, bits=8, budget_bytes=1 << 40).describe().token_block_bytes
            pool = _context(k.device).create_pool(**shape, k_bits=of["k"], v_bits=of["v"],
                                                  budget_bytes=(tokens // 64 + 4) * (block + 4096))
            self.plans[key] = tokens, pool.create_plan(), pool.create_sequence()
        _, plan, sequence = self.plans[key]
        sequence.truncate(0)
        if q.device.type == "cuda":
            plan.set_stream(_stream(q.device))
        out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        for at in range(0, tokens, 64):
            part = slice(at, min(at + 64, tokens))
            with plan.step(sequence, part.stop - at) as step:
                step.append(0, k[part], v[part])
                step.attend(0, q[part], out[part], **options)
        return out


def _exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, options: dict[str, Any]) -> torch.Tensor:
    """Causal attention in float32, with a gradient, of _Costing.ROWS tokens from the first on: [1, heads, tokens, head_dim] ->
    [1, those tokens, heads, head_dim]"""
    end, group = min(first + _Costing.ROWS, q.shape[2]), q.shape[1] // k.shape[1]
    q, k, v = q[:, :, first:end], k[:, :, :end], v[:, :, :end]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = q.float() @ k.transpose(2, 3) * options.get("scale", q.shape[3]**-0.5)
    if "softcap" in options:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    at = torch.arange(end, device=q.device)
    age = at[first:, None] - at
    scores = scores.masked_fill((age < 0) | (age >= options.get("window", end)), -math.inf)
    if "sinks" in options:
        sinks = options["sinks"].to(scores).view(1, -1, 1, 1).expand(-1, -1, end - first, 1)
        return (torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v).transpose(1, 2)
    return (scores.softmax(-1) @ v).transpose(1, 2)
