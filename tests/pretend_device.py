"""A pretend `cuda:0` on a torch without CUDA: the numbers of the CPU under the rules of a device.

Import this before torch, then `install()`. Tensors on "cuda" hold a CPU tensor; every operation on
them is checked as CUDA would check it (tensors of two devices, generator of the wrong device, numpy
of a device tensor) and counted: waits for the device, copies to it, float64, operations whose CUDA
form is not deterministic. `PHASE[0]` names what runs; the counters are keyed by (phase, operation @
file function).

Proves: no operation mixes devices, indexes or fills across them, or draws with a generator of
another device; nothing reads a device tensor by numpy; the branches for CUDA run and give the CPU's
loss; where the host waits. Cannot prove: time, memory, order of streams, CUDA's own rounding, TF32,
and kernels that exist on the CPU alone or on CUDA alone. LSTM and GRU cells and layers are written
out in Python.
"""

from __future__ import annotations

import collections
import ctypes
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any


def _guard() -> None:
    """Build guard.cpp once a version of torch (needs g++) and load it before torch is imported:
    torch asks for the hooks only once.
    """
    assert "torch" not in sys.modules, "import pretend_device before torch"
    found = importlib.util.find_spec("torch")
    assert found is not None, "torch is not installed"
    assert found.origin is not None
    home, source = Path(found.origin).parent, Path(__file__).with_name("pretend_guard.cpp")
    version = (home / "version.py").read_bytes()
    if b"+cpu" not in version:
        raise RuntimeError(
            "pretend_device needs a CPU build of torch; this one brings the real CUDA guard"
        )
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pretend_device"
    built = cache / f"guard-{hashlib.sha256(source.read_bytes() + version).hexdigest()[:16]}.so"
    if not built.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cache, suffix=".so", delete=False) as file:
            include = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"]
            command = [
                "g++",
                "-std=c++20",
                "-O1",
                "-fPIC",
                "-shared",
                "-w",
                *include,
                str(source),
                "-o",
                file.name,
            ]
            subprocess.run(command, check=True)
        Path(file.name).replace(built)
    for pattern in ("libgomp*", "libc10.so", "libtorch_cpu.so"):
        for library in sorted((home / "lib").glob(pattern)):
            ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(built), ctypes.RTLD_GLOBAL)


_guard()

import torch  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten  # noqa: E402

CUDA = torch.device("cuda", 0)
PACKAGES = ("bitimely_core", "bitimely_cli")  # whose frames are named in the counters
PHASE = ["?"]
Counter = collections.Counter[Any]
SYNC, COPY, MIX, WIDE, UNSTABLE, OPERATIONS = (collections.Counter() for _ in range(6))

SYNCING = {f"aten::{name}" for name in (
    ["_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive", "equal", "is_nonzero", "bincount", "histc", "multinomial", "_linalg_eigh", "_linalg_svd"]
)}  # fmt: skip
STRICT_SCALARS = {f"aten::{name}" for name in (  # refuse even a CPU tensor of no dimension
    ["cat", "stack", "mm", "bmm", "addmm", "baddbmm", "gather", "index_select", "embedding", "scatter", "scatter_", "index_add_", "scatter_add_"]
)}  # fmt: skip
NOT_DETERMINISTIC = {f"aten::{name}" for name in (
    ["index_add_", "index_add", "scatter_add_", "scatter_add", "put_", "bincount", "histc", "cumsum_backward", "embedding_dense_backward", "reflection_pad1d_backward", "replication_pad1d_backward", "upsample_linear1d_backward", "max_pool2d_with_indices_backward", "_adaptive_avg_pool2d_backward", "kthvalue", "median"]
)}  # fmt: skip
INDEXING = {
    "aten::index",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
    "aten::_unsafe_index",
}


def where() -> str:
    """The innermost frame of the packages, else the autograd thread."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        for package in PACKAGES:
            if f"/{package}/" in name:
                return f"{name.split(f'/{package}/', 1)[1]} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "autograd/" + threading.current_thread().name


class Cuda(torch.Tensor):
    """A tensor on cuda:0 whose numbers are in `inner`."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, requires_grad: bool = False) -> Cuda:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype, layout=inner.layout, device=CUDA, requires_grad=requires_grad,
        )  # fmt: skip

    def __init__(self, inner: torch.Tensor, requires_grad: bool = False) -> None:
        self.inner = inner

    def __repr__(self, **_: Any) -> str:
        return f"Cuda({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    def __deepcopy__(self, memo: Any) -> Any:
        new: Any = Cuda(self.inner.detach().clone())
        if isinstance(self, torch.nn.Parameter) or getattr(self, "_is_param", False):
            new = torch.nn.Parameter(new, self.requires_grad)
        else:
            new.requires_grad_(self.requires_grad)
        memo[id(self)] = new
        return new


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """One operation: check it, count it, do it on the CPU."""
    name = func._schema.name
    flat, spec = tree_flatten((args, kwargs))
    tagged = [x for x in flat if isinstance(x, Cuda)]
    plain = [x for x in flat if isinstance(x, torch.Tensor) and not isinstance(x, Cuda)]
    wants = None if kwargs.get("device") is None else torch.device(kwargs["device"])
    if name == "prim::device":
        return CUDA if tagged else func(*args, **kwargs)
    if not tagged and (wants is None or wants.type != "cuda"):
        return func(*args, **kwargs)
    OPERATIONS[PHASE[0], name] += 1
    _check(name, args, kwargs, tagged, plain, wants)

    args_, kwargs_ = tree_unflatten([x.inner if isinstance(x, Cuda) else x for x in flat], spec)
    if wants is not None:
        kwargs_ = {**kwargs_, "device": torch.device("cpu")}
    if name == "aten::_to_copy":
        kwargs_.pop("non_blocking", None)
    if name == "aten::_conj":
        out = torch.conj_physical(args_[0])
    elif name == "aten::_neg_view":
        out = torch.neg(args_[0])
    else:
        out = REPLACED[name](*args_) if name in REPLACED else func(*args_, **kwargs_)
    if isinstance(out, torch.Tensor):
        out = out.resolve_conj().resolve_neg()
    written = [
        a
        for a, s in zip(args, func._schema.arguments, strict=False)
        if s.alias_info is not None and s.alias_info.is_write
    ]
    returns = func._schema.returns
    if returns and returns[0].alias_info is not None and returns[0].alias_info.is_write:
        if any(isinstance(a, Cuda) and a.shape != a.inner.shape for a in written):
            raise RuntimeError(
                f"pretend_device: {name} changes a shape in place, which it cannot follow"
            )
        if len(returns) == 1:
            return written[0] if written else kwargs.get("out")
    if wants is not None and wants.type != "cuda":
        return out
    return tree_map(
        lambda x: Cuda(x) if isinstance(x, torch.Tensor) and not isinstance(x, Cuda) else x, out
    )


def _check(
    name: str,
    args: Any,
    kwargs: Any,
    tagged: list[Cuda],
    plain: list[torch.Tensor],
    wants: torch.device | None,
) -> None:
    def refuse(text: str) -> RuntimeError:
        MIX[PHASE[0], f"{text} @ {where()}"] += 1
        return RuntimeError(f"{text} ({name} @ {where()})")

    generator = kwargs.get("generator")
    if generator is not None and generator.device.type != "cuda":
        raise refuse(
            f"Expected a 'cuda' device type for generator but found '{generator.device.type}'"
        )
    if any(x.dtype == torch.float64 and x.dim() > 0 for x in tagged):
        WIDE[PHASE[0], f"{name} @ {where()}"] += 1
    if name in NOT_DETERMINISTIC:
        UNSTABLE[PHASE[0], f"{name} @ {where()}"] += 1
    if name in SYNCING and tagged:
        SYNC[PHASE[0], f"{name} @ {where()}"] += 1
    if (
        name in INDEXING
        and isinstance(args[0], Cuda)
        and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    ):
        SYNC[PHASE[0], f"{name} by bool @ {where()}"] += 1
    if name == "aten::repeat_interleave" and kwargs.get("output_size") is None:
        SYNC[PHASE[0], f"{name} @ {where()}"] += 1

    if name == "aten::_to_copy":
        goal = wants.type if wants is not None else "cuda" if tagged else "cpu"
        if tagged and goal == "cpu":
            SYNC[PHASE[0], f"copy to the host @ {where()}"] += 1
        if not tagged and goal == "cuda":
            COPY[
                PHASE[0],
                f"{'non-blocking' if kwargs.get('non_blocking') else 'BLOCKING'} @ {where()}",
            ] += 1
    elif name == "aten::copy_":
        if isinstance(args[0], Cuda) != isinstance(args[1], Cuda):
            counter, what = (
                (COPY, "copy_") if isinstance(args[0], Cuda) else (SYNC, "copy to the host")
            )
            counter[PHASE[0], f"{what} @ {where()}"] += 1
    elif plain and tagged:
        if name in INDEXING:
            if not isinstance(args[0], Cuda):
                raise refuse("a CPU tensor indexed by a tensor on cuda:0")
            COPY[PHASE[0], f"CPU index into cuda @ {where()}"] += 1
            values = args[2] if len(args) > 2 and isinstance(args[2], torch.Tensor) else None
            bad = (
                [values]
                if values is not None and not isinstance(values, Cuda) and values.dim() > 0
                else []
            )
        else:
            bad = [x for x in plain if x.dim() > 0 or name in STRICT_SCALARS]
        if bad:
            shapes = ", ".join(f"{list(x.shape)} {x.dtype}" for x in bad)
            raise refuse(
                f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu: {shapes}"
            )


# Cells whose CUDA path is one fused kernel that the CPU does not have.


def _gru_layers(
    x: Any,
    state: Any,
    weights: Any,
    biases: bool,
    layers: int,
    dropout: float,
    training: bool,
    two: bool,
    batch_first: bool,
) -> Any:
    """`torch.gru` cell by cell: its own form transposes in place, which a wrapper cannot follow."""
    x, last, ways = (x.transpose(0, 1) if batch_first else x), [], 1 + two
    for at in range(layers * ways):
        if at % ways == 0 and at:
            x = torch.cat(states, -1)  # noqa: F821
        states = [] if at % ways == 0 else states  # noqa: F821
        own, h, rows = (
            weights[4 * at : 4 * at + 4] if biases else weights[2 * at : 2 * at + 2],
            state[at],
            [],
        )
        for one in x.flip(0) if at % ways else x:
            h = torch.gru_cell(one, h, *own)
            rows.append(h)
        last.append(h)
        states.append(torch.stack(rows[:: -1 if at % ways else 1]))
    out = torch.cat(states, -1)
    return (out.transpose(0, 1) if batch_first else out), torch.stack(last)


def _lstm(gi: Any, gh: Any, cx: Any, bi: Any = None, bh: Any = None) -> Any:
    gates = gi + gh + (0 if bi is None else bi) + (0 if bh is None else bh)
    i, f, c, o = gates.chunk(4, 1)
    i, f, c, o = i.sigmoid(), f.sigmoid(), c.tanh(), o.sigmoid()
    cy = f * cx + i * c
    return o * cy.tanh(), cy, torch.cat((i, f, c, o), 1)


def _lstm_backward(gh: Any, gc: Any, cx: Any, cy: Any, kept: Any, has_bias: bool) -> Any:
    i, f, c, o = kept.chunk(4, 1)
    t = cy.tanh()
    gh, gc = (torch.zeros_like(cy) if g is None else g for g in (gh, gc))
    d = gc + gh * o * (1 - t * t)
    gates = torch.cat(
        (d * c * i * (1 - i), d * cx * f * (1 - f), d * i * (1 - c * c), gh * t * o * (1 - o)), 1
    )
    return gates, d * f, (gates.sum(0) if has_bias else None)


def _gru(gi: Any, gh: Any, hx: Any, bi: Any = None, bh: Any = None) -> Any:
    (ir, iz, new), (hr, hz, hn) = (
        (gi if bi is None else gi + bi).chunk(3, 1),
        (gh if bh is None else gh + bh).chunk(3, 1),
    )
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (new + r * hn).tanh()
    return n + z * (hx - n), torch.cat((r, z, n, hx, hn), 1)


def _gru_backward(gh: Any, kept: Any, has_bias: bool) -> Any:
    r, z, n, hx, hn = kept.chunk(5, 1)
    dn, dz = gh * (1 - z) * (1 - n * n), gh * (hx - n) * z * (1 - z)
    dr = dn * hn * r * (1 - r)
    gi, g2 = torch.cat((dr, dz, dn), 1), torch.cat((dr, dz, dn * r), 1)
    return gi, g2, gh * z, gi.sum(0) if has_bias else None, g2.sum(0) if has_bias else None


REPLACED = {
    "aten::_thnn_fused_lstm_cell": _lstm,
    "aten::_thnn_fused_lstm_cell_backward_impl": _lstm_backward,
    "aten::_thnn_fused_gru_cell": _gru,
    "aten::_thnn_fused_gru_cell_backward": _gru_backward,
}


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def install() -> None:
    """From here on `cuda` is there, for the whole process; there is no way back."""
    c: Any = torch.cuda
    state = {
        "_lazy_init": None, "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0, "set_device": None, "synchronize": None,
        "set_rng_state": None, "empty_cache": None, "is_bf16_supported": True, "is_current_stream_capturing": False, "get_device_capability": (9, 0),
        "mem_get_info": (130 * 2**30, 139 * 2**30),
    }  # fmt: skip
    for name, value in state.items():
        setattr(c, name, lambda *_, value=value: value)
    c.manual_seed = c.manual_seed_all = lambda seed: torch.default_generator.manual_seed(seed)
    c.get_rng_state = lambda *_: torch.get_rng_state()

    class Properties:
        name, total_memory, major, minor, multi_processor_count = "pretend", 139 * 2**30, 9, 0, 132

    c.get_device_properties = lambda *_: Properties
    torch.inference_mode = lambda mode=True: torch.no_grad()  # type: ignore[assignment,misc]  # no wrapper subclass in inference mode

    copied = torch.nn.Parameter.__deepcopy__
    torch.nn.Parameter.__deepcopy__ = (  # type: ignore[method-assign]
        lambda self, memo: (
            Cuda.__deepcopy__(self, memo) if isinstance(self, Cuda) else copied(self, memo)
        )
    )

    def by_cpu(function: Any) -> Any:
        def made(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
            if device is None or torch.device(device).type != "cuda":
                return function(data, *args, device=device, **kwargs)
            if isinstance(data, Cuda):
                return data.to(kwargs["dtype"]) if kwargs.get("dtype") else data
            return function(data, *args, **kwargs).to(CUDA)

        return made

    fused = torch._VF.gru  # type: ignore[attr-defined]
    torch._VF.gru = lambda x, *given: (_gru_layers if isinstance(x, Cuda) else fused)(x, *given)  # type: ignore[attr-defined]
    torch.as_tensor, torch.tensor = by_cpu(torch.as_tensor), by_cpu(torch.tensor)
    listed, array, numpy = torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.numpy

    def tolist(self: Any) -> Any:
        if not isinstance(self, Cuda):
            return listed(self)
        SYNC[PHASE[0], f"tolist @ {where()}"] += 1
        return listed(self.inner)

    def refusing(function: Any) -> Any:
        def converted(self: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(self, Cuda):
                MIX[PHASE[0], f"numpy @ {where()}"] += 1
                raise TypeError(f"can't convert cuda:0 device type tensor to numpy ({where()})")
            return function(self, *args, **kwargs)

        return converted

    torch.Tensor.tolist = tolist  # type: ignore[method-assign]
    torch.Tensor.numpy, torch.Tensor.__array__ = refusing(numpy), refusing(array)  # type: ignore[method-assign]
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    _Mode().__enter__()
