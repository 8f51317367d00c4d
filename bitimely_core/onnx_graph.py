"""Writes a model of signals as an ONNX graph with free batch and length (extra `onnx`).

ONNX Runtime must compute what the model does before the graph is handed over.

    values [batch, length, channels] float32, NaN = missing or padding on the right, normalised as
        the windows of the training
    -> prediction     of a fine-tuned model: what `Head.predict` returns
    -> states, vector of a model without a head: the last layer behind the final norm
                      [batch, positions, D], and the model's own readout

Retention is the parallel form there, as an N x N matrix: the same numbers for any length. Learned
positions limit the length to that of the training windows; the weights are those of the run, in
float32.

Legend: B batch, T timesteps, V channels, D width.
"""

from __future__ import annotations

import copy
import warnings
from types import ModuleType

import torch
from torch import Tensor, nn

from bitimely_core.errors import integrity_error, usage_error
from bitimely_core.heads import Head, compute_vectors
from bitimely_core.models.base import Model
from bitimely_core.models.layers import Retention
from bitimely_core.registry import models
from bitimely_core.system_errors import raise_system_error
from bitimely_core.types import Batch

MODELS = (
    "bitimelygpt",
    "timelygpt",
    "timelybert",
    "gpt",
    "gpt-baar",
    "lstm",
    "patchtst",
    "resnet",
    "inceptiontime",
)
FILE = "model.onnx"
WITHIN = 1e-4  # of the largest output: what the check before the file is written allows


class OnnxModel(nn.Module):
    """What the graph computes."""

    def __init__(self, model: Model | Head) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).float().cpu().eval().requires_grad_(requires_grad=False)
        for layer in self.modules():
            if isinstance(layer, Retention):
                layer.config = layer.config.model_copy(
                    update={"form": "parallel", "core_precision": "fp32"}
                )

    def forward(self, values: Tensor) -> tuple[Tensor, ...]:
        """[B, T, V] -> the outputs."""
        missing = values.isnan()
        batch = Batch(values.masked_fill(missing, 0.0), mask=~missing)
        if isinstance(self.model, Head):
            return (self.model.predict(batch),)
        backward = self.model.directions[-1:] == ("backward",)
        states = self.model.norm(self.model(batch).hidden[-1], "previous" if backward else "next")
        return states, compute_vectors(
            self.model, batch, models[self.model.config.name].facts.readout
        )

    @property
    def outputs(self) -> tuple[str, ...]:
        """Their names."""
        return ("prediction",) if isinstance(self.model, Head) else ("states", "vector")


def load_onnx(field: str) -> tuple[ModuleType, ModuleType]:
    """`onnx` and `onnxruntime`. Raises UserError (config, exit 2) naming `field` where one of the
    extra's three packages is missing.
    """
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401  # torch.onnx writes through it
    except ImportError as error:
        raise_system_error(error)
        raise usage_error(
            f"{error.name or 'onnx'} is not installed",
            "expected it for an ONNX graph",
            "Install it with: pip install 'bitimely[onnx]'",
            field=field,
        ) from error
    return onnx, onnxruntime


def encode_onnx(model: Model | Head, *, field: str = "format") -> bytes:
    """The graph of a model of signals as the bytes of an .onnx file.

    Raises UserError: config (exit 2) for a model of events, one that is not in `MODELS`, or without
    the extra; integrity (exit 5) where ONNX Runtime does not compute what the model does.
    """
    onnx, runtime = load_onnx(field)
    inner = model.model if isinstance(model, Head) else model
    if inner.config.name not in MODELS:
        raise usage_error(
            f"no ONNX graph of {inner.config.name}",
            f"expected one of {', '.join(MODELS)}",
            field=field,
        )
    if inner.config.tokenizer == "codes":
        raise usage_error(
            "no ONNX graph of a model of events",
            "expected a model of signals",
            "share the folder without it",
            field=field,
        )
    if isinstance(model, Head) and model.context is not None:
        raise usage_error(
            "no ONNX graph of a run with context",
            "expected a run that reads each window alone",
            "Share the folder without it, or train without --context",
            field=field,
        )
    module, length = OnnxModel(model).eval(), inner.config.length
    draw = torch.Generator().manual_seed(0)
    example = torch.randn(2, length, inner.config.channels, generator=draw)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about itself
        free = {"values": {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}}
        names = {"input_names": ["values"], "output_names": list(module.outputs)}
        program = torch.onnx.export(
            module,
            (example,),
            dynamo=True,
            dynamic_shapes=free,
            verbose=False,
            **names,  # type: ignore[arg-type]
        )
    assert program is not None
    proto = program.model_proto
    _name_axes(proto)
    onnx.checker.check_model(proto)
    data: bytes = proto.SerializeToString()
    least = inner.config.patch if inner.config.crop == "start" else 1
    _check_runtime(
        runtime,
        data,
        module,
        torch.randn(3, max(length * 2 // 3, least), inner.config.channels, generator=draw),
    )
    return data


def _name_axes(proto: object) -> None:
    """Free axes by name: the exporter states the lengths of the example for some outputs."""
    batch, length = "batch", "length"
    for value in (*proto.graph.input, *proto.graph.output):  # type: ignore[attr-defined]
        axes = value.type.tensor_type.shape.dim
        free = {"values": (batch, length), "states": ("rows", "positions")}.get(
            value.name, (batch,)
        )
        for axis, name in zip(axes, free, strict=False):
            axis.dim_param = name


@torch.no_grad()
def _check_runtime(runtime: ModuleType, data: bytes, module: OnnxModel, values: Tensor) -> None:
    """Compare with the model itself on another batch size and length than those of the example,
    with missing samples.
    """
    values[0, len(values[0]) // 2 :] = torch.nan
    values[1, ::5, 0] = torch.nan
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    session = runtime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    outputs = session.run(None, {"values": values.numpy()})
    for name, ours, theirs in zip(module.outputs, module(values), outputs, strict=True):
        off = float((ours - torch.from_numpy(theirs)).abs().max() / ours.abs().max().clamp(min=1.0))
        if not off <= WITHIN:
            raise integrity_error(
                FILE,
                f"{name} differs by {off:.1e} of its largest entry in ONNX Runtime",
                hint="Export without onnx",
            )
