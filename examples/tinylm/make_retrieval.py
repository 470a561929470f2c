#!/usr/bin/env python3
"""Writes retrieval prompts for `tinylm retrieval`: text of a file with lines `KEY <letters> = <digits>` scattered in it, ending in
the question for one of them. Deterministic.

usage: make_retrieval.py TEXT PROMPTS_PER_DISTANCE > retrieval.jsonl
"""
import json
import random
import sys

DISTANCES = (250, 1000, 2000, 3900)
LONGEST = 4080  # prompt and answer fit a context of 4096


def key_line(rng):
    letters = "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(8))
    digits = "".join(rng.choice("0123456789") for _ in range(6))
    return letters, digits, f"KEY {letters} = {digits}\n"


def prompt(rng, text, distance):
    """The asked key stands about `distance` bytes before the end, others every 250 bytes or so."""
    size = min(LONGEST - 60, distance + rng.randrange(60, 160))
    start = rng.randrange(0, len(text) - size)
    lines = text[start : start + size].splitlines(keepends=True)[1:-1]
    body, asked = [], None
    left = sum(len(line) for line in lines)
    since = 0
    for line in lines:
        if asked is None and left <= distance - 150:
            asked = key_line(rng)
            body.append(asked[2])
        elif since > 250:
            body.append(key_line(rng)[2])
            since = 0
        body.append(line)
        left -= len(line)
        since += len(line)
    if asked is None:
        asked = key_line(rng)
        body.insert(0, asked[2])
    out = "".join(body)
    return out[-(LONGEST - 24) :] + f"KEY {asked[0]} = ", asked[1]


def main():
    with open(sys.argv[1], encoding="ascii") as f:
        text = f.read()
    rng = random.Random(1)
    for i in range(int(sys.argv[2])):
        for distance in DISTANCES:
            p, answer = prompt(rng, text, distance)
            print(json.dumps({"prompt": p, "answer": answer, "bucket": distance, "prompt_bytes": len(p)}))


if __name__ == "__main__":
    main()
