"""What tests share: small models with weights that all count, and windows and runs whose vectors
are known.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import nn

from bitimely_core import models, registry
from bitimely_core.config import Settings
from bitimely_core.run import Run
from bitimely_core.schemas.runs import RunData, RunRecord
from bitimely_core.types import Encoded


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def tiny(name, **options):
    """A model of preset tiny with the same random weights each time, in eval mode, with the tokens
    of `use_paper_tokens`.
    """
    torch.manual_seed(0)
    options = {"preset": "tiny", "channels": 3, "length": 50, **use_paper_tokens(name, options)}
    return models.build(name, **options).eval()


def use_paper_tokens(name, options):
    """The options of a model, of signals with the paper's tokens where it takes them and no others
    are chosen.
    """
    chosen = not registry.models[name].facts.tokenizer or {"tokenizer", "codes"} & options.keys()
    return options if chosen else {"tokenizer": "conv", **options}


def lively(model, std=0.15):
    """Weights and running statistics that all count: biases, scales and means do not stay 0 or 1.
    In float64.
    """
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        nn.init.normal_(weight, std=std if weight.dim() < 3 else 1 / math.sqrt(weight[0].numel()))
        if "norm" in name and name.endswith("weight"):
            nn.init.uniform_(weight, 0.5, 1.5)
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            nn.init.normal_(buffer, std=0.3)
        if name.endswith("running_var"):
            nn.init.uniform_(buffer, 0.5, 2.0)
    return model.double().eval()


class Windows:
    """Rows of 16 subjects: 10 train, 2 validation, 4 test by default; `values` and `target` are
    given.
    """

    name, dataset, view, channels, rate, split = "planted", "planted", "staging", 1, 10.0, "subject"
    channel_names = ("C3",)
    fingerprint = "f"
    vocabulary = ()
    folder = Path("planted")
    target_unit = None

    def __init__(
        self,
        values,
        target,
        subjects,
        task="classification",
        class_names=("a", "b"),
        cuts=(0.6, 0.75),
        rows=None,
    ):
        self.values, self.target, self.of = (
            np.asarray(values, np.float32),
            np.asarray(target),
            np.asarray(subjects),
        )
        self.task, self.class_names, self.cuts = task, class_names, cuts
        self.rows = np.arange(len(self.target)) if rows is None else rows
        self.length = self.values.shape[1]
        self.notices = []

    def list_stated_views(self):
        return {}

    @property
    def classes(self):
        return 1 if self.task == "regression" else len(self.class_names)

    @property
    def whole_index(self):
        import polars as pl

        order = np.unique(self.of)
        place = np.searchsorted(order, self.of) / len(order)
        split = np.where(
            place < self.cuts[0], "train", np.where(place < self.cuts[1], "validation", "test")
        )
        start = (
            np.array(
                [
                    np.flatnonzero(np.flatnonzero(self.of == s) == i)[0]
                    for i, s in enumerate(self.of)
                ]
            )
            * self.length
            / self.rate
        )
        return pl.DataFrame(
            {
                "subject_id": [f"p-{s}" for s in self.of],
                "recording_id": [f"r-{s}" for s in self.of],
                "start": start,
                "split": split,
            }
        )

    @property
    def index(self):
        return self.whole_index[self.rows]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, split):
        keep = (self.index["split"] == split).to_numpy()
        return Windows(
            self.values,
            self.target,
            self.of,
            self.task,
            self.class_names,
            self.cuts,
            self.rows[keep],
        )

    def subjects(self):
        return self.index["subject_id"].to_numpy()

    def arrays(self, rows=None, draw=None):
        return {
            "values": self.values[self.rows if rows is None else np.asarray(rows)],
            "mask": None,
        }

    def targets(self, rows=None):
        return self.target[self.rows if rows is None else np.asarray(rows)]


class Reader(torch.nn.Module):
    """Two layers of states that are the window itself: layer 2 all of it in [SOS] (column 0), layer
    1 noise there.
    """

    directions = ("forward", "backward")

    def __init__(self, width=4):
        super().__init__()
        from bitimely_core.models.layers import StackConfig

        self.config = StackConfig(
            name="bitimelygpt",
            layers=2,
            heads=1,
            dim=width,
            value_dim=width,
            ffn_dim=width,
            tokenizer="steps",
        )

    def norm(self, hidden, which="next"):
        return hidden

    def forward(self, batch, **_):
        x = batch.values  # [B, T, 1]
        inner = x.expand(-1, -1, self.config.dim)
        vector = x[:, : self.config.dim, 0]
        noise = torch.sin(1e4 * vector)
        first = torch.cat((noise[:, None], inner, noise[:, None]), 1)
        last = torch.cat((vector[:, None], inner, noise[:, None]), 1)
        eos = torch.full((len(x),), x.shape[1] + 1)
        return Encoded(None, None, None, (first, last), None, None, eos)


class Head(torch.nn.Module):
    """Says what the window holds: probabilities, or a value."""

    readout, layers, context = "sos", "last", None

    def __init__(self, columns):
        super().__init__()
        self.columns = columns

    def predict(self, batch):
        out = batch.values[:, : self.columns, 0]
        return out[:, 0] if self.columns == 1 else out


def make_run(name, model, windows, head=None, *, folder=None, **record):
    """A run that holds a model, windows and a head in memory; `record` are fields of its
    `run.json`.
    """
    record = {
        "settings": Settings(),
        "kind": "pretrain" if head is None else "finetune",
        "data": (),
        **record,
    }
    one = Run(
        Path(folder or f"no-folder-of-{name}"),
        RunRecord.model_construct(run=name, **{"model": "bitimelygpt", **record}),
        "data",
        lambda _: windows,
    )
    vars(one).update(_windows=windows, _model=model, _head=head)
    if head is not None and not hasattr(head, "model"):
        object.__setattr__(head, "model", model)
    return one


def run(windows, head=None, name="planted", folder=None, **record):
    return make_run(
        name,
        Reader(),
        windows,
        head,
        folder=folder,
        **{
            "notices": ("leak_free is false.",),
            "data": [
                RunData(
                    name="planted",
                    dataset="planted",
                    fingerprint="f",
                    class_names=windows.class_names,
                )
            ],
            **record,
        },
    )


def classes(n_subjects=16, each=20, length=12, spread=0.3, seed=0):
    """Two classes that the first two samples tell; every subject has both."""
    rng = np.random.default_rng(seed)
    subjects = np.repeat(np.arange(n_subjects), each)
    target = np.tile(np.arange(2), len(subjects) // 2)
    values = rng.normal(size=(len(subjects), length, 1))
    values[:, 0, 0] = (2.0 * target - 1) + spread * rng.normal(size=len(subjects))
    return Windows(values, target, subjects)
