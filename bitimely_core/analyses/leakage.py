"""Does a pre-training objective show the model its own targets? Two measurements that need no data.

* Jacobian: the derivative of every prediction with respect to the raw samples of its own target, in
  float64 at random weights. A leak-free objective has exactly 0 there, and not 0 at samples that
  the prediction may use. Codes have no derivative: there a changed code must leave the predictions
  of it equal, bit for bit.
* White noise: the architecture is trained on independent N(0, 1) samples (codes: uniform ones),
  fresh in every step, where nothing can be predicted. Held-out loss / Var(target) stays at 1 unless
  the target can be copied.

Legend: B batch, M predictions a row, T timesteps, V channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from bitimely_core import data, objectives, registry
from bitimely_core import models as building
from bitimely_core.analyses.leak_stages import (
    Dependence,
    Influence,
    LeakStage,
    NativeInfluence,
    find_path_influence,
    join_influences,
    measure_native,
    measure_stages,
    record_tokens,
    split_slopes,
)
from bitimely_core.config import ModelConfig, ObjectiveConfig, Settings, build_model_config
from bitimely_core.errors import usage_error
from bitimely_core.models import Model
from bitimely_core.models.factory import complete_config
from bitimely_core.models.tokenizers import FIRST, IGNORE, samples_per_token
from bitimely_core.objectives import Objective
from bitimely_core.objectives.token_objectives import Result
from bitimely_core.page import HeatMap, Line, LinePlot, Page, PageBuilder
from bitimely_core.privacy import Sharing
from bitimely_core.progress import report_progress
from bitimely_core.registry import AnalysisFacts, analyses, models
from bitimely_core.run import Run
from bitimely_core.tokens import Windows
from bitimely_core.train.devices import select_device
from bitimely_core.types import Batch

# held-out rel on white noise below this is a leak; sampling alone keeps it within 0.02 of 1
NOISE_THRESHOLD = 0.97
HELD_OUT = 20_000  # target values
ROWS = 32  # of a batch of noise
TOKENS = 16  # of a row of noise
SMALL = 10  # tokens of the Jacobian
VOCABULARY = 20  # codes of the noise
CHANNELS = 4
CPU = torch.device("cpu")
NO_SPAN = (0, -1)  # of a prediction without target


@analyses(
    AnalysisFacts(
        takes="model",
        help="Does the objective show the model its own targets? "
        "Jacobian and training on white noise",
    )
)
def leakage(
    runs: list[Run] | None = None,
    *,
    model: str = "bitimelygpt",
    objective: str | None = None,
    preset: str = "tiny",
    steps: int = 400,
    seed: int = 0,
    windows: Windows | None = None,
    device: str = "auto",
) -> Page:
    """Does the objective show the model its own targets? Jacobian at random weights, and training
    on white noise.

    Model, objective and stamp are those of the one run of `runs`, else `model` with the dimensions
    of `preset` and `objective` (None: the model's own). With `windows` (of a run: its own) native
    samples are changed, too. `steps` on white noise are trained (0: Jacobian only); 300 to 700 show
    every leak that is known.

    Returns a page whose summary holds `leak_free` (measured; None where the objective has no
    target), `stamped`, `contradiction` (stamped true, but it leaks), `jacobian`, `native`, `stages`
    (see `leak_stages`) and `white_noise`. Raises UserError: more than one run, unknown names (exit
    2).
    """
    settings, source = _choose_settings(runs, model, objective, preset)
    if runs and windows is None:
        windows = runs[0].windows()
    stamp = _find_stamp(runs, settings, windows)
    name = settings.objective.name
    page = PageBuilder(f"Leakage of {name} in {settings.model.name}")
    page.add_facts(
        {
            "model": settings.model.name,
            "objective": name,
            "preset or run": source,
            "stamp": stamp if isinstance(stamp, str) else STAMPS[stamp],
            "seed": str(seed),
        },
        Sharing.OPEN,
    )
    if registry.objectives[name].facts.leak_free is None:
        unmeasured = {
            "leak_free": None,
            "stamped": stamp,
            "contradiction": False,
            "jacobian": None,
            "white_noise": None,
        }
        return page.finish(f"{name} compares with no target, so nothing can leak.", unmeasured)
    leak = _measure(settings, windows, steps, seed, select_device(device))
    contradiction = stamp is True and not leak.leak_free
    if contradiction:
        page.notice(f"{name} is stamped leak-free, but it leaks here.")
    if not leak.is_alive:
        page.notice(DEAD)
    _add_native(page, leak)
    _add_stages(page, leak.stages)
    _add_blocks(page, leak, "code" if settings.model.tokenizer == "codes" else "sample")
    verdict = _verdict(name, stamp, leak) + _describe_causes(leak.stages)
    about = {"leak_free": leak.leak_free, "stamped": stamp, "contradiction": contradiction}
    return page.finish(verdict, about | leak.summarize())


STAMPS = {True: "leak-free", False: "leaks", None: "no target"}
DEAD = (
    "No prediction depends on any input that it may use: the model is dead, so zero derivatives "
    "are no evidence."
)


def _choose_settings(
    runs: list[Run] | None, model: str, objective: str | None, preset: str
) -> tuple[Settings, str]:
    """Settings of what is examined, and the name of its run or preset."""
    if runs:
        if len(runs) > 1:
            raise usage_error(f"{len(runs)} runs", "leakage takes one")
        config, source = runs[0].model().config, runs[0].name
        settings = runs[0].record.settings.model_copy(update={"model": config})
    else:
        codes = building.default_shape(preset).get("codes")
        config = build_model_config(models[model].name, preset, channels=CHANNELS, codes=codes)
        config = complete_config(config)
        settings = Settings(model=config, objective=ObjectiveConfig(name=objective or ""))
        source = preset
    if not settings.objective.name:
        default = {"name": models[settings.model.name].facts.objective}
        chosen = settings.objective.model_copy(update=default)
        settings = settings.model_copy(update={"objective": chosen})
    return settings, source


def _find_stamp(
    runs: list[Run] | None, settings: Settings, windows: Windows | None
) -> bool | str | None:
    """The stamp of a pre-trained run, else that of the settings, without a run on the windows."""
    if runs and not runs[0].record.is_finetuned:
        return runs[0].record.leak_free
    if runs or windows is None:
        return objectives.leak_free(settings)
    return objectives.leak_free(
        settings, normalise=windows.normalise, preparation=[windows.preparation]
    )


class LeakMeasurement(NamedTuple):
    """What was measured."""

    jacobian: dict[str, Dependence]  # of modes eval and train
    noise: NoiseResult | None
    native: list[NativeInfluence]  # [] without windows
    stages: list[LeakStage]
    by_window: bool  # whether the windows are normalised by their own statistics

    @property
    def is_alive(self) -> bool:
        """Whether predictions depend on what they may use."""
        return all(dependence.allowed > 0 for dependence in self.jacobian.values())

    @property
    def leak_free(self) -> bool:
        """Whether no prediction depends on its own target, to the last bit."""
        is_exact = not self.by_window
        for dependence in self.jacobian.values():
            is_exact &= dependence.target == dependence.beyond == 0
        for native in self.native:
            is_exact &= native.forbidden == native.copied == 0
        return is_exact and self.is_alive and not self.learns_noise

    @property
    def learns_noise(self) -> bool:
        """Whether the loss on white noise falls below chance."""
        return self.noise is not None and self.noise.rel < NOISE_THRESHOLD

    def summarize(self) -> dict[str, object]:
        """As the summary stores it."""
        return {
            "jacobian": {
                mode: {"own": part.target, "beyond": part.beyond, "allowed": part.allowed}
                for mode, part in self.jacobian.items()
            },
            "native": [native.to_json() for native in self.native],
            "stages": [{**stage._asdict(), "verdict": stage.verdict} for stage in self.stages],
            "white_noise": self.noise and self.noise.to_json(),
        }


def _measure(
    settings: Settings, windows: Windows | None, steps: int, seed: int, place: torch.device
) -> LeakMeasurement:
    config = settings.model
    options = settings.objective.model_dump(exclude={"direction_sampling"})
    # the context has seen the negatives of its own past, and can exclude them
    if registry.objectives[settings.objective.name].facts.states:
        options["source"] = "rows"
    objective, small = objectives.get(**options), _shrink_config(config)
    exact = CPU if place.type == "mps" else place  # the Jacobian is in float64
    measure = measure_code_changes if config.tokenizer == "codes" else measure_jacobian
    with torch.random.fork_rng(devices=[]):
        jacobian = {
            mode: measure(small, objective, seed, exact, training=mode == "train")
            for mode in ("eval", "train")
        }
        noise = train_on_noise(config, objective, steps, seed, place) if steps else None
    preparation = getattr(windows, "preparation", None)
    normalise = settings.data.normalise if windows is None else windows.normalise
    native, cutting = [], None
    if windows is not None and preparation is not None and preparation.channels:
        cutting = windows.options
        native = measure_native(small, jacobian["eval"], cutting, preparation, normalise)
    stages = measure_stages(small, jacobian, native, cutting, normalise)
    by_window = windows is not None and normalise == "window"
    return LeakMeasurement(jacobian, noise, native, stages, by_window)


def _shrink_config(config: ModelConfig) -> ModelConfig:
    return _resize_config(config, SMALL, min(config.channels, 2), ragged=config.crop == "pad")


def _resize_config(config: ModelConfig, tokens: int, channels: int, *, ragged: bool) -> ModelConfig:
    """The configuration for windows of about `tokens` tokens, at most 256 samples; `ragged`: no
    multiple of the tokenizer's step.
    """
    if config.tokenizer == "codes":
        return config.model_copy(
            update={"length": tokens, "codes": FIRST + VOCABULARY, "dropout": 0.0}
        )
    step = samples_per_token(config)
    cut = step // 2 if ragged else 0
    length = min(step * tokens - cut, 256)
    if config.cuts_patches:  # a patch before and behind one
        length = max(length, 2 * step + config.patch - cut)
    width = 1 if config.channel_independent else channels
    return config.model_copy(
        update={"length": length, "channels": width, "others": (), "dropout": 0.0}
    )


def _find_maxima(sizes: Tensor, target: Tensor, forbidden: Tensor) -> Tensor:
    """Largest dependence on inputs of the target, forbidden and allowed ones, [3]."""
    if not sizes.numel():
        return sizes.new_zeros(3)
    return torch.stack([(sizes * kind).amax() for kind in (target, forbidden, ~forbidden)])


def _build_model(
    config: ModelConfig, seed: int, place: torch.device, *, training: bool
) -> tuple[Model, Generator]:
    """A model with random weights in float64, and a generator for what it reads."""
    torch.manual_seed(seed)
    model = building.from_config(config).double().to(place).train(training)
    return model, Generator().manual_seed(seed)


def measure_jacobian(
    config: ModelConfig,
    objective: Objective,
    seed: int,
    place: torch.device = CPU,
    *,
    training: bool,
) -> Dependence:
    """Largest derivative of a prediction with respect to raw samples.

    `target`: those of its own target. `beyond`: those that only a leak can reach. They are all from
    the target on for the next token, all up to it for the previous token, and all hidden targets of
    the row for hidden tokens. `allowed`: the others. Rows are summed, so a path from row to row
    counts too.
    """
    model, draw = _build_model(config, seed, place, training=training)
    shape = (2, config.length, config.channels)
    x = torch.randn(shape, generator=draw, dtype=torch.float64).to(place).requires_grad_()
    with record_tokens(model, x) as record:
        result = objective(model, Batch(x), Generator().manual_seed(seed))
    valid = result["valid"] if result["valid"].dim() == 3 else result["valid"][..., None]
    samples = _find_target_samples(model, x, result)  # [B, M, T, V]
    shape = result["prediction"].shape
    weight = torch.randn(shape, generator=draw, dtype=torch.float64).to(place) * valid
    maxima, slopes, parts, spans = [], [], [], []
    by_tokenizer: list[Influence] = []
    by_reader: list[Influence] = []
    for name, part in result["slices"].items():
        for m in range(*part.indices(valid.shape[1])):
            prediction = (result["prediction"][:, m] * weight[:, m]).sum()
            (slope,) = torch.autograd.grad(prediction, x, retain_graph=True)
            slope, rows = slope.abs(), valid[:, m].any(-1)
            forbidden = _forbidden_samples(name, samples, m, valid)
            maxima.append(_find_maxima(slope[rows], samples[rows, m], forbidden[rows]))
            slopes.append(slope[:1].sum((0, 2)))
            parts.append(name.partition("-")[0])
            spans.append(_find_span(samples[0, m]) if rows[0] else NO_SPAN)
            if spans[-1] != NO_SPAN:
                unread = _forbidden_tokens(name, result, m, record.tokens[0].shape[1])
                split = split_slopes(prediction, record, unread)
                for path, sizes in zip((by_tokenizer, by_reader), split, strict=True):
                    sizes = sizes[rows] * forbidden[rows]
                    path.append(find_path_influence(sizes, parts[-1], spans[-1]))
    target, beyond, allowed = torch.stack(maxima).amax(0).tolist()
    return Dependence(
        target,
        beyond,
        allowed,
        torch.stack(slopes).cpu().numpy(),
        tuple(parts),
        tuple(spans),
        join_influences(by_tokenizer),
        join_influences(by_reader),
    )


def _find_span(samples: Tensor) -> tuple[int, int]:
    """First and last of the samples of a target, bool [T, V]; `NO_SPAN` without any."""
    used = samples.any(-1).nonzero().flatten().tolist()
    return (used[0], used[-1]) if used else NO_SPAN


def _forbidden_tokens(name: str, result: Result, m: int, count: int) -> Tensor:
    """Tokens that prediction m must not read, bool [B, N]."""
    which, part = name.partition("-")[0], result["slices"][name]
    if which not in {"next", "previous"}:
        valid = result["valid"][:, part]
        return valid.any(-1) if valid.dim() == 3 else valid
    if result["target"].dim() == 2:  # numbers of tokens
        target = result["target"][:, m, None]
    else:
        rows = len(result["valid"])
        target = result["valid"].new_full((rows, 1), m - part.start, dtype=torch.int64)
    tokens = torch.arange(count, device=target.device)
    return tokens >= target if which == "next" else tokens <= target


def _find_target_samples(model: Model, x: Tensor, result: Result) -> Tensor:
    """Which samples the target of each prediction is made of, bool [B, M, T, V]."""
    if result["target"].dim() == 2:  # numbers of tokens
        fields = torch.stack(_find_fields(model, x), 1)
        return fields[:, result["target"][0].clamp(max=fields.shape[1] - 1)]
    if model.config.target == "raw":  # targets are samples, and no two samples are equal
        target = torch.where(result["valid"], result["target"].detach(), torch.nan)
        # PatchTST standardises them first
        samples = getattr(model, "prepare", model.expand_channels)(Batch(x.detach())).values
        return (target[:, :, None, None, :] == samples[:, None, :, :, None]).any(-1)
    return torch.stack(_find_fields(model, x) * len(result["slices"]), 1)


def _find_fields(model: Model, x: Tensor) -> list[Tensor]:
    """The samples that each token reads, bool [B, T, V]."""
    tokens = model.adapter.tokenizer(Batch(x))[0]
    return [
        torch.autograd.grad(tokens[:, n].sum(), x, retain_graph=True)[0] != 0
        for n in range(tokens.shape[1])
    ]


def _forbidden_samples(name: str, samples: Tensor, m: int, valid: Tensor) -> Tensor:
    """Samples that prediction m must not depend on, bool [B, T, V], by those of all targets."""
    which = name.partition("-")[0]  # next-3: the token three steps ahead
    if which not in {"next", "previous"}:
        return (samples & valid.any(-1)[:, :, None, None]).any(1)
    used = samples[:, m].any(-1).any(0).nonzero().flatten()
    time = torch.arange(samples.shape[2], device=samples.device)
    after = time >= used.min() if which == "next" else time <= used.max()
    return after[None, :, None].expand(samples[:, m].shape)


def measure_code_changes(
    config: ModelConfig,
    objective: Objective,
    seed: int,
    place: torch.device = CPU,
    *,
    training: bool,
) -> Dependence:
    """Largest change of a prediction when one code is replaced, for the three kinds of
    `measure_jacobian`. Where the model reads numbers that of the code changes, too.
    """
    model, draw = _build_model(config, seed, place, training=training)
    model.fit_numbers(dict.fromkeys(range(FIRST, FIRST + VOCABULARY), (0.0, 1.0)))
    codes = torch.randint(FIRST, FIRST + VOCABULARY, (2, config.length), generator=draw).to(place)
    times = torch.rand(codes.shape, generator=draw, dtype=torch.float64).cumsum(1).to(place)
    times[:, 3] = times[:, 2]  # a tie
    numbers = torch.randn(codes.shape, generator=draw, dtype=torch.float64).to(place)

    @torch.no_grad()
    def predict(values: Tensor, numbers: Tensor) -> Result:
        batch = Batch(values, times, numbers=numbers)
        return objective(model, batch, Generator().manual_seed(seed))

    before = predict(codes, numbers)
    has_numbers = registry.objectives[objective.config.name].facts.states
    targets = before["target"] if has_numbers else _number_targets(before)
    valid = before["valid"] if before["valid"].dim() == 2 else before["valid"].any(-1)
    maxima, changes, reach = [], [], 0
    for n in range(config.length):
        other = codes.clone()
        other[:, n] = FIRST + (codes[:, n] - FIRST + 1) % VOCABULARY
        after = predict(other, numbers + (torch.arange(config.length, device=place) == n))
        change = (after["prediction"] - before["prediction"]).abs().amax(-1) * valid  # [B, M]
        if has_numbers:  # targets are numbers of tokens
            target = (targets == n) & valid
            forbidden = target | (targets <= n)
        else:
            differs = after["target"] != before["target"]
            target = (differs if differs.dim() == 2 else differs.any(-1)) & valid
            forbidden = target | _find_forbidden_codes(before, target, n)
        maxima.append(_find_maxima(change, target, forbidden))
        changes.append(change.sum(0))
        leaking = (change > 0) & forbidden
        if leaking.any():
            distance = ((targets - n).abs() + 1).expand_as(change)
            reach = max(reach, int(distance[leaking].amax()))
    on_target, beyond, allowed = torch.stack(maxima).amax(0).tolist()
    matrix = torch.stack(changes, 1).cpu().numpy()
    influence = Influence(max(on_target, beyond), reach)
    return Dependence(on_target, beyond, allowed, matrix, objective=influence)


def _number_targets(result: Result) -> Tensor:
    """Number of the code of each prediction in its part, [M]."""
    device = result["valid"].device
    parts = result["slices"].values()
    return torch.cat([torch.arange(part.stop - part.start, device=device) for part in parts])


def _find_forbidden_codes(result: Result, target: Tensor, n: int) -> Tensor:
    """Which predictions code n must not reach, bool [B, M], beside those of which it is the
    `target`.
    """
    forbidden, number = torch.zeros_like(target), _number_targets(result)
    for name, part in result["slices"].items():
        if name not in {"next", "previous"}:
            # a hidden code must reach no prediction at all
            forbidden[:, part] = target.any(1, keepdim=True)
        elif result["valid"].dim() == 2:
            forbidden[:, part] = number[part] <= n if name == "next" else number[part] >= n
    return forbidden


class NoiseResult(NamedTuple):
    """Loss / Var(target) on white noise; of codes cross-entropy / ln K."""

    rel: float  # held out, the smallest over the parts
    parts: dict[str, float]
    steps: int
    values: int  # held-out targets
    curve: list[tuple[int, float]]  # step and rel during training

    def to_json(self) -> dict[str, object]:
        """As the summary stores it."""
        return {"rel": self.rel, "parts": self.parts, "steps": self.steps, "values": self.values}


def train_on_noise(
    config: ModelConfig, objective: Objective, steps: int, seed: int = 0, place: torch.device = CPU
) -> NoiseResult:
    """Train on independent noise, which cannot be predicted."""
    config = _resize_config(config, TOKENS, config.channels, ragged=False)
    torch.manual_seed(seed)
    model = building.from_config(config).to(place)
    if config.tokenizer != "codes":
        model.target_scale.fill_(1.0)
    batches = (
        data.to_device(batch, place) for batch in _draw_noise(config, Generator().manual_seed(seed))
    )
    masks = Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=3e-3, total_steps=max(steps, 4), pct_start=0.1, cycle_momentum=False
    )
    curve: list[tuple[int, float]] = []
    for step in range(steps):
        result = objective(model.train(), next(batches), masks)
        optimizer.zero_grad()
        result["loss"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 10 == 0 or step == steps - 1:
            curve.append((step + 1, min(_relative_losses(config, [result]).values())))
            report_progress("white noise", step + 1, steps)
    model.eval()
    held_out: list[Result] = []
    values = 0
    with torch.no_grad():
        while not held_out or values < HELD_OUT * len(held_out[0]["slices"]):
            held_out.append(objective(model, next(batches), masks))
            values += int(held_out[-1]["valid"].sum())
    parts = _relative_losses(config, held_out)
    return NoiseResult(min(parts.values()), parts, steps, values, curve)


def _draw_noise(config: ModelConfig, generator: Generator) -> Iterator[Batch]:
    while True:
        if config.tokenizer == "codes":
            codes = torch.randint(
                FIRST, FIRST + VOCABULARY, (ROWS, config.length), generator=generator
            )
            yield Batch(codes, torch.arange(config.length, dtype=torch.float32).expand_as(codes))
        else:
            yield Batch(torch.randn(ROWS, config.length, config.channels, generator=generator))


def _relative_losses(config: ModelConfig, results: list[Result]) -> dict[str, float]:
    """Rel of each part over several batches."""
    if config.tokenizer != "codes" and results[0]["target"].dim() == 2:  # candidates: 1 is chance
        return {"rel": float(torch.stack([result["rel"].detach() for result in results]).mean())}
    losses = {}
    for name, part in results[0]["slices"].items():
        prediction, target, valid = (
            torch.cat([result[key][:, part].detach() for result in results])
            for key in ("prediction", "target", "valid")
        )
        if config.tokenizer != "codes":
            error = (prediction - target)[valid].square().mean()
            losses[name] = float(error / target[valid].var(unbiased=False))
        else:
            losses[name] = _relative_code_loss(prediction, target, valid)
    return losses


def _relative_code_loss(prediction: Tensor, target: Tensor, valid: Tensor) -> float:
    """Cross-entropy over that of uniform codes. The class of [EOS], which can be predicted, is left
    out.
    """
    if target.dim() == 3:  # sets: one code a time
        rows = valid.any(-1) & (target[..., -1] == 0)
        loss = binary_cross_entropy_with_logits(prediction[rows][:, :-1], target[rows][:, :-1])
        share = 1 / VOCABULARY
        return float(loss) / -(share * math.log(share) + (1 - share) * math.log(1 - share))
    target = torch.where(valid & (target < VOCABULARY), target, IGNORE)
    loss = cross_entropy(prediction[..., :-1].flatten(0, 1), target.flatten(), ignore_index=IGNORE)
    return float(loss) / math.log(VOCABULARY)


def _verdict(name: str, stamp: bool | str | None, leak: LeakMeasurement) -> str:
    trained = ""
    if leak.noise is not None:
        trained = (
            f" After training on white noise the held-out loss is {leak.noise.rel:.2f} of the "
            "variance (1 = chance)."
        )
    return f"{name} {_describe_leak(stamp, leak)}.{trained}"


def _describe_leak(stamp: bool | str | None, leak: LeakMeasurement) -> str:
    if leak.leak_free:
        return "is leak-free here: no prediction depends on its own target, to the last bit"
    largest = max(dependence.forbidden for dependence in leak.jacobian.values())
    worst = max(leak.native, key=lambda native: (native.forbidden, native.copied), default=None)
    if largest == 0 and worst is not None and (worst.forbidden > 0 or worst.copied > 0):
        return (
            f"leaks through the preparation of {worst.names}: native samples of a target, or "
            f"beyond it, reach its prediction (influence up to {worst.forbidden:.2g}), and all "
            f"samples of {worst.copied:.0%} of the target values do"
        )
    evaluated = leak.jacobian["eval"]
    if isinstance(stamp, str) and evaluated.forbidden == 0 < evaluated.allowed:
        return (
            f"is leak-free {stamp}: by them alone a prediction depends on its own target in "
            f"training (derivative up to {largest:.2g})"
        )
    if largest == 0 and leak.learns_noise:
        return "leaks after training"
    return f"leaks: a prediction depends on its own target (derivative up to {largest:.2g})"


def _describe_causes(stages: list[LeakStage]) -> str:
    causes = [
        stage.stage + (f" ({stage.seconds:.3g} s)" if stage.seconds else "")
        for stage in stages
        if stage.verdict != "adds nothing"
    ]
    return f" Stages that add to it: {', '.join(causes)}." if causes else ""


NATIVE = (
    "Largest influence on a prediction of a native sample of its target or beyond it, through one "
    "stage alone and through all of them; copied: share of target values of which every native "
    "sample reaches the prediction."
)
STAGES = (
    "Each stage by itself, the others as if they kept samples apart. Influence: the largest change "
    "of what a prediction may read (last three rows: of the prediction) with a native sample of "
    "its target or beyond it. Reach: how far that sample lies from what is read. Copied: share of "
    "the target values that hold nothing but samples that are read."
)
JACOBIAN = (
    "Largest dependence of any prediction, in float64. Leak-free: 0 in the first two columns and "
    "not 0 in the third."
)
MAP = (
    "Rows: predictions, next-token ones first. A leak-free objective leaves one side of the "
    "diagonal empty."
)
NOISE = (
    "Noise cannot be predicted, so the loss of a leak-free objective stays at 1. A falling curve "
    "is a copy of the target."
)


def _add_native(page: PageBuilder, leak: LeakMeasurement) -> None:
    if not leak.native:
        return
    objective = leak.jacobian["eval"].forbidden
    rows = [
        [
            part.names,
            part.step.native_rate,
            part.filters.size,
            part.resampling.size,
            objective,
            part.forbidden,
            part.copied,
        ]
        for part in leak.native
    ]
    page.table(
        "native",
        "Influence of native samples that are forbidden",
        NATIVE,
        ["channels", "native Hz", "filters", "resampling", "objective", "all stages", "copied"],
        rows,
    )


def _add_stages(page: PageBuilder, stages: list[LeakStage]) -> None:
    rows = [
        [
            row.stage,
            row.action,
            row.influence,
            row.reach,
            "" if row.seconds is None else row.seconds,
            row.copied,
            row.verdict,
        ]
        for row in stages
    ]
    columns = ["stage", "here", "influence", "reach (values)", "reach (s)", "copied", "verdict"]
    page.table("stages", "What each stage adds", STAGES, columns, rows, Sharing.OPEN)


def _add_blocks(page: PageBuilder, leak: LeakMeasurement, unit: str) -> None:
    page.table(
        "jacobian",
        "Dependence of predictions on inputs",
        JACOBIAN,
        ["mode", "its own target", "inputs of the forbidden side", "allowed inputs"],
        [[mode, *dependence[:3]] for mode, dependence in leak.jacobian.items()],
    )
    heat_map = HeatMap(leak.jacobian["eval"].map, xlabel=unit, ylabel="prediction")
    page.figure("jacobian", f"Dependence of each prediction on each {unit}", MAP, heat_map)
    if leak.noise is None:
        return
    steps, rel = map(list, zip(*leak.noise.curve, strict=True))
    lines = [
        Line("training", steps, rel),
        Line("held out, after training", [steps[0], steps[-1]], [leak.noise.rel] * 2),
    ]
    page.figure(
        "white-noise",
        "Loss on white noise relative to the variance",
        NOISE,
        LinePlot(lines, xlabel="step", ylabel="loss / variance"),
        Sharing.OPEN,
    )
