"""Runs attentions over windows of a text and over prompts, in several processes, and puts what was found into rows."""

import importlib
import multiprocessing

import numpy as np

from . import tinylm
from .attention import FloatAttention

EXACT = "exact"


class Worker:
    """Of one process. module: where make_attention(name, model) is, for each name but EXACT."""

    def __init__(self, module, windows, prompts):
        self.make = importlib.import_module(module).make_attention
        self.model, self.windows, self.prompts = tinylm.Model(), windows, prompts
        self.attentions, self.exact = {EXACT: FloatAttention()}, (None, None)

    def run(self, task):
        """(name, window, None): (loss and KL of each position, bits per element); (name, None, prompt): 1 if it was answered"""
        name, window, prompt = task
        if name not in self.attentions:
            self.attentions[name] = self.make(name, self.model)
        attention = self.attentions[name]
        if window is None:
            return task, tinylm.answers_found(self.model, attention, [self.prompts[prompt]])
        tokens = self.windows[window]
        if self.exact[0] != window:
            self.exact = window, tinylm.predict(self.model, self.attentions[EXACT], tokens)
        exact = self.exact[1]
        logits = exact if name == EXACT else tinylm.predict(self.model, attention, tokens)
        return task, (tinylm.loss_bits(logits, tokens), tinylm.kl_bits(exact, logits), attention.bits(len(tokens)))


def _start(*arguments):
    global _worker
    _worker = Worker(*arguments)


def _work(task):
    return _worker.run(task)


def rows(module, names, windows, prompts, jobs):
    """A row for EXACT and for each name, in this order. A row has name, kl and kl_error (bits per byte), loss, change (of the loss, %),
    bits and bits_long (per element; see attention), found (prompts), kl_of_block."""
    names = [EXACT, *names]
    tasks = [(name, w, None) for w in range(len(windows)) for name in names]  # a window's share its exact logits
    tasks += [(name, None, p) for p in range(len(prompts)) for name in names]
    if jobs > 1:
        with multiprocessing.get_context("spawn").Pool(jobs, _start, (module, windows, prompts)) as pool:
            done = dict(pool.imap_unordered(_work, tasks, chunksize=len(names)))
    else:
        _start(module, windows, prompts)
        done = dict(map(_work, tasks))
    table = []
    for name in names:
        losses, kls, bits = zip(*(done[name, w, None] for w in range(len(windows))))
        kl, error = tinylm.mean_and_error(kls)
        loss = float(np.concatenate(losses).mean())
        table.append({"name": name, "bits": float(np.mean(bits, axis=0)[0]), "bits_long": float(np.mean(bits, axis=0)[1]), "kl": kl,
                      "kl_error": error, "loss": loss, "change": 100 * (loss / (table[0]["loss"] if table else loss) - 1),
                      "found": int(sum(done[name, None, p] for p in range(len(prompts)))), "prompts": len(prompts),
                      "kl_of_block": [float(b.mean()) for one in kls for b in np.split(one, range(tinylm.BLOCK, len(one), tinylm.BLOCK))]})
    return table
