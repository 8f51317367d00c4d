"""ONNX graphs in ONNX Runtime against the models, over batch sizes and lengths that no example
had.
"""

import builtins
import copy
import importlib.util
import json
import logging

import numpy as np
import pytest
import torch
from planted import lively, seeded, tiny
from small import VERBS, copy_data, find_workspace

import bitimely
from bitimely_cli.main import main
from bitimely_core import heads, onnx_graph
from bitimely_core.errors import UserError
from bitimely_core.types import Batch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def silent():
    """The exporter logs every step of its tracing, of which pytest keeps a formatted copy."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


needs_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxruntime", "onnxscript")),
    reason="extra onnx",
)
LENGTH = 96


def run_graph(data, values):
    import onnxruntime

    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    assert [axis if isinstance(axis, int) else None for axis in session.get_inputs()[0].shape] == [
        None,
        None,
        3,
    ]
    return dict(
        zip(
            [one.name for one in session.get_outputs()],
            session.run(None, {"values": values.numpy()}),
            strict=True,
        )
    )


def draw(rows, length, *, gaps=False):
    values = torch.randn(rows, length, 3, generator=seeded(rows + length))
    if gaps:
        values[0, length // 2 :] = torch.nan  # a shorter row
        values[:, 3, 1] = torch.nan
    return values


SHAPES = [(1, 96, False), (5, 40, False), (3, 61, True), (2, 17, True)]
KINDS = [
    *((name, {}) for name in onnx_graph.MODELS),
    ("timelygpt", {"tokenizer": "patch", "xpos_scale": True, "temporal_conv": "causal"}),
    (
        "bitimelygpt",
        {"tokenizer": "steps", "retention_norm": "rms", "decay": {"kind": "learnable"}},
    ),
    ("patchtst", {"revin": False}),
]


@needs_onnx
@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), KINDS)
def test_a_graph_is_the_model_for_any_batch_and_length(name, options):
    """To 1e-5 of the largest entry, or to the model's own rounding in float32; states and vector,
    missing samples, shorter rows.
    """
    model = lively(tiny(name, layers=2, length=LENGTH, **options), std=0.08).float()
    data = onnx_graph.encode_onnx(model)
    wanted, wide = onnx_graph.OnnxModel(model), onnx_graph.OnnxModel(model).double()
    # learned positions end with the windows
    longer = [] if name in {"gpt", "gpt-baar", "patchtst"} else [(2, 700, True)]
    for rows, length, gaps in (*SHAPES, *longer):
        values = draw(rows, length, gaps=gaps)
        found = run_graph(data, values)
        with torch.no_grad():
            outputs = dict(zip(("states", "vector"), wanted(values), strict=True))
            exact = dict(zip(("states", "vector"), wide(values.double()), strict=True))
            own = model.norm(model(values).hidden[-1])
        # in the model's own form of retention
        for part, expected in {**outputs, "states": own}.items():
            assert found[part].shape == expected.shape
            rounding = float((expected - exact[part]).abs().max())
            within = max(1e-5 * float(expected.abs().max()), 2 * rounding)
            assert rounding < 1e-4 * float(expected.abs().max())
            np.testing.assert_allclose(found[part], expected.numpy(), rtol=0, atol=within)


HEADS = [
    ("lstm", {"task": "regression", "outputs": 2}, {}),
    ("patchtst", {"task": "regression", "outputs": 1}, {}),
    ("gpt", {"task": "multilabel", "outputs": 3, "readout": "mean"}, {"tokenizer": "patch"}),
    ("bitimelygpt", {"task": "classification", "outputs": 4, "layers": "last-two"}, {}),
    (
        "timelygpt",
        {"task": "classification", "outputs": 1},
        {"tokenizer": "patch", "stride": 3, "channel_independent": True},
    ),
]


@needs_onnx
@pytest.mark.slow
@pytest.mark.parametrize(("name", "head", "options"), HEADS)
def test_the_graph_of_a_head_is_its_prediction(name, head, options):
    """Of every task, of one output and of several; rows without any sample, and samples that are
    missing on the left.
    """
    model = lively(tiny(name, layers=2, length=LENGTH, **options), std=0.08).float()
    torch.manual_seed(0)
    head = heads.Head(model, **head).eval()
    torch.nn.init.normal_(head.target_mean)
    torch.nn.init.uniform_(head.target_std, 1.0, 3.0)
    data, wide = onnx_graph.encode_onnx(head), copy.deepcopy(head).double()
    for rows, length, gaps in SHAPES:
        values = draw(rows, length, gaps=gaps)
        values[-1, : length // 4] = torch.nan
        if gaps:
            values[-1] = torch.nan
        missing = values.isnan()
        with torch.no_grad():
            expected = head.predict(values).numpy()
            exact = wide.predict(Batch(values.nan_to_num().double(), mask=~missing)).numpy()
        found = run_graph(data, values)["prediction"]
        assert (
            found.shape
            == expected.shape
            == ((rows,) if (head.task, head.outputs) == ("regression", 1) else (rows, head.outputs))
        )
        np.testing.assert_allclose(
            found, expected, rtol=0, atol=1e-5 * max(1.0, abs(expected).max())
        )
        np.testing.assert_allclose(found, exact, rtol=0, atol=1e-4 * max(1.0, abs(exact).max()))


@needs_onnx
@pytest.mark.slow
def test_a_shared_run_holds_the_graph_of_its_prediction(tmp_path):
    """By the command line; the other files of the folder are those of an export without it."""
    home = copy_data(tmp_path / "home")
    for verb in ("pretrain", "finetune"):
        assert main([*VERBS[verb], "-w", str(home)]) == 0
    assert main([*VERBS["export"], "-w", str(home), "--out", str(tmp_path / "plain")]) == 0
    assert (
        main(
            [
                *VERBS["export"],
                "-w",
                str(home),
                "--format",
                "onnx",
                "--out",
                str(tmp_path / "graph"),
            ]
        )
        == 0
    )
    plain, graph = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("plain", "graph")
    )
    assert set(graph) - set(plain) == {"model.onnx"}
    assert all(graph[name] == plain[name] for name in plain if name != "manifest.json")
    assert "model.onnx" in json.loads(graph["manifest.json"])["files"]
    assert bitimely.verify(tmp_path / "graph")["exit_code"] == 0
    head = heads.load(tmp_path / "graph")
    values = torch.randn(
        4, head.model.config.length, head.model.config.channels, generator=seeded()
    )
    import onnxruntime

    found = onnxruntime.InferenceSession(graph["model.onnx"]).run(
        ["prediction"], {"values": values.numpy()}
    )[0]
    with torch.no_grad():
        np.testing.assert_allclose(found, head.predict(values).numpy(), rtol=0, atol=1e-5)
    assert main([*VERBS["export"], "-w", str(home), "--out", str(tmp_path / "graph")]) == 0, (
        "an export over one with a graph"
    )


@needs_onnx
@pytest.mark.parametrize(
    ("name", "options"), [("timesnet", {}), ("timelygpt", {"tokenizer": "codes", "codes": 20})]
)
def test_what_has_no_graph_is_refused(name, options):
    with pytest.raises(UserError) as caught:
        onnx_graph.encode_onnx(tiny(name, **options))
    assert (caught.value.exit_code, caught.value.field) == (2, "format")


def test_without_the_extra_one_line_says_how_to_get_it(monkeypatch):
    load = builtins.__import__

    def refuse(name, *given, **named):
        if name.split(".")[0] == "onnxruntime":
            raise ImportError(name, name=name)
        return load(name, *given, **named)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UserError, match=r"bitimely\[onnx\]") as caught:
        onnx_graph.encode_onnx(tiny("timelygpt"))
    assert caught.value.exit_code == 2


def test_an_unknown_format_is_refused(tmp_path):
    argv = ["export", "plain", "--format", "onxn", "-w", str(find_workspace())]
    assert main([*argv, "--out", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()
