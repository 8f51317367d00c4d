"""What one training step asks of a GPU: launches, bytes, saved activations, waits of the host. On
fake tensors: no GPU, no memory, no numbers.

    python count_step.py [--model bitimelygpt] [--preset 18m] [--batch 64] [--set tokenizer=patch
    ...] [--precision bf16] [--core fp32] [--json] [-v]
    python count_step.py --table        # conv and patch 8, in fp32, bf16 with fp32 core, bf16 with bf16 core

It runs the loop's own step (`loop._run_step`: objective, backward, clipping, AdamW) on a fake
`cuda` device under eager rules: one launch an operation that is not a view, no fusion. What it
cannot see: fusion by a compiler, a Triton kernel's inside (an operator counts as one launch of its
inputs and outputs), caches, time. The estimate of time takes for every launch max(bytes / 4.0 TB/s,
FLOP / rate, 3 us) with the rates below; the host needs 5 us a launch. Elementwise = everything that
is no matrix product, convolution or attention kernel. A size is counted once where a tensor is
expanded.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import re
import sys
import unittest.mock
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import pretend_device  # noqa: F401  before torch: its device guard, without which autograd refuses a fake cuda tensor
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

# bytes/s of an H200 in practice, seconds of a tiny kernel, seconds of the host a launch
BANDWIDTH, SMALLEST, LAUNCH = 4.0e12, 3e-6, 5e-6
RATES = {
    ("mm", "bfloat16"): 600e12,
    ("bmm", "bfloat16"): 150e12,
    ("mm", "float32"): 50e12,
    ("bmm", "float32"): 40e12,
}  # FLOP/s; float32 without TF32
PEAK = 989e12  # dense bf16
FREE = {
    "device",
    "is_pinned",
    "view",
    "_unsafe_view",
    "expand",
    "transpose",
    "permute",
    "slice",
    "select",
    "unsqueeze",
    "squeeze",
    "detach",
    "alias",
    "t",
    "as_strided",
    "split",
    "split_with_sizes",
    "unbind",
    "chunk",
    "unfold",
    "diagonal",
    "_reshape_alias",
    "view_as_real",
    "view_as_complex",
    "real",
    "_conj",
    "resolve_conj",
    "lift_fresh",
    "is_same_size",
    "sym_size",
    "sym_stride",
    "sym_numel",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}
PRODUCTS = {
    "retention": "bmm",
    "retention_backward": "bmm",
    "mm": "mm",
    "addmm": "mm",
    "bmm": "bmm",
    "baddbmm": "bmm",
    "convolution": "mm",
    "convolution_backward": "mm",
}


def place() -> str:
    """file:line of the innermost frame of bitimely."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/bitimely_core/" in name:
            return f"{name.split('/bitimely_core/')[1]}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "autograd"


def size(x: torch.Tensor) -> int:
    count = x.element_size()
    for length, stride in zip(x.shape, x.stride(), strict=True):
        count *= length if stride else 1
    return count


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        # name, kind (mm, bmm, "" = elementwise), bytes, FLOP, dtype
        self.launches: list[tuple[str, str, int, int, str]] = []
        self.sites: collections.Counter[str] = collections.Counter()
        self.waits: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        results = [x for x in tree_flatten(out)[0] if isinstance(x, torch.Tensor)]
        if (
            name in FREE
            or func._schema.name.startswith("prim")
            or not any(x.device.type == "cuda" for x in [*tensors, *results])
        ):
            return out
        moved = sum(size(x) for x in [*tensors, *results] if x.device.type == "cuda")
        kind, flop = PRODUCTS.get(name, ""), 0
        if name in {"mm", "addmm", "bmm", "baddbmm"}:
            flop = 2 * results[0].numel() * tensors[-1].shape[-2]
        elif name == "convolution":
            flop = 2 * results[0].numel() * tensors[1].numel() // tensors[1].shape[0]
        elif name == "convolution_backward":
            flop = 4 * tensors[0].numel() * tensors[2].numel() // tensors[2].shape[0]
        self.launches.append(
            (name, kind, moved, flop, str(results[0].dtype)[6:] if results else "")
        )
        self.sites[re.sub(r":\d+", "", place())] += moved
        if name in {"nonzero", "masked_select", "_unique2", "unique_dim"}:
            self.waits[f"{name} @ {place()}"] += 1
        return out


@contextlib.contextmanager
def pretended(counting: Counting) -> Iterator[None]:
    """A CUDA that is there by name, and reads of a fake tensor's value that are counted and
    answered with something harmless.
    """

    def read(name: str, answer: Any) -> Any:
        def reading(self: Any, *_: Any) -> Any:
            if self.device.type == "cuda":
                counting.waits[f"{name.strip('_')} @ {place()}"] += 1
            return answer(self)

        return reading

    def ones(shape: Any, one: float) -> Any:
        return [ones(shape[1:], one) for _ in range(shape[0])] if len(shape) else one

    answers = {"__bool__": lambda _: True, "__float__": lambda _: 1.0, "__int__": lambda _: 1, "item": lambda _: 1.0, "tolist": lambda x: ones(x.shape, 1.0 if x.is_floating_point() else 1),
               "cpu": lambda x: x.to("cpu")}  # fmt: skip
    with contextlib.ExitStack() as stack:
        cuda: Any = {"_lazy_init": lambda: None, "is_available": lambda: True, "is_bf16_supported": lambda *_: True, "current_device": lambda: 0,
                     "device_count": lambda: 1, "manual_seed": lambda _: None, "is_initialized": lambda: True, "is_current_stream_capturing": lambda: False}  # fmt: skip
        for name, value in cuda.items():
            stack.enter_context(unittest.mock.patch.object(torch.cuda, name, value))
        for name, answer in answers.items():
            stack.enter_context(
                unittest.mock.patch.object(FakeTensor, name, read(name, answer), create=True)
            )
        yield


def count(
    name: str = "bitimelygpt",
    preset: str = "18m",
    batch: int = 64,
    precision: str = "fp32",
    core: str = "fp32",
    objective: str = "",
    **options: Any,
) -> dict[str, Any]:
    """One step between two log lines."""
    from bitimely_core import models, objectives, registry
    from bitimely_core.ops import operator, retention
    from bitimely_core.train import loop, losses
    from bitimely_core.train.optimizer import group_parameters
    from bitimely_core.types import Batch

    shape: dict[str, Any] = models.default_shape(preset)
    if "codes" in shape:
        shape |= {"tokenizer": "codes"}
    elif registry.models[name].facts.tokenizer:
        shape |= {"tokenizer": "conv"}  # the paper's
    with torch.device("meta"):
        model: Any = models.build(
            name, preset=preset, **{**shape, "core_precision": core, **options}
        )
    counting = Counting()
    saved: dict[int, int] = {}
    positions: list[int] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if x.device.type == "cuda":
            saved[storage._cdata] = storage.nbytes()
        return x

    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pretended(counting),
        unittest.mock.patch.object(retention, "check_order"),
        unittest.mock.patch.object(operator, "find_backend", return_value="triton"),
    ):
        for module in model.modules():
            for own in (module._parameters, module._buffers):
                for key, value in own.items():
                    if value is not None:
                        fake = torch.empty(value.shape, dtype=value.dtype, device="cuda")
                        own[key] = torch.nn.Parameter(fake) if own is module._parameters else fake
            if type(module).__name__ in {"Retention", "Attention"}:
                module.register_forward_pre_hook(
                    lambda _, inputs: positions.append(inputs[0].shape[1])
                )
        T = shape["length"]
        if "codes" in shape:
            data = Batch(
                torch.ones(batch, T, dtype=torch.long),
                torch.ones(batch, T),
                torch.ones(batch, T, dtype=torch.bool),
            )
        else:
            data = Batch(torch.randn(batch, T, shape["channels"]))
        groups = group_parameters(model, 0.01)
        names = [n for group in groups for n in group.pop("names")]
        optimizer = torch.optim.AdamW(groups, lr=1e-4, foreach=False)
        optimizer.step = lambda: None  # type: ignore[method-assign,assignment]  # fused on CUDA: added below
        config = loop.TrainConfig(device="cuda", precision=precision, log_every=1000, steps=1000)

        class Steps:
            steps, size = 1000, batch

        objectives_known = objectives.get(objective or registry.models[name].facts.objective)
        state = loop.TrainingState(
            model=model, objective=objectives_known, batches=Steps(), validation=None, config=config, total=1000,  # type: ignore[arg-type]
            device=torch.device("cuda", 0), optimizer=optimizer, names=names, home=None, identity={}, log=None, step=10,
        )  # fmt: skip
        zero = torch.zeros((), device="cuda")
        state.on_device = losses.DeviceLosses(zero, zero.new_full((4,), -1.0), zero.new_zeros(4))
        scale = model.target_scale
        object.__setattr__(model, "scale_seen", (scale, scale._version, True))
        with counting, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loop._run_step(state, iter([data]))
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    tensors = sum(1 for _ in model.parameters())
    done = [
        *counting.launches,
        *[("adamw", "", 7 * weights // max(tensors // 320 + 1, 1), 0, "float32")]
        * (tensors // 320 + 1),
    ]
    seconds = sum(
        max(b / BANDWIDTH, f / RATES.get((k, d), 50e12) if f else 0, SMALLEST)
        for _, k, b, f, d in done
    )
    host, flop = LAUNCH * len(done), sum(f for *_, f, _ in done)
    width, layers = (positions[0], len(positions)) if positions else (T, model.config.layers)
    elementwise = sum(b for _, k, b, _, _ in done if not k)
    step = max(seconds, host)
    return {
        "model": name, "preset": preset, "batch": batch, "precision": precision, "core": core, **options, "parameters": weights // 4, "positions": width, "layers": layers,
        "launches": len(done), "launches_products": sum(bool(k) for _, k, *_ in done),
        "elementwise_gb": elementwise / 1e9, "products_gb": sum(b for _, k, b, _, _ in done if k) / 1e9,
        "elementwise_kb_token_layer": elementwise / batch / width / layers / 1e3,
        "saved_gb": sum(v for k, v in saved.items() if k not in own) / 1e9,
        "tflop": flop / 1e12, "host_waits": dict(counting.waits),
        "estimate_device_ms": seconds * 1e3, "estimate_host_ms": host * 1e3, "estimate_windows_s": batch / step, "estimate_mfu": flop / step / PEAK,
        "operations": [(n, c, round(b / 1e9, 2)) for n, (c, b) in _largest(done)], "sites": [(k, round(v / 1e9, 2)) for k, v in counting.sites.most_common(12)],
    }  # fmt: skip


def _largest(done: list[Any], limit: int = 16) -> list[tuple[str, tuple[int, int]]]:
    sums: dict[str, tuple[int, int]] = {}
    for name, _, moved, _, _ in done:
        seen, total = sums.get(name, (0, 0))
        sums[name] = (seen + 1, total + moved)
    return sorted(sums.items(), key=lambda kv: -kv[1][1])[:limit]


def show(found: dict[str, Any], verbose: bool) -> None:
    f = found
    options = " ".join(
        f"{k}={v}" for k, v in f.items() if k in {"tokenizer", "ffn", "patch", "stride"}
    )
    print(
        f"{f['model']} {f['preset']} B{f['batch']} {options} {f['precision']} core {f['core']}: {f['parameters'] / 1e6:.1f} M parameters, {f['positions']} positions x {f['layers']} layers\n"
        f"  launches {f['launches']} ({f['launches_products']} products); elementwise {f['elementwise_gb']:.1f} GB = {f['elementwise_kb_token_layer']:.0f} KB a token and layer; "
        f"operands of products {f['products_gb']:.1f} GB; saved {f['saved_gb']:.2f} GB; {f['tflop']:.2f} TFLOP\n"
        f"  waits of the host {sum(f['host_waits'].values())} {f['host_waits']}\n"
        f"  estimate: device {f['estimate_device_ms']:.0f} ms, host {f['estimate_host_ms']:.0f} ms -> {f['estimate_windows_s']:.0f} windows/s, MFU {f['estimate_mfu']:.1%}",
        flush=True,
    )
    if verbose:
        print("  by operation (launches, GB):", *f["operations"], sep="\n    ")
        print("  by place (GB):", *f["sites"], sep="\n    ")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("model", "bitimelygpt"),
        ("preset", "18m"),
        ("precision", "fp32"),
        ("core", "fp32"),
        ("objective", ""),
    ):
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--set", nargs="*", default=[])
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("-v", action="store_true", dest="verbose")
    asked = parser.parse_args()
    options = dict(text.split("=", 1) for text in asked.set)
    kinds = [(asked.precision, asked.core)]
    tokenizers: list[dict[str, Any]] = [options]
    if asked.table:
        kinds, tokenizers = (
            [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")],
            [{"tokenizer": "conv"}, {"tokenizer": "patch"}],
        )
    for chosen in tokenizers:
        for precision, core in kinds:
            found = count(
                asked.model,
                asked.preset,
                asked.batch,
                precision,
                core,
                asked.objective,
                **{**chosen, **options},
            )
            print(json.dumps(found)) if asked.json else show(found, asked.verbose)


if __name__ == "__main__":
    main()
