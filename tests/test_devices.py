"""Where and how a training computes: devices, arithmetic, compiled and recomputed layers. On a
pretended device: test_device_rules.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import planted
import pytest
import torch
from test_train import Outcome, Rows, Tiny, config, squares, weights
from torch import nn

from bitimely_core import models, objectives
from bitimely_core.config import Settings, build_model_config, validate
from bitimely_core.errors import Exit, Reason, UserError
from bitimely_core.ops import operator
from bitimely_core.train import devices, loop
from bitimely_core.train.devices import (
    refuse_slow_compile,
    resolve_compile,
    resolve_precision,
    select_device,
    use_arithmetic,
)
from bitimely_core.types import Batch

pytestmark = pytest.mark.usefixtures("one_thread")


def test_devices() -> None:
    assert select_device("cpu") == torch.device("cpu")
    assert select_device("auto").type in {"cpu", "cuda", "mps"}
    for name in ("abacus", "meta", "cuda:99"):
        with pytest.raises(UserError) as refused:
            select_device(name)
        assert (refused.value.code, refused.value.exit_code) == (Reason.CONFIG, Exit.USAGE)


@pytest.mark.parametrize(
    "name",
    ["gpu", "cuda:x", "xpu", "CUDA", "cuda:-1", "cuda:05", "cuda:99999999999", "cpu:300", "mps:5"],
)
def test_a_device_that_no_machine_has_is_refused(name: str) -> None:
    """Also where --set names another one."""
    from bitimely_core.workflows.prepare import resolve_training

    given: list[tuple[dict[str, Any], list[str]]] = [
        ({}, [f"train.device={name}"]),
        ({"train": {"device": name}}, ["train.device=cpu"]),
    ]
    for flags, pairs in given:
        with pytest.raises(UserError, match=f"--device: no device {name!r}") as caught:
            resolve_training("pretrain", {}, config=None, pairs=pairs, flags=flags)
        assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["cuda:64", "cuda:128", "cuda:255", "cuda:256", "cuda:300"])
def test_a_gpu_that_is_not_there_is_refused_by_its_number(name: str) -> None:
    """Torch takes 300 for 44 and 255 for none, and of 128 it makes -128, for which it has no error
    of its own.
    """
    with pytest.raises(UserError, match=f"no device {name!r}") as caught:
        select_device(name)
    assert caught.value.exit_code == 2


def test_precision_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, capability, device, expected in (
        (False, (9, 0), "auto", ("fp32", "fp32")),
        (True, (9, 0), "auto", ("bf16", "bf16")),
        (True, (9, 0), "cuda:1", ("bf16", "bf16")),
        (True, (7, 5), "cuda", ("fp32", "fp32")),
        (True, (9, 0), "cpu", ("fp32", "fp32")),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda capability=capability: capability
        )
        found = resolve_precision(loop.TrainConfig(device=device))
        assert (found.precision, found.core_precision) == expected
    chosen = loop.TrainConfig(precision="fp32")
    assert resolve_precision(chosen) is chosen
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("auto", "cpu"):
        with pytest.raises(UserError, match="tf32 without CUDA"):
            resolve_precision(loop.TrainConfig(precision="tf32", device=device))


def test_float32_on_cuda_is_float32_outside_of_trainings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)  # torch's default
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    where = select_device("cuda:0")
    assert not torch.backends.cudnn.allow_tf32
    with use_arithmetic(where, "tf32"):
        assert torch.backends.cudnn.allow_tf32
    assert not torch.backends.cudnn.allow_tf32


def test_gradients_that_vanish_are_zero_within_a_training_alone() -> None:
    """On the CPU numbers below 1e-38 take up to ten times as long, and a GPU has none: `fit` has
    none either, and leaves its caller's.
    """
    seen: list[float] = []

    def objective(model: nn.Module, batch: Batch, **options: Any) -> Outcome:
        seen.append((torch.tensor(1e-39) * 1.0).item())
        return squares(model, batch, **options)

    loop.fit(Tiny(), Rows(), objective, config=config(epochs=1, device="cpu"))
    assert set(seen) == {0.0}
    assert (torch.tensor(1e-39) * 1.0).item() > 0


def test_kernels_need_a_c_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "TRITON", True)
    for compiler, backend in (("gcc", "triton"), (None, "torch")):
        monkeypatch.setattr(operator, "COMPILER", compiler)
        assert operator.find_backend() == backend


def test_compilation_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for backend, device, chosen, stack, expected in (
        # what it is, and whether there is a warning
        ("triton", "cuda", "auto", True, (True, False)),
        ("triton", "cuda", "auto", False, (False, False)),
        ("triton", "cuda", True, False, (True, False)),
        ("triton", "cuda", False, True, (False, False)),
        ("torch", "cuda", "auto", True, (False, False)),
        ("torch", "cuda", True, True, (False, True)),
        ("triton", "cpu", "auto", True, (False, False)),
        ("torch", "cpu", True, True, (True, False)),
    ):
        monkeypatch.setattr(operator, "find_backend", lambda backend=backend: backend)
        settings, findings = resolve_compile(
            loop.TrainConfig(compile=chosen), torch.device(device), stack=stack
        )
        assert (settings.compile, bool(findings)) == expected
    assert loop.TrainConfig().compile == "auto"
    for compiler in ("CXX", "g++"):  # a compiler that is not there is a warning and no bug
        monkeypatch.setenv("CXX", "no-such-compiler") if compiler == "CXX" else monkeypatch.setenv(
            "PATH", "/nowhere"
        )
        settings, findings = resolve_compile(
            loop.TrainConfig(compile=True), torch.device("cpu"), stack=True
        )
        assert (settings.compile, len(findings)) == (False, 1)
        wanted = Settings(train=loop.TrainConfig(compile=True, device="cpu"))
        assert devices.resolve_arithmetic(wanted).train.compile, "the training has to warn"
        assert (
            resolve_compile(loop.TrainConfig(compile="auto"), torch.device("cpu"), stack=True)[1]
            == []
        )
        monkeypatch.delenv("CXX", raising=False)


@pytest.mark.parametrize(
    ("name", "model", "train", "expected"),
    [
        ("bitimelygpt", {}, {"batch_size": 32}, 4),
        ("gpt", {}, {"batch_size": 6}, 3),  # of four free cores
        ("gpt", {}, {"batch_size": 7}, 1),
        # draws and statistics of a process
        ("bitimelygpt", {"dropout": 0.1}, {}, 1),
        ("bitimelygpt", {"temporal_conv": "causal"}, {}, 1),
        ("bitimelygpt", {"tokenizer": "patch-cnn"}, {}, 1),
        ("resnet", {}, {}, 1),
    ],
)
def test_auto_takes_as_many_processes_as_keep_the_curve(
    name: str,
    model: dict[str, Any],
    train: dict[str, Any],
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "count_free_cores", lambda: 4)
    tokens = {} if name == "resnet" else {"tokenizer": "conv"}
    built = models.build(name, preset="tiny", channels=1, length=300, **{**tokens, **model})
    settings = Settings(model=built.config, train=loop.TrainConfig(device="cpu", **train))
    count, reason = devices.choose_processes(built, settings, 1000.0)
    assert count == expected
    assert (reason is None) == (count > 1)
    assert devices.choose_processes(built, settings, 30.0)[0] == 1
    monkeypatch.setattr(devices, "count_free_cores", lambda: -2)  # others work here
    assert devices.choose_processes(built, settings, 1000.0)[0] == 1


@pytest.mark.parametrize(
    ("name", "settings", "refused"),
    [
        ("bitimelygpt", {"tokenizer": "conv"}, True),  # 750 tokens
        ("bitimelygpt", {"tokenizer": "patch", "patch": 23}, True),  # 130
        ("bitimelygpt", {"tokenizer": "patch", "patch": 24}, False),  # 125
        ("gpt", {"tokenizer": "conv"}, False),
        ("resnet", {}, False),
    ],
)
def test_what_is_slower_compiled_is_refused_on_a_cpu(
    name: str, settings: dict[str, Any], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_model_config(name, "tiny", channels=1, length=3000, **settings)
    for chosen in (False, "auto"):
        refuse_slow_compile(loop.TrainConfig(compile=chosen, device="cpu"), model)
    with pytest.raises(UserError) if refused else nullcontext() as caught:
        refuse_slow_compile(loop.TrainConfig(compile=True, device="cpu"), model)
    if caught is not None:
        assert caught.value.exit_code == Exit.USAGE
        assert "train.compile" in str(caught.value)
    monkeypatch.setattr(devices, "select_device", lambda name: torch.device("cuda"))
    refuse_slow_compile(loop.TrainConfig(compile=True), model)


@pytest.mark.slow
def test_compiled_during_the_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[nn.Module] = []
    original = nn.Module.compile

    def eager(self: nn.Module) -> None:
        compiled.append(self)
        original(self, backend="eager")

    monkeypatch.setattr(nn.Module, "compile", eager)
    model, plain = Tiny(dropout=0.0), Tiny(dropout=0.0)
    loop.fit(model, Rows(), squares, config=config(compile=True))
    loop.fit(plain, Rows(), squares, config=config())
    assert compiled == [model]
    assert model._compiled_call_impl is None
    for name, value in weights(plain).items():
        torch.testing.assert_close(weights(model)[name], value)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch deprecates parts of its own compiler
def test_one_graph_serves_all_layers_of_a_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo

    original, compiled = nn.Module.compile, []

    def trace(self: nn.Module) -> None:
        compiled.append(type(self).__name__)
        original(self, backend="aot_eager")

    class Windows:
        steps, size = 3, 4

        def __call__(self, epoch: int, *, start: int = 0, rank: int = 0, world: int = 1) -> Any:
            return (
                Batch(torch.randn(4, 64, 2, generator=torch.Generator().manual_seed(at)))
                for at in range(start, 3)
            )

    monkeypatch.setattr(nn.Module, "compile", trace)
    torch._dynamo.reset()
    counters: Any = torch._dynamo.utils.counters
    counters.clear()
    found = []
    for chosen in (True, False):
        torch.manual_seed(0)
        model = models.build("bitimelygpt", preset="tiny", channels=2, length=64, layers=6)
        objective = objectives.get("next-previous")
        found.append(
            loop.fit(
                model,
                Windows(),
                objective,
                config=loop.TrainConfig(epochs=1, device="cpu", batch_size=4, compile=chosen),
            )
        )
        assert all(module._compiled_call_impl is None for module in model.modules())
    assert compiled == ["StackLayer"] * 6
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [("bitimelygpt", {}), ("bitimelygpt", {"temporal_conv": "causal"}), ("lstm", {}), ("s4", {})],
    ids=str,
)
def test_recomputed_layers_train_to_the_same_bits(name: str, options: dict[str, Any]) -> None:
    """With dropout: the second computation draws as the first, and counts no batch again. The
    inside of layers is not kept.
    """
    weights, kept = [], []
    for recompute in ("none", "layers"):
        torch.manual_seed(0)
        model: Any = planted.tiny(
            name, channels=2, length=64, layers=2, dropout=0.1, **options
        ).train()
        sizes: list[int] = []

        def objective(
            model: Any, batch: Batch, generator: Any = None, sizes: list[int] = sizes
        ) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(
                lambda x: (sizes.append(x.numel()), x)[1], lambda x: x
            ):
                return objectives.get("next-previous")(model, batch, generator)

        class Windows:
            steps, size = 2, 4

            def __call__(self, epoch: int, *, start: int = 0, rank: int = 0, world: int = 1) -> Any:
                return (
                    Batch(torch.randn(4, 64, 2, generator=torch.Generator().manual_seed(at)))
                    for at in range(start, 2)
                )

        loop.fit(
            model,
            Windows(),
            objective,
            config=loop.TrainConfig(epochs=1, device="cpu", batch_size=4, recompute=recompute),
        )
        weights.append(model.state_dict())
        kept.append(sum(sizes))
    assert all(
        torch.equal(a, b) for a, b in zip(weights[0].values(), weights[1].values(), strict=True)
    )
    assert kept[1] < 0.6 * kept[0]


@pytest.mark.parametrize(("key", "text"), [("devices", "some"), ("compile", "perhaps")])
def test_a_setting_of_two_kinds_is_refused_in_one_line(key: str, text: str) -> None:
    with pytest.raises(UserError) as refused:
        validate(Settings, {"train": {key: text}})
    (line,) = str(refused.value).splitlines()
    assert f"train.{key}: found '{text}'" in line
    assert line.count("expected") == 1
    assert line.rstrip(".").endswith("or 'auto'")
