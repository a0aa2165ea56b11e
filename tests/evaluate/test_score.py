"""fenchel/evaluate/score.py: what perplexity and bits per byte must be."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import entmax as peer
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fenchel.choice import Entmax, Softmax
from fenchel.data import train_tokenizer
from fenchel.evaluate import (
    confidence,
    score,
    score_choice,
    text_ids,
)
from fenchel.evaluate.score import predictions, truncate_ids
from fenchel.model import ModelConfig, Transformer

V = 23


class Uniform(nn.Module):
    """Every token is as likely as any other."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(1))

    def forward(self, ids_BT: Tensor) -> Tensor:
        return torch.zeros(*ids_BT.shape, V)


def some_ids(n: int) -> np.ndarray:
    return np.random.default_rng(0).integers(V, size=n).astype(np.uint16)


@pytest.mark.parametrize("n", [2, 7, 8, 9, 16, 17, 100])
def test_the_perplexity_of_a_uniform_model_is_v(n: int) -> None:
    found = score(Uniform(), some_ids(n), bytes=3 * n, context=8)
    assert found.perplexity == pytest.approx(V)
    assert found.tokens == n - 1  # every token but the first, once
    assert found.bits_per_byte == pytest.approx((n - 1) * math.log2(V) / (3 * n))


def test_it_is_the_mean_of_the_losses_computed_one_by_one() -> None:
    model = Transformer(
        ModelConfig(vocabulary=V, context=8, width=16, tied=False),
        generator=torch.Generator().manual_seed(0),
    )
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.3, generator=torch.Generator().manual_seed(p.numel()))
    ids, ends = (
        some_ids(8 + 7),
        (8, 12, 14),
    )  # windows of 8 moved by 4, the last one by what is left
    model.eval()
    losses = []
    for t in range(1, len(ids)):
        start = next(end for end in ends if t <= end) - 8
        row = torch.from_numpy(ids[start:t].astype(np.int64))[None]
        losses.append(-model(row)[0, -1].log_softmax(-1)[int(ids[t])].item())
    found = score(model.train(), ids, bytes=50, context=8)
    assert found.loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert found.bits_per_byte == pytest.approx(np.sum(losses) / math.log(2) / 50, rel=1e-5)
    assert model.training  # given back as it came


def test_reading_a_part_takes_its_share_of_the_bytes() -> None:
    ids = some_ids(101)
    whole = score(Uniform(), ids, bytes=400, context=8)
    part = score(Uniform(), ids, bytes=400, context=8, limit=50)
    assert part.tokens == 50
    assert part.bits_per_byte == pytest.approx(whole.bits_per_byte, rel=0.02)


def test_the_beginning_of_a_text_has_its_targets_and_its_share_of_the_bytes() -> None:
    ids = some_ids(101)
    part, size = truncate_ids(ids, 400, 50)
    assert (part == ids[:51]).all()
    assert size == 200
    for limit in (None, 100, 1000):
        whole, size = truncate_ids(ids, 400, limit)
        assert (len(whole), size) == (101, 400)
    with pytest.raises(ValueError, match="give at least 1"):
        truncate_ids(ids, 400, 0)


@pytest.mark.parametrize("n", [2, 8, 17, 100])
def test_progress_counts_every_target_once(n: int) -> None:
    calls: list[tuple[str, int, int]] = []
    score(Uniform(), some_ids(n), bytes=n, context=8, batch=2, progress=lambda *x: calls.append(x))
    assert calls == sorted(set(calls))
    assert calls[-1] == ("reading", n - 1, n - 1)


def test_documents_beyond_a_limit_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("sea shore\n")
    (tmp_path / "b.jsonl").write_text("no object\n")
    tokenizer = train_tokenizer(["sea shore"], 300)
    ids, size = text_ids(tokenizer, str(tmp_path), limit=2)
    assert len(ids) == 3
    assert 0 < size <= 10
    with pytest.raises(ValueError, match="should be an object"):
        text_ids(tokenizer, str(tmp_path))


def test_the_same_probability_has_another_perplexity_under_another_tokenizer() -> None:
    """ "hello world" at 11 nats: 15.64 in four pieces, 2.72 in eleven characters."""

    class Given(Uniform):
        """Every token 0 has the probability p."""

        def __init__(self, p: float) -> None:
            super().__init__()
            self.logits = torch.tensor([math.log(p), math.log1p(-p)])

        def forward(self, ids_BT: Tensor) -> Tensor:
            return self.logits.expand(*ids_BT.shape, 2)

    for pieces, perplexity in ((4, 15.64), (11, 2.718)):
        ids = np.zeros(1 + pieces, dtype=np.uint16)
        found = score(Given(math.exp(-11 / pieces)), ids, bytes=len("hello world"), context=16)
        assert found.perplexity == pytest.approx(perplexity, abs=0.005)
        assert found.bits_per_byte == pytest.approx(1.443, abs=0.001)


def test_the_bytes_of_a_text_are_those_that_are_predicted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("größer\n")
    (tmp_path / "b.txt").write_text("sea")
    tokenizer = train_tokenizer(["sea shore größer"], 300)
    ids, size = text_ids(tokenizer, str(tmp_path))
    first = tokenizer.token_bytes(int(ids[0]))
    assert first is not None
    assert size == len("größer\n".encode()) + 3 - len(first)
    assert (ids == 0).sum() == 1  # between
    ids, size = text_ids(tokenizer.begin_with(0), str(tmp_path))
    assert size == len("größer\n".encode()) + 3
    assert (ids == 0).sum() == 2  # before, between
    assert ids[0] == 0


def test_bits_per_byte_do_not_depend_on_the_length_of_the_first_token(tmp_path: Path) -> None:
    """Tokenizers that begin a text with other tokens count the bytes of the targets alone."""
    (tmp_path / "a.txt").write_text("sea shore")
    sizes = set()
    for text in ("s", "se se se se", "sea sea sea sea sea"):
        tokenizer = train_tokenizer([text], 300)
        ids, size = text_ids(tokenizer, str(tmp_path / "a.txt"))
        assert tokenizer.spelled_bytes(ids[1:]) == size
        sizes.add(size)
    assert len(sizes) > 1


class Ahead(nn.Module):
    """The logits of the next token from a table of the last one, drawn once."""

    def __init__(self, spread: float) -> None:
        super().__init__()
        drawn = torch.randn(V, V, generator=torch.Generator().manual_seed(0))
        self.table = nn.Parameter(spread * drawn)

    def forward(self, ids_BT: Tensor) -> Tensor:
        return self.table[ids_BT.long()]


def test_with_softmax_the_score_of_a_map_is_the_score() -> None:
    model, ids = Ahead(1.0), some_ids(60)
    plain = score(model, ids, bytes=90, context=8, limit=40)
    ours = score_choice(model, ids, choice=Softmax(), bytes=90, context=8, limit=40)
    for name in ("loss", "perplexity", "bits_per_byte", "tokens"):
        assert getattr(ours, name) == pytest.approx(getattr(plain, name), rel=1e-6)
    assert (ours.support, ours.uncovered) == (V, 0.0)


@pytest.mark.parametrize("spread", [0.1, 2.0])
def test_a_sparse_map_is_measured_as_its_peer_computes_it(spread: float) -> None:
    model, ids = Ahead(spread), some_ids(60)
    ours = score_choice(model, ids, choice=Entmax(1.5), bytes=90, context=8)
    last, target = torch.from_numpy(ids[:-1].astype("int64")), torch.from_numpy(ids[1:].astype(int))
    logits = model.table.detach()[last]
    p = peer.entmax15(logits)
    losses = peer.entmax15_loss(logits, target)
    of_target = p.gather(-1, target[:, None])
    assert ours.loss == pytest.approx(losses.mean().item(), rel=1e-4)
    assert ours.accuracy == pytest.approx((logits.argmax(-1) == target).double().mean().item())
    assert ours.support == pytest.approx((p > 0).sum(-1).double().mean().item())
    assert ours.uncovered == pytest.approx((of_target == 0).double().mean().item())
    bits = -of_target.log2().double().sum().item() / 90
    assert ours.bits_per_byte == pytest.approx(bits, rel=1e-4)
    assert math.isinf(ours.bits_per_byte) == (spread == 2.0)  # or one case is not covered


SHAPES: dict[str, dict[str, Any]] = {
    "rotary": {},
    "learned positions": {"positions": "learned", "norm": "layer", "mlp": "gelu"},
    "alibi": {"positions": "alibi"},
    "windows": {"windows": (5, 0)},
    "entmax, capped": {"choice": "entmax", "softcap": 3.0, "logit_softcap": 2.0},
    "a bias in the head": {"lm_head_bias": True, "logit_scale": 0.5, "tied": False},
}


@pytest.mark.parametrize("settings", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("limits", [(300, 1 << 26), (300, 1500), (1, 1)], ids=str)
def test_slices_of_a_window_give_the_predictions_of_the_whole(
    settings: dict[str, Any], limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig(
        vocabulary=61, context=40, width=16, initial="normal", initial_std=0.3, **settings
    )
    model = Transformer(config, generator=torch.Generator().manual_seed(0)).double()
    ids = some_ids(150) % 61

    def joined() -> tuple[Tensor, Tensor, int]:
        blocks = [one[1:] for one in predictions(model, ids, context=40, batch=3)]
        logits, targets = (torch.cat(part) for part in zip(*blocks, strict=True))
        return logits, targets, max(block.numel() for block, _ in blocks)

    whole, targets, _ = joined()
    assert targets.tolist() == ids[1:].tolist()
    scoring = sys.modules["fenchel.evaluate.score"]
    monkeypatch.setattr(scoring, "LOGITS", {"cpu": limits[0]})
    monkeypatch.setattr(scoring, "ACTIVATIONS", limits[1])
    parts, targets, largest = joined()
    assert targets.tolist() == ids[1:].tolist()
    assert largest <= max(61, limits[0])
    torch.testing.assert_close(parts, whole, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", ["encoder", "encoder-decoder"])
def test_a_model_that_predicts_no_next_token_has_no_score(kind: str) -> None:
    config = ModelConfig(vocabulary=9, width=8, layers=1, heads=2, kind=kind, mlp="relu")
    model = Transformer(config)
    with pytest.raises(ValueError, match="does not predict the next token"):
        score(model, some_ids(8), bytes=8, context=4)
    with pytest.raises(ValueError, match="does not predict the next token"):
        confidence(model, some_ids(8), context=4)


PEAK = """
import resource, sys
from pathlib import Path
import numpy as np, torch
from fenchel.evaluate import confidence, score
from fenchel.model import ModelConfig, Transformer
model = Transformer(ModelConfig(vocabulary=2**18, context=4096, width=4, layers=1, heads=1))
ids = np.arange(int(sys.argv[1]) + 1) % 1000

def peak():  # ru_maxrss is never below the peak of the process that started this one
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().partition("VmHWM:")[2].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

score(model, ids[:10], bytes=9, context=4096)
before = peak()
score(model, ids, bytes=9, context=4096)
confidence(model, ids[:200], context=4096)
print((peak() - before) // 1024)
"""


def test_memory_does_not_grow_with_the_vocabulary_and_the_text() -> None:
    """1,500 rows of 2^18 logits are 1.6 GB, and their softmax as much again."""
    peaks = [
        int(subprocess.run([sys.executable, "-c", PEAK, n], capture_output=True, check=True).stdout)
        for n in ("300", "1500")
    ]
    assert max(peaks) < 900
    assert abs(peaks[1] - peaks[0]) < 150


def test_logits_that_are_no_numbers_are_a_sentence() -> None:
    class Broken(Uniform):
        def forward(self, ids_BT: Tensor) -> Tensor:
            return super().forward(ids_BT) + torch.nan

    for function, settings in ((score, {}), (score_choice, {"choice": Entmax(1.5)})):
        with pytest.raises(ValueError, match="logits are not numbers on this text"):
            function(Broken(), np.arange(9), bytes=8, context=4, **settings)
