"""The life of an engine in Python: docs/embedding.md explains it."""
import numpy as np
import turboattention as ta

LAYERS, Q_HEADS, KV_HEADS, DIM, CHUNK, PROMPT = 2, 4, 2, 64, 128, 300
BLOCKS, ANSWER = PROMPT // 64, 256

context = ta.Context()
pool = context.create_pool(layers=LAYERS, kv_heads=KV_HEADS, head_dim=DIM, bits=4, budget_bytes=4 << 20,
                           tiers=ta.Tiers(host_bytes=8 << 20))
plan = pool.create_plan()
space = pool.create_namespace(bytes([1] + [0] * 31))  # secret and random in earnest
keys = [bytes(range(32 * i + 1, 32 * i + 33)) for i in range(BLOCKS)]


def rows(first, n, heads, salt):
    token, channel = np.ogrid[first:first + n, :heads * DIM]
    return (((token * 131 + channel) * salt % 255 - 127) / np.float32(128)).astype(np.float32).reshape(n, heads, DIM)


def layers(step, first, n):
    for layer in range(LAYERS):
        step.append(layer, rows(first, n, KV_HEADS, 83), rows(first, n, KV_HEADS, 89))
        out = step.attend(layer, rows(first, n, Q_HEADS, 79))
    return out


def step(seq, first, n):
    with plan.step(seq, n) as step:
        out = layers(step, first, n)
    return out[-1, 0, 0]


def admit(answer):
    """The sequence of a request and the tokens that it has; None: there is no room for it now."""
    seq, length = space.match(keys)
    have = length // CHUNK * CHUNK
    seq.truncate(have)
    try:
        seq.reserve(PROMPT - have + answer, wait_ms=-1)
    except ta.ExhaustedError as error:
        if error.kind != ta.Status.TIER_FULL:
            raise
        return None, 0  # the request stays in the queue: error.bytes lack
    return seq, have


def prefill(seq, have):
    for first in range(have, PROMPT, CHUNK):
        last = step(seq, first, min(CHUNK, PROMPT - first))
    seq.publish(space, keys)
    return last


fit = pool.fit(None, PROMPT + ANSWER)
print(f"fits: {fit.now:d}, {fit.bytes_new} bytes")

cold, have = admit(ANSWER)
print(f"cold: {have} matched, prefill {prefill(cold, have):.6f}")
seq, have = admit(ANSWER)
print(f"warm: {have} matched, prefill {prefill(seq, have):.6f}")
print("too long:", "admitted" if admit(1 << 20)[0] else "queued")
for t in range(PROMPT, PROMPT + 3):
    print(f"decode: token {t}, {step(seq, t, 1):.6f}")

other = seq.fork()
other.truncate(PROMPT)
print(f"fork: {step(other, PROMPT + 7, 1):.6f}")

DRAFTS, ACCEPTED = 4, 2
with plan.step(other, DRAFTS, drafts=True) as verified:
    layers(verified, PROMPT + 8, DRAFTS)
    verified.end(keep=ACCEPTED)
print(f"verified: {len(other)} tokens, next {step(other, PROMPT + 17, 1):.6f}")

with plan.step(seq, 1) as cancelled:
    layers(cancelled, PROMPT + 3, 1)
    cancelled.abort()
print(f"cancelled: {len(seq)} tokens")

info = seq.move(ta.Tier.HOST, 0, BLOCKS).wait()
print(f"swapped out: {info.moved} blocks")
seq.move(ta.Tier.DEVICE, 0, BLOCKS).wait()
print(f"swapped in: {step(seq, PROMPT + 3, 1):.6f}")
pool.close()
