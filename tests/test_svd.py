"""Singular values against closed forms, the orderings that hold at equal q, k and decay, and the
page with its controls.
"""

import numpy as np
import pytest
import torch
from planted import make_run

from bitimely_core import models, report
from bitimely_core.analyses.controls import to_float64
from bitimely_core.errors import UserError
from bitimely_core.insight.attention_maps import combine_pair, compute_mixings
from bitimely_core.insight.svd import (
    MEASURES,
    Spectra,
    collect_spectra,
    cumulate_shares,
    measure_rank,
    normalise_map,
    product_singular_values,
    singular_values,
    svd,
)
from bitimely_core.ops.retention import decay_matrix, retention_matrix
from bitimely_core.page import Figure, Table
from bitimely_core.progress import show_progress
from bitimely_core.types import Batch, Encoded


class Windows:
    """Forty windows of noise, the last eight of them the test split (or no test split at all)."""

    name, channels, rate, split, task = "noise", 2, 50.0, "subject", "classification"
    channel_names, class_names = ("C3", "EOG"), ("W", "N1")

    def __init__(self, length=96, rows=None, test=8, fingerprint="a"):
        self.length, self.test, self.fingerprint = length, test, fingerprint
        self.rows = np.arange(40) if rows is None else rows
        self.x = np.random.default_rng(0).normal(size=(40, length, 2)).astype(np.float32)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, split):
        keep = {
            "train": self.rows < 32 - self.test,
            "validation": (self.rows >= 32 - self.test) & (self.rows < 40 - self.test),
        }
        return Windows(
            self.length,
            self.rows[keep.get(split, self.rows >= 40 - self.test)],
            self.test,
            self.fingerprint,
        )

    def read(self, rows=None):
        return self.x[self.rows if rows is None else rows], None

    def arrays(self, rows=None, draw=None):
        return {"values": self.read(rows)[0]}

    def targets(self, rows=None):
        return np.asarray(self.rows if rows is None else rows) % 2


def run(name="bitimelygpt", windows=None, label=None, **config):
    torch.manual_seed(3)
    windows = windows or Windows()
    options = {
        "layers": 4,
        "heads": 2,
        "dim": 16,
        "value_dim": 16,
        "ffn_dim": 16,
        "tokenizer": "patch",
        **config,
    }
    model = models.build(name, channels=2, length=windows.length, **options).eval()
    return make_run(
        label or name, model, windows, versions={"bitimely": "1"}, notices=("leak_free is false.",)
    )


# --- closed forms -------------------------------------------------------------------------------------------------------------------------


def test_identity_and_orthogonal_maps_are_flat():
    n = 50
    orthogonal = np.linalg.qr(np.random.default_rng(0).normal(size=(n, n)))[0]
    for matrix, scale in ((np.eye(n), 1.0), (3.0 * orthogonal, 3.0)):
        values, log_dets = singular_values(matrix[None])
        m = measure_rank(values[0], log_dets[0])
        assert m["effective_rank"] == pytest.approx(1.0)
        assert m["n90"] == pytest.approx(0.9)
        assert m["auc"] == pytest.approx((n + 1) / (2 * n))
        assert m["stable_rank"] == pytest.approx(1.0)
        assert m["log_det"] == pytest.approx(n * np.log(scale), abs=1e-9)
        assert m["condition"] == pytest.approx(1.0)
        assert m["numerical_rank"] == 1.0


def test_rank_one_has_one_direction():
    n = 40
    rng = np.random.default_rng(0)
    m = measure_rank(
        singular_values(np.outer(rng.normal(size=n), rng.normal(size=n))[None])[0][0], -np.inf
    )
    assert m["effective_rank"] == pytest.approx(1 / n, rel=1e-6)
    assert m["n90"] == m["numerical_rank"] == pytest.approx(1 / n)
    assert m["stable_rank"] == pytest.approx(1 / n)
    assert m["auc"] == pytest.approx(1.0)
    assert m["condition"] > 1e12


def test_geometric_values_have_the_entropy_of_their_series():
    r, n = 0.8, 30
    values = r ** np.arange(n)
    p = values / values.sum()
    m = measure_rank(singular_values(np.diag(values)[None])[0][0], 0.0)
    entropy = -np.log((1 - r) / (1 - r**n)) - np.log(r) * (p * np.arange(n)).sum()
    assert m["effective_rank"] == pytest.approx(np.exp(entropy) / n)
    assert m["condition"] == pytest.approx(r ** (1 - n))
    k = np.arange(1, n + 1)
    assert cumulate_shares(values, n) == pytest.approx((1 - r**k) / (1 - r**n))


def test_zeros_define_nothing():
    m = measure_rank(np.zeros(5), -np.inf)
    assert set(m) == set(MEASURES)
    assert np.isnan(list(m.values())).all()
    spectra = Spectra()
    spectra.add(np.zeros((2, 5, 5)))
    assert spectra.table()["effective_rank"] is None


def test_curves_of_other_lengths_are_stretched():
    assert cumulate_shares(np.ones(4), 8) == pytest.approx(np.arange(1, 9) / 8)
    assert cumulate_shares(np.array([3.0, 1.0]), 2) == pytest.approx([0.75, 1.0])


def test_factors_of_a_product_and_of_a_triangle():
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 3, 40, 8))
    values, log_dets = product_singular_values(q, k)
    assert values == pytest.approx(
        np.linalg.svd(q @ k.transpose(0, 2, 1), compute_uv=False), abs=1e-10
    )
    assert (log_dets == -np.inf).all()
    wide = product_singular_values(q[:, :6], k[:, :6])
    assert wide[0] == pytest.approx(
        np.linalg.svd(q[:, :6] @ k[:, :6].transpose(0, 2, 1), compute_uv=False), abs=1e-10
    )
    lower = np.tril(rng.normal(size=(2, 30, 30)))
    assert singular_values(lower)[1] == pytest.approx(np.linalg.slogdet(lower)[1])
    full = rng.normal(size=(2, 30, 30))
    assert singular_values(full)[1] == pytest.approx(np.linalg.slogdet(full)[1])


def test_decay_alone_has_determinant_one_in_each_direction():
    log_decay = torch.log1p(-torch.tensor([1 / 32, 1 / 512], dtype=torch.float64))
    forward, backward = (
        decay_matrix(log_decay, 60, direction=d, dtype=torch.float64)[0].numpy()
        for d in ("forward", "backward")
    )
    for maps in (forward, backward):
        assert singular_values(maps)[1] == pytest.approx(np.zeros(2), abs=1e-9)
    assert singular_values(forward)[0] == pytest.approx(singular_values(backward)[0])


def test_orderings_at_equal_queries_keys_and_decay():
    """Forward > two-sided > q k^T: the mask makes most of the effective rank, whatever was learnt;
    and a composition has far less.
    """
    rng = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 4, 120, 2, 16, generator=rng, dtype=torch.float64)
    log_decay = torch.log1p(-torch.tensor([1 / 32, 1 / 128], dtype=torch.float64))
    rank = {}
    made = {
        d: retention_matrix(q, k, log_decay=log_decay, direction=d).numpy()
        for d in ("forward", "backward", "both")
    }
    made["composed"] = made["backward"] @ made["forward"]
    for name, maps in made.items():
        rank[name] = np.mean(
            [
                measure_rank(s, 0.0)["effective_rank"]
                for s in singular_values(maps.reshape(-1, 120, 120))[0]
            ]
        )
    plain = torch.einsum("bnhk,bmhk->bhnm", q, k).numpy().reshape(-1, 120, 120)
    rank["scores"] = np.mean(
        [measure_rank(s, 0.0)["effective_rank"] for s in singular_values(plain)[0]]
    )
    assert rank["forward"] == pytest.approx(rank["backward"], abs=0.05)
    assert rank["forward"] > rank["both"] > rank["scores"]
    assert rank["forward"] > rank["composed"]


# --- spectra of a model -------------------------------------------------------------------------------------------------------------------


def test_spectra_are_those_of_the_model():
    one = run()
    found = collect_spectra(one, 3, 0, "none")
    assert (found.sequences, found.split, found.tokens, found.key_width) == (
        3,
        "test",
        [12, 12, 12],
        8,
    )
    assert sorted(found.layers) == [1, 2, 3, 4]
    assert set(found.layers[4]) == {
        "map",
        "random",
        "scores",
        "alone",
        "combined",
        "combined_random",
        "composed",
        "composed_random",
    }
    assert "combined" not in found.layers[3]
    rows = one.windows()["test"].rows
    chosen = np.sort(np.random.default_rng(0).choice(rows, 3, replace=False))
    layers = compute_mixings(
        to_float64(one.model()), Batch(values=torch.from_numpy(one.windows().x[chosen[1:2]]))
    )
    for name, maps in {
        "map": layers[3].map,
        "combined": combine_pair(layers[2], layers[3]),
        "composed": layers[3].map @ layers[2].map,
    }.items():
        assert found.layers[4][name].singular[1] == pytest.approx(
            np.linalg.svd(maps, compute_uv=False)
        ), name
    composed = found.layers[4]["composed"].measures[1][0]["log_det"]
    assert composed == pytest.approx(sum(np.linalg.slogdet(layers[k].map[0])[1] for k in (2, 3)))
    plain = layers[3].queries @ layers[3].keys.transpose(0, 2, 1)
    assert layers[3].map == pytest.approx(plain * layers[3].alone)
    assert found.layers[4]["scores"].singular[1] == pytest.approx(
        np.linalg.svd(plain, compute_uv=False), abs=1e-12
    )
    heads = [
        np.mean([measure_rank(s[h], 0.0)["auc"] for s in found.layers[4]["map"].singular])
        for h in range(2)
    ]
    assert [found.layers[4]["map"].table(h)["auc"] for h in range(2)] == pytest.approx(heads)
    assert found.layers[4]["map"].table()["auc"] == pytest.approx(np.mean(heads))


def test_curves_are_averaged_after_each_decomposition():
    spectra = Spectra()
    spectra.append(np.array([[1.0, 1.0]]), np.zeros(1))
    spectra.append(np.array([[9.0, 1.0]]), np.zeros(1))
    assert spectra.curves(2).mean(0)[0] == pytest.approx([0.7, 1.0])  # not 10 / 12
    assert spectra.table()["condition"] == pytest.approx(5.0)  # the median


def test_rows_may_be_rescaled():
    one = run()
    layer = compute_mixings(
        to_float64(one.model()), Batch(values=torch.from_numpy(one.windows().x[:1]))
    )[0]
    assert np.abs(normalise_map(layer, "abs-sum").map).sum(-1) == pytest.approx(1.0)
    assert normalise_map(layer, "sqrt-decay").map == pytest.approx(
        layer.map / np.sqrt(layer.alone.sum(-1, keepdims=True))
    )
    assert normalise_map(layer, "none") is layer


def test_softmax_models_and_their_mask():
    found = collect_spectra(run("gpt-baar"), 2, 0, "sqrt-decay")
    assert found.directions == ["forward", "backward"] * 2
    assert found.layers[4]["combined"].table()["effective_rank"] > 0
    n = found.tokens[0]
    # row n also sees [SOS], which is taken out
    mean = np.tril(np.ones((n, n))) / np.arange(2, n + 2)[:, None]
    assert found.layers[1]["alone"].singular[0][0] == pytest.approx(
        np.linalg.svd(mean, compute_uv=False)
    )


# --- the page -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_page_shows_controls_beside_every_spectrum(tmp_path):
    events = []
    with show_progress(lambda *event: events.append(event)):
        page = svd([run(), run("timelybert")], sequences=3)
    again = svd([run(), run("timelybert")], sequences=3)
    assert page.summary == again.summary
    assert events[-1] == ("svd timelybert", 3, 3)
    cell = page.summary["bitimelygpt"]["4"]["1"]
    assert set(cell["map"]) == {*MEASURES, "effective_rank_sd"}
    assert set(page.summary["timelybert"]["2"]) == {"1", "2", "mean"}
    figures = {block.name: block for block in page.blocks if isinstance(block, Figure)}
    names = [s.name for s in figures["spectra-bitimelygpt"].data.series]
    for words in (
        "layers 3 and 4 combined",
        "forward layer 3",
        "backward layer 4",
        "random weights",
        "pair composed",
        "q kᵀ alone",
        "decay or mask alone",
    ):
        assert any(words in name for name in names), words
    assert any("random weights" in s.name for s in figures["spectra-timelybert"].data.series)
    assert next(s.name for s in figures["comparison-12"].data.series) == "bitimelygpt, K = 8"
    first = page.blocks[0]
    assert (
        first.data.values[0]
        == page.summary["bitimelygpt"]["4"]["mean"]["combined"]["effective_rank"]
    )
    tables = [block for block in page.blocks if isinstance(block, Table)]
    assert len(tables) == 4
    assert any("3 sequences" in notice for notice in page.notices)
    assert "leak_free is false." in page.notices
    assert "effective rank" in page.verdict
    assert report.write_report(tmp_path, page).stat().st_size < report.LIMIT


@pytest.mark.slow
def test_runs_that_do_not_compare_are_kept_apart():
    page = svd(
        [
            run(),
            run(windows=Windows(48, fingerprint="b"), label="short"),
            run(heads=4, label="narrow"),
        ],
        sequences=1,
    )
    figures = [block.name for block in page.blocks if isinstance(block, Figure)]
    assert "comparison-12" in figures
    notices = " ".join(page.notices)
    for words in ("different numbers of tokens", "different key widths", "different windows"):
        assert words in notices
    compared = next(
        block
        for block in page.blocks
        if isinstance(block, Figure) and block.name == "comparison-12"
    )
    assert not any("short" in s.name for s in compared.data.series)


def test_without_a_test_split_it_says_so():
    page = svd([run(windows=Windows(test=0))], sequences=2)
    assert any("validation split" in notice for notice in page.notices)


def test_unsupported_options_are_refused():
    with pytest.raises(UserError, match="sqrt-decay"):
        svd([run()], sequences=1, row_norm="sqrt")

    class Without(torch.nn.Module):
        def forward(self, batch, attention=False):
            return Encoded(None, None, None, (batch.values,))

    with pytest.raises(UserError, match="no attention maps"):
        compute_mixings(Without(), Batch(values=torch.zeros(1, 96, 2)))
