"""The model in numpy is that of examples/tinylm, and so are the figures. Its program is the judge where TA_TINYLM names it."""

import json
import os
import subprocess

import numpy as np
import pytest

from lab import table_formats, tinylm
from lab.attention import FloatAttention, LibraryAttention

SAMPLE = tinylm.MODEL / "sample.txt"
BYTES = 1024
program = pytest.mark.skipif("TA_TINYLM" not in os.environ, reason="TA_TINYLM, the program tinylm, is not given")


@pytest.fixture(scope="module")
def model():
    return tinylm.Model()


@pytest.fixture(scope="module")
def tokens():
    return tinylm.read_windows(SAMPLE, 1, BYTES)[0]


@pytest.fixture(scope="module")
def exact(model, tokens):
    return tinylm.predict(model, FloatAttention(), tokens)


@pytest.fixture(scope="module")
def context():
    return pytest.importorskip("turboattention").Context(threads=2)


def evaluate(tmp_path, *options):
    text = tmp_path / "text"
    text.write_bytes(SAMPLE.read_bytes()[:BYTES])
    command = [os.environ["TA_TINYLM"], "eval", "--model", tinylm.MODEL, "--text", text, "--exact-logits", tmp_path / "exact", "--json"]
    return json.loads(subprocess.run([*command, *options], check=True, capture_output=True, text=True).stdout)


@program
def test_exact_logits(tmp_path, exact, tokens):
    """The file of tinylm: 8 bytes of magic, the window's size, the number of windows, their bytes, float32 logits."""
    report = evaluate(tmp_path, "--exact")
    data = (tmp_path / "exact").read_bytes()
    assert data[:8] == b"TALOGIT1" and list(np.frombuffer(data, np.uint64, 2, 8)) == [BYTES, 1]
    theirs = np.frombuffer(data, np.float32, offset=24 + BYTES).reshape(BYTES - 1, 256)
    assert np.abs(theirs - exact).max() < 1e-3
    assert tinylm.loss_bits(exact, tokens).mean() == pytest.approx(report["bits_per_byte"], abs=2e-6)


@program
@pytest.mark.parametrize("name,options,tolerance", [
    ("ours, 8 bits", ["--bits", "8"], 0.05), ("ours, 4 bits", ["--bits", "4"], 0.1), ("ours, 2 bits", ["--bits", "2"], 0.25),
    ("ours, K 8, V 4", ["--bits-k", "8", "--bits-v", "4"], 0.1), ("ours, K 2, V 4", ["--bits-k", "2", "--bits-v", "4"], 0.25)])
def test_the_library_has_the_divergence_that_tinylm_measures(tmp_path, model, exact, tokens, context, name, options, tolerance):
    """Up to roundings of the model's own sums, which move single codes: at 2 bits by a third of the standard error. Those of
    numpy are the same on every processor with AVX2 (conftest.py)."""
    report = evaluate(tmp_path, *options, "--chunk", "64")
    attention = table_formats.make_attention(name, model)
    kl, error = tinylm.mean_and_error([tinylm.kl_bits(exact, tinylm.predict(model, attention, tokens))])
    assert kl == pytest.approx(report["kl_bits_per_byte"], rel=tolerance)
    assert error == pytest.approx(report["kl_standard_error"], rel=2 * tolerance)
    assert attention.bits(BYTES)[0] == pytest.approx(report["bits_per_element"], rel=1e-6)


def test_steps_of_any_size_are_one_sequence(model, exact, tokens, context):
    """8 bits in chunks of 64, in one and in odd ones: near exact, nearer the fewer tokens are read back at 8 bits."""
    for chunk in 64, 100, BYTES:
        attention = LibraryAttention(model, context, max_tokens=BYTES, bits=8, chunk=chunk)
        logits = tinylm.predict(model, attention, tokens)
        assert 0 < tinylm.kl_bits(exact, logits).mean() < 5e-4
        assert np.array_equal(tinylm.predict(model, attention, tokens), logits)  # reset begins anew


def test_mean_and_error():
    windows = [np.repeat([1.0, 3.0, 8.0], [256, 256, 128])]
    mean, error = tinylm.mean_and_error(windows)
    assert mean == (256 + 768 + 1024) / 640
    squares = (256 * (1 - 3.2))**2 + (256 * (3 - 3.2))**2 + (128 * (8 - 3.2))**2
    assert error == pytest.approx(np.sqrt(squares * 3 / 2) / 640)
    windows = [np.repeat([3.0, 3.0, 7.0, 7.0], 256)]  # of 4 blocks each two neighbours together: -4, 0, 4, 0 blocks off the mean
    assert tinylm.mean_and_error(windows) == (5, pytest.approx(np.sqrt(2)))


def test_kl_and_loss():
    exact, other = np.log([[0.5, 0.25, 0.25]]), np.log([[0.25, 0.25, 0.5]])
    assert tinylm.kl_bits(exact + 7, other - 3)[0] == pytest.approx(0.5 * 1 + 0.25 * -1)
    assert tinylm.loss_bits(other, np.array([0, 2], np.uint8))[0] == pytest.approx(1)


def test_prompts(model):
    prompt = tinylm.read_prompts(tinylm.MODEL / "retrieval.jsonl", 1)[0]
    wrong = {**prompt, "answer": prompt["answer"][::-1]}
    assert tinylm.answers_found(model, FloatAttention(), [prompt, wrong]) == 0.5


def test_formats_that_keep_all_in_float_are_exact(model, exact, tokens):
    """A residual of the whole text: only float16 is left."""
    kivi = table_formats.formats.kivi(2, 64, residual=1 << 20)
    assert tinylm.kl_bits(exact, tinylm.predict(model, FloatAttention(kivi), tokens)).max() < 1e-4
