"""Training step and inference of the models beside their reference implementations, at equal
dimensions and on the same input.

    pip install -c <(grep -v huggingface_hub constraints.txt) '.[parity]'  # an environment of its own: pypots 1.5 wants transformers below 5
    python benchmarks/peers.py                     # preset tiny, a minute
    python benchmarks/peers.py --preset 7.5m --rows 4 --length 500 --layers 4

A step is forward, backward and AdamW; float32, one thread, both sides in one process and in turns,
medians of CPU time. The references are those of `transformers` (GPT-2, PatchTST with its own
masking) and PyPOTS (TS2Vec with its loss, GRU-D, TimesNet, Autoformer, FEDformer). PyPOTS has no
mTAND; its SeFT is another model (a set transformer), and its RAINDROP needs compiled extensions:
these have no peer.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from side_by_side import Row, make_parser, report, skip, time_calls
from torch import Tensor, nn

from bitimely_core import models, objectives
from bitimely_core.models.adapters import TimedRows
from bitimely_core.types import Batch
from bitimely_core.zoo.gru_d import carry_forward, compute_gaps
from bitimely_core.zoo.ts2vec import compute_hierarchical_loss

CHANNELS = 7
# what is trained, its loss, its forward pass
Side = tuple[nn.Module, Callable[[], Tensor], Callable[[], object]]


def list_sizes(args: argparse.Namespace) -> dict[str, Any]:
    """What ours is built with."""
    return {
        "preset": args.preset,
        "channels": CHANNELS,
        "length": args.length,
        **({"layers": args.layers} if args.layers else {}),
    }


def make_gpt(args: argparse.Namespace, x: Tensor) -> tuple[Side, Side]:
    """Next patch: ours with [SOS] and [EOS], two positions more than theirs."""
    from transformers import GPT2Config, GPT2Model

    ours = models.build("gpt", **list_sizes(args), tokenizer="patch")
    c, batch, objective = ours.config, Batch(x), objectives.get("next")
    tokens = ours.adapter.tokenizer(batch)[0]
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), c.dropout)
    config = GPT2Config(
        n_embd=c.dim,
        n_layer=c.layers,
        n_head=c.heads,
        n_inner=c.ffn_dim,
        n_positions=tokens.shape[1],
        vocab_size=2,
        **drop,
    )
    width = tokens.shape[2]
    theirs = nn.ModuleDict(
        {
            "into": nn.Linear(width, c.dim),
            "model": GPT2Model(config),
            "out": nn.Linear(c.dim, width),
        }
    )

    def forward() -> Tensor:
        return theirs["out"](
            theirs["model"](inputs_embeds=theirs["into"](tokens), use_cache=False).last_hidden_state
        )

    return (
        (ours, lambda: objective(ours, batch)["loss"], lambda: ours.output(ours(batch).hidden[-1])),
        (theirs, lambda: (forward()[:, :-1] - tokens[:, 1:]).square().mean(), forward),
    )


def make_patchtst(args: argparse.Namespace, x: Tensor) -> tuple[Side, Side]:
    """Masked patches; each side draws its own."""
    from transformers import PatchTSTConfig, PatchTSTForPretraining

    ours = models.build("patchtst", **list_sizes(args))
    c, batch, objective = ours.config, Batch(x), objectives.get("masked-patches")
    config = PatchTSTConfig(
        num_input_channels=CHANNELS,
        context_length=args.length,
        patch_length=c.patch,
        patch_stride=c.patch,
        d_model=c.dim,
        num_attention_heads=c.heads,
        num_hidden_layers=c.layers,
        ffn_dim=c.ffn_dim,
        scaling="std",
        do_mask_input=True,
        mask_type="random",
        random_mask_ratio=0.4,
        **dict.fromkeys(("ff_dropout", "path_dropout", "positional_dropout"), c.dropout),
    )
    theirs = PatchTSTForPretraining(config)
    return (
        (ours, lambda: objective(ours, batch)["loss"], lambda: ours.output(ours(batch).hidden[-1])),
        (theirs, lambda: theirs(past_values=x).loss, lambda: theirs(past_values=x)),
    )


def make_ts2vec(args: argparse.Namespace, x: Tensor) -> tuple[Side, Side]:
    """Two views of the full window, half of the timesteps hidden, and the hierarchical loss."""
    from pypots.nn.modules.ts2vec import TS2VecEncoder
    from pypots.nn.modules.ts2vec.losses import hierarchical_contrastive_loss

    ours = models.build("ts2vec", **list_sizes(args))
    c, batch = ours.config, Batch(x)
    theirs = TS2VecEncoder(CHANNELS, c.dim, c.ffn_dim, c.layers)

    def compute_loss() -> Tensor:
        first, second = (
            ours(batch, hide=torch.rand(x.shape[:2]) < 0.5).hidden[-1] for _ in range(2)
        )
        return sum(compute_hierarchical_loss(first, second)[:2], start=torch.zeros(()))

    return (
        (ours, compute_loss, lambda: ours(batch).hidden[-1]),
        (
            theirs,
            lambda: hierarchical_contrastive_loss(theirs(x.clone()), theirs(x.clone())),
            lambda: theirs(x.clone()),
        ),
    )


def make_gru_d(args: argparse.Namespace, x: Tensor) -> tuple[Side, Side]:
    """Half of the values missing; the mean square of the last state. Both with the cell of PyPOTS
    (`model.cell=concat`).
    """
    from pypots.nn.modules.grud.backbone import BackboneGRUD

    ours = models.build("gru-d", **list_sizes(args), cell="concat")
    hidden = ours.config.dim
    mask = torch.rand(x.shape) < 0.5
    batch = Batch(torch.where(mask, x, 0.0), mask=mask)
    times = torch.arange(x.shape[1]).expand(len(x), -1).float()
    rows = TimedRows(batch.values, mask, times, torch.ones(x.shape[:2], dtype=torch.bool))
    mean = torch.zeros(CHANNELS)
    given = (
        rows.values,
        mask.float(),
        compute_gaps(rows) / args.length,
        mean,
        carry_forward(rows, mean),
    )
    theirs = BackboneGRUD(x.shape[1], CHANNELS, hidden)
    return (
        (ours, lambda: ours(batch).pooled.square().mean(), lambda: ours(batch).pooled),
        (theirs, lambda: theirs(*given)[1].square().mean(), lambda: theirs(*given)[1]),
    )


def _make_encoders(
    name: str,
    args: argparse.Namespace,
    x: Tensor,
    theirs: Callable[[Any], nn.Module],
    **options: Any,
) -> tuple[Side, Side]:
    """Both encoders on the same embedded timesteps."""
    ours: Any = models.build(name, **list_sizes(args), **options)
    given = torch.randn(len(x), args.length, ours.config.dim)
    other = theirs(ours.config)

    def forward() -> Tensor:
        found = other(given)
        return found[0] if isinstance(found, tuple) else found

    return (
        (
            ours,
            lambda: ours.encode_rows(given)[-1].square().mean(),
            lambda: ours.encode_rows(given)[-1],
        ),
        (other, lambda: forward().square().mean(), forward),
    )


def make_timesnet(args: argparse.Namespace, x: Tensor) -> tuple[Side, Side]:
    """Ours with periods of each window by itself, theirs common to the batch."""
    from pypots.nn.modules.timesnet import BackboneTimesNet

    return _make_encoders(
        "timesnet",
        args,
        x,
        lambda c: BackboneTimesNet(
            c.layers, args.length, 0, c.top_periods, c.dim, c.ffn_dim, c.kernels
        ),
    )


def make_autoformer(args: argparse.Namespace, x: Tensor) -> tuple[Side, Side]:
    """Ours with lags of each window by itself, theirs in training common to the batch."""
    from pypots.nn.modules.autoformer import AutoformerEncoder

    return _make_encoders(
        "autoformer",
        args,
        x,
        lambda c: AutoformerEncoder(
            c.layers, c.dim, c.heads, c.ffn_dim, c.lag_factor, 25, c.dropout, "gelu"
        ),
    )


def make_fedformer(args: argparse.Namespace, x: Tensor) -> tuple[Side, Side]:
    """Random modes, one Fourier block of 8 heads (PyPOTS has no other number) for all layers."""
    from pypots.nn.modules.fedformer import FEDformerEncoder

    def build_encoder(c: Any) -> nn.Module:
        return FEDformerEncoder(
            args.length,
            c.layers,
            c.dim,
            8,
            c.ffn_dim,
            25,
            c.dropout,
            "Fourier",
            c.modes,
            "random",
            "gelu",
        )

    return _make_encoders("fedformer", args, x, build_encoder, heads=8, moving_average=(25,))


PEERS = {
    "transformers": {"gpt": make_gpt, "patchtst": make_patchtst},
    "pypots": {
        "ts2vec": make_ts2vec,
        "gru-d": make_gru_d,
        "timesnet": make_timesnet,
        "autoformer": make_autoformer,
        "fedformer": make_fedformer,
    },
}


def measure_sides(sides: tuple[Side, Side], rounds: int) -> dict[str, float]:
    """Median CPU seconds of a step and of a forward pass of each side."""
    calls: dict[str, Callable[[], object]] = {}
    for whose, (module, loss, forward) in zip(("ours", "theirs"), sides, strict=True):
        optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-4)

        def step(module: nn.Module = module, loss: Any = loss, optimizer: Any = optimizer) -> None:
            module.train()
            optimizer.zero_grad(set_to_none=True)
            loss().backward()
            optimizer.step()

        def infer(module: nn.Module = module, forward: Any = forward) -> None:
            module.eval()
            with torch.no_grad():
                forward()

        calls |= {f"{whose} step": step, f"{whose} forward": infer}
    return time_calls(calls, rounds)


def compare(packages: list[str], options: argparse.Namespace) -> Iterator[Row]:
    """A step and a forward pass of each model beside its reference."""
    for package in packages:
        for name, make in PEERS[package].items():
            if options.models and name not in options.models:
                continue
            torch.manual_seed(0)
            with (
                Path(os.devnull).open("w") as nowhere,
                contextlib.redirect_stdout(nowhere),
                contextlib.redirect_stderr(nowhere),
            ):
                sides = make(options, torch.randn(options.rows, options.length, CHANNELS))
            seconds = measure_sides(sides, options.rounds)
            for what in ("step", "forward"):
                times = seconds[f"theirs {what}"] / seconds[f"ours {what}"]
                yield Row(figure=f"{name}, {what}", peer=package, value=times, least=1.0)


def main() -> int:
    """Measure what is installed."""
    parser = make_parser(__doc__, "two rows, one round")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=500)
    parser.add_argument("--layers", type=int, help="instead of the preset's")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    if options.quick:
        options.rows, options.rounds = 2, 1
    packages = [name for name in PEERS if importlib.util.find_spec(name) is not None]
    if not packages:
        return skip(f"{' and '.join(PEERS)} are not installed: pip install 'bitimely[parity]'")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["HOME"] = tempfile.mkdtemp()  # PyPOTS writes a file there when it is imported
    title = f"preset {options.preset}, {options.rows} windows of {options.length} samples a step"
    return report(title, compare(packages, options), options)


if __name__ == "__main__":
    sys.exit(main())
