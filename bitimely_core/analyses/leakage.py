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
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from bitimely_core import data, objectives
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
from bitimely_core.models.tokenizers import FIRST, IGNORE, samples_per_token
from bitimely_core.objectives import Objective
from bitimely_core.objectives.tokens import Result
from bitimely_core.page import HeatMap, Line, LinePlot, Page, PageBuilder
from bitimely_core.registry import AnalysisFacts, analyses, models
from bitimely_core.registry import objectives as known
from bitimely_core.run import Run
from bitimely_core.tokens import Windows
from bitimely_core.train.devices import select_device
from bitimely_core.types import Batch, Progress

# held-out rel on white noise below this is a leak; sampling alone keeps it within 0.02 of 1
NOISE_THRESHOLD = 0.97
HELD_OUT = 20_000  # target values
ROWS = 32  # of a batch of noise
TOKENS = 16  # of a row of noise
SMALL = 10  # tokens of the Jacobian
VOCABULARY = 20  # codes of the noise
CHANNELS = 4
CPU = torch.device("cpu")


@analyses(
    AnalysisFacts(
        takes="model",
        help="Does the objective show the model its own targets? Jacobian and training on white noise",
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
    progress: Progress | None = None,
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
    settings, stamp, name = _choose_settings(runs, model, objective, preset)
    windows = windows or (runs[0].windows() if runs else None)
    preparation = None if windows is None else windows.preparation
    if not runs and windows is not None:
        stamp = objectives.leak_free(
            settings, normalise=windows.normalise, preparation=[windows.preparation]
        )
    chosen = settings.objective.name
    options = {
        key: value
        for key, value in settings.objective.model_dump().items()
        if key != "direction_sampling"
    }
    # the context has seen the negatives of its own past, and can exclude them
    if known[chosen].facts.states:
        options["source"] = "rows"
    objective_fn = objectives.get(**options)
    page = PageBuilder(f"Leakage of {chosen} in {settings.model.name}")
    words = (
        stamp
        if isinstance(stamp, str)
        else {True: "leak-free", False: "leaks", None: "no target"}[stamp]
    )
    facts = {
        "model": settings.model.name,
        "objective": chosen,
        "preset or run": name,
        "stamp": words,
        "seed": str(seed),
    }
    page.add_facts(facts)
    if known[chosen].facts.leak_free is None:
        unmeasured = {
            "leak_free": None,
            "stamped": stamp,
            "contradiction": False,
            "jacobian": None,
            "white_noise": None,
        }
        return page.finish(f"{chosen} compares with no target, so nothing can leak.", unmeasured)
    place = select_device(device)
    exact = torch.device("cpu") if place.type == "mps" else place  # the Jacobian is in float64
    with torch.random.fork_rng(devices=[]):
        measure = measure_code_changes if settings.model.tokenizer == "codes" else measure_jacobian
        small = _shrink_config(settings.model)
        jacobian = {
            mode: measure(small, objective_fn, seed, exact, training=mode == "train")
            for mode in ("eval", "train")
        }
        noise = (
            train_on_noise(settings.model, objective_fn, steps, seed, place, progress)
            if steps
            else None
        )
    normalise = windows.normalise if windows is not None else settings.data.normalise
    cutting = (
        windows.options if windows is not None and preparation and preparation.channels else None
    )
    native = (
        measure_native(small, jacobian["eval"], cutting, preparation, normalise)
        if cutting and preparation
        else []
    )
    stages = measure_stages(small, jacobian, native, cutting, preparation, normalise)
    is_exact = all(found.own == 0 and found.beyond == 0 for found in jacobian.values())
    is_exact = (
        is_exact
        and all(one.forbidden == 0 and one.copied == 0 for one in native)
        and getattr(windows, "normalise", "") != "window"
    )
    is_alive = all(found.allowed > 0 for found in jacobian.values())
    leak_free = is_exact and is_alive and (noise is None or noise.rel >= NOISE_THRESHOLD)
    contradiction = stamp is True and not leak_free
    if contradiction:
        page.notice(f"{chosen} is stamped leak-free, but it leaks here.")
    if not is_alive:
        page.notice(
            "No prediction depends on any input that it may use: the model is dead, so zero derivatives are no evidence."
        )
    if native:
        page.table(
            "native",
            "Influence of native samples that are forbidden",
            "Largest influence on a prediction of a native sample of its target or beyond it, through one stage alone and through all of them; "
            "copied: share of target values of which every native sample reaches the prediction.",
            ["channels", "native Hz", "filters", "resampling", "objective", "all stages", "copied"],
            [[", ".join(o.channels), o.rate, o.filters, o.resampling, max(jacobian["eval"].own, jacobian["eval"].beyond), o.forbidden, o.copied]
             for o in native],
        )  # fmt: skip
    _add_stages(page, stages)
    _add_blocks(page, jacobian, noise, "code" if settings.model.tokenizer == "codes" else "sample")
    summary = {
        "leak_free": leak_free,
        "stamped": stamp,
        "contradiction": contradiction,
        "jacobian": {
            mode: {"own": one.own, "beyond": one.beyond, "allowed": one.allowed}
            for mode, one in jacobian.items()
        },
        "native": [
            {key: value for key, value in one._asdict().items() if not isinstance(value, Influence)}
            for one in native
        ],
        "stages": [{**one._asdict(), "verdict": one.verdict} for one in stages],
        "white_noise": None
        if noise is None
        else {"rel": noise.rel, "parts": noise.parts, "steps": noise.steps, "values": noise.values},
    }
    causes = [
        one.stage + (f" ({one.seconds:.3g} s)" if one.seconds else "")
        for one in stages
        if one.verdict != "adds nothing"
    ]
    by = f" Stages that add to it: {', '.join(causes)}." if causes else ""
    return page.finish(_verdict(chosen, leak_free, stamp, jacobian, noise, native) + by, summary)


def _choose_settings(
    runs: list[Run] | None, model: str, objective: str | None, preset: str
) -> tuple[Settings, bool | str | None, str]:
    """Settings, stamp and name of what is examined."""
    if runs:
        if len(runs) > 1:
            raise usage_error(f"{len(runs)} runs", "leakage takes one")
        run = runs[0]
        settings = run.record.settings.model_copy(update={"model": run.model().config})
        name = run.name
    else:
        entry = models[model]
        config = build_model_config(
            entry.name, preset, channels=CHANNELS, codes=building.default_shape(preset).get("codes")
        )
        with torch.device("meta"):
            config = building.from_config(config).config  # as the model reads it
        settings = Settings(model=config, objective=ObjectiveConfig(name=objective or ""))
        name = preset
    if not settings.objective.name:
        own = models[settings.model.name].facts.objective
        settings = settings.model_copy(
            update={"objective": settings.objective.model_copy(update={"name": own})}
        )
    known[settings.objective.name]
    stamp = objectives.leak_free(settings)
    if runs and not runs[0].record.is_finetuned:
        stamp = runs[0].record.leak_free
    return settings, stamp, name


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
    length = min(step * tokens - (step // 2 if ragged else 0), 256)
    width = 1 if config.channel_independent else channels
    return config.model_copy(
        update={
            "length": max(length, config.patch),
            "channels": width,
            "others": (),
            "dropout": 0.0,
        }
    )


def _find_maxima(size: Tensor, own: Tensor, forbidden: Tensor) -> Tensor:
    """Largest dependence on own, forbidden and allowed inputs, [3]."""
    return torch.stack(
        [
            (size * kind).amax() if size.numel() else size.new_zeros(())
            for kind in (own, forbidden, ~forbidden)
        ]
    )


def measure_jacobian(
    config: ModelConfig,
    objective: Objective,
    seed: int,
    place: torch.device = CPU,
    *,
    training: bool,
) -> Dependence:
    """Largest derivative of a prediction with respect to raw samples.

    `own`: those of its own target. `beyond`: those that only a leak can reach, that is for the next
    token all from the target on, for the
    previous token all up to it, for hidden tokens all hidden targets of the row. `allowed`: the
    others. Rows are summed, so a path from row to row counts too.
    """
    torch.manual_seed(seed)
    model = building.from_config(config).double().to(place).train(training)
    draw = Generator().manual_seed(seed)
    x = (
        torch.randn(2, config.length, config.channels, generator=draw, dtype=torch.float64)
        .to(place)
        .requires_grad_()
    )
    with record_tokens(model, x) as record:
        result = objective(model, Batch(x), Generator().manual_seed(seed))
    valid = result["valid"] if result["valid"].dim() == 3 else result["valid"][..., None]
    own = _find_own_samples(model, x, result)  # [B, M, T, V]
    weight = (
        torch.randn(result["prediction"].shape, generator=draw, dtype=torch.float64).to(place)
        * valid
    )
    maxima, lines, parts, spans = [], [], [], []
    paths: tuple[list[Influence], list[Influence]] = ([], [])
    for name, part in result["slices"].items():
        for m in range(*part.indices(valid.shape[1])):
            target = (result["prediction"][:, m] * weight[:, m]).sum()
            (slope,) = torch.autograd.grad(target, x, retain_graph=True, allow_unused=False)
            slope = slope.abs()
            rows, forbidden = valid[:, m].any(-1), _forbidden_samples(name, own, m, valid)
            maxima.append(_find_maxima(slope[rows], own[rows, m], forbidden[rows]))
            lines.append(slope[:1].sum((0, 2)))
            parts.append(name.partition("-")[0])
            used = own[0, m].any(-1).nonzero().flatten().tolist()
            spans.append((used[0], used[-1]) if used and bool(rows[0]) else (0, -1))
            if spans[-1] != (0, -1):
                split = split_slopes(
                    target, record, _forbidden_tokens(name, result, m, record.tokens[0].shape[1])
                )
                for influences, sizes in zip(paths, split, strict=True):
                    influences.append(
                        find_path_influence(sizes[rows] * forbidden[rows], parts[-1], spans[-1])
                    )
    own_size, beyond, allowed = torch.stack(maxima).amax(0).tolist()
    tokenizer, reader = map(join_influences, paths)
    return Dependence(
        own_size,
        beyond,
        allowed,
        torch.stack(lines).cpu().numpy(),
        tuple(parts),
        tuple(spans),
        tokenizer,
        reader,
    )


def _forbidden_tokens(name: str, result: Result, m: int, count: int) -> Tensor:
    """Tokens that prediction m must not read, bool [B, N]."""
    which, part = name.partition("-")[0], result["slices"][name]
    if which not in {"next", "previous"}:
        valid = result["valid"][:, part]
        return valid.any(-1) if valid.dim() == 3 else valid
    wanted = (
        result["target"][:, m]
        if result["target"].dim() == 2
        else result["valid"].new_full(result["valid"].shape[:1], m - part.start, dtype=torch.int64)
    )
    at = torch.arange(count, device=wanted.device)
    return at >= wanted[:, None] if which == "next" else at <= wanted[:, None]


def _find_own_samples(model: Model, x: Tensor, result: Result) -> Tensor:
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


def _forbidden_samples(name: str, own: Tensor, m: int, valid: Tensor) -> Tensor:
    """Samples that prediction m must not depend on, bool [B, T, V]."""
    which = name.partition("-")[0]  # next-3: the token three steps ahead
    if which not in {"next", "previous"}:
        return (own & valid.any(-1)[:, :, None, None]).any(1)
    used = own[:, m].any(-1).any(0).nonzero().flatten()
    time = torch.arange(own.shape[2], device=own.device)
    after = time >= used.min() if which == "next" else time <= used.max()
    return after[None, :, None].expand(own[:, m].shape)


def measure_code_changes(
    config: ModelConfig,
    objective: Objective,
    seed: int,
    place: torch.device = CPU,
    *,
    training: bool,
) -> Dependence:
    """Largest change of a prediction when one code is replaced, with its number where the model
    reads numbers, for the three kinds of `_jacobian`.
    """
    torch.manual_seed(seed)
    model = building.from_config(config).double().to(place).train(training)
    model.fit_numbers(dict.fromkeys(range(FIRST, FIRST + VOCABULARY), (0.0, 1.0)))
    draw = Generator().manual_seed(seed)
    codes = torch.randint(FIRST, FIRST + VOCABULARY, (2, config.length), generator=draw).to(place)
    times = torch.rand(codes.shape, generator=draw, dtype=torch.float64).cumsum(1).to(place)
    times[:, 3] = times[:, 2]  # a tie
    numbers = torch.randn(codes.shape, generator=draw, dtype=torch.float64).to(place)

    def predict(values: Tensor, numbers: Tensor) -> Result:
        with torch.no_grad():
            result: Result = objective(
                model, Batch(values, times, numbers=numbers), Generator().manual_seed(seed)
            )
        return result

    before, numbered = predict(codes, numbers), known[objective.config.name].facts.states
    maxima, lines, reach = [], [], 0
    wanted = (
        before["target"]
        if numbered
        else torch.cat(
            [
                torch.arange(part.stop - part.start, device=place)
                for part in before["slices"].values()
            ]
        )
    )
    for n in range(config.length):
        other = codes.clone()
        other[:, n] = FIRST + (codes[:, n] - FIRST + 1) % VOCABULARY
        after = predict(other, numbers + (torch.arange(config.length, device=place) == n))
        change = (after["prediction"] - before["prediction"]).abs().amax(-1)  # [B, M]
        differs, valid = after["target"] != before["target"], before["valid"]
        if numbered:
            differs = before["target"] == n
        if valid.dim() == 3:
            differs, valid = differs.any(-1), valid.any(-1)
        change = change * valid
        own = differs & valid
        forbidden = own.clone()
        if numbered:
            forbidden |= before["target"] <= n
        for name, part in () if numbered else before["slices"].items():
            index = torch.arange(part.stop - part.start, device=place)
            if name in {"next", "previous"}:
                if before["valid"].dim() == 2:
                    forbidden[:, part] |= index <= n if name == "next" else index >= n
            else:
                # a hidden code must reach no prediction at all
                forbidden[:, part] |= own.any(1, keepdim=True)
        maxima.append(_find_maxima(change, own, forbidden))
        reach = (
            max(
                reach,
                int(((wanted - n).abs() + 1).expand_as(change)[(change > 0) & forbidden].amax()),
            )
            if (change * forbidden).any()
            else reach
        )
        lines.append(change.sum(0))
    own_size, beyond, allowed = torch.stack(maxima).amax(0).tolist()
    return Dependence(
        own_size,
        beyond,
        allowed,
        torch.stack(lines, 1).cpu().numpy(),
        objective=Influence(max(own_size, beyond), reach),
    )


class NoiseResult(NamedTuple):
    """Loss / Var(target) on white noise; of codes cross-entropy / ln K."""

    rel: float  # held out, the smallest over the parts
    parts: dict[str, float]
    steps: int
    values: int  # held-out targets
    curve: list[tuple[int, float]]  # step and rel during training


def train_on_noise(
    config: ModelConfig,
    objective: Objective,
    steps: int,
    seed: int = 0,
    place: torch.device = CPU,
    progress: Progress | None = None,
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
            if progress is not None:
                progress("white noise", step + 1, steps)
    model.eval()
    held_out: list[Result] = []
    with torch.no_grad():
        while sum(int(result["valid"].sum()) for result in held_out) < HELD_OUT * len(
            held_out[0]["slices"] if held_out else [0]
        ):
            held_out.append(objective(model, next(batches), masks))
    parts = _relative_losses(config, held_out)
    values = sum(int(result["valid"].sum()) for result in held_out)
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
    """Rel of each part over several batches; the class of [EOS], which can be predicted, is left
    out.
    """
    out = {}
    if config.tokenizer != "codes" and results[0]["target"].dim() == 2:  # candidates: 1 is chance
        return {"rel": float(torch.stack([result["rel"].detach() for result in results]).mean())}
    for name, part in results[0]["slices"].items():
        prediction, target, valid = (
            torch.cat([result[key][:, part].detach() for result in results])
            for key in ("prediction", "target", "valid")
        )
        if config.tokenizer != "codes":
            error, spread = (
                (prediction - target)[valid].square().mean(),
                target[valid].var(unbiased=False),
            )
            out[name] = float(error / spread)
            continue
        if target.dim() == 3:  # sets: one code a time
            keep = valid.any(-1) & (target[..., -1] == 0)
            found = torch.nn.functional.binary_cross_entropy_with_logits(
                prediction[keep][:, :-1], target[keep][:, :-1]
            )
            share = 1 / VOCABULARY
            out[name] = float(found) / -(
                share * math.log(share) + (1 - share) * math.log(1 - share)
            )
            continue
        target = torch.where(valid & (target < VOCABULARY), target, IGNORE)
        loss = torch.nn.functional.cross_entropy(
            prediction[..., :-1].flatten(0, 1), target.flatten(), ignore_index=IGNORE
        )
        out[name] = float(loss) / math.log(VOCABULARY)
    return out


def _verdict(
    name: str,
    leak_free: bool,
    stamp: bool | str | None,
    jacobian: Mapping[str, Dependence],
    noise: NoiseResult | None,
    native: list[NativeInfluence],
) -> str:
    largest = max(max(found.own, found.beyond) for found in jacobian.values())
    trained = (
        ""
        if noise is None
        else f" After training on white noise the held-out loss is {noise.rel:.2f} of the variance (1 = chance)."
    )
    if leak_free:
        return f"{name} is leak-free here: no prediction depends on its own target, to the last bit.{trained}"
    worst = max(native, key=lambda one: (one.forbidden, one.copied), default=None)
    if largest == 0 and worst is not None and (worst.forbidden > 0 or worst.copied > 0):
        return (
            f"{name} leaks through the preparation of {', '.join(worst.channels)}: native samples of a target, or beyond it, reach its prediction "
            f"(influence up to {worst.forbidden:.2g}), and all samples of {worst.copied:.0%} of the target values do.{trained}"
        )
    if (
        isinstance(stamp, str)
        and max(jacobian["eval"].own, jacobian["eval"].beyond) == 0 < jacobian["eval"].allowed
    ):
        return f"{name} is leak-free {stamp}: by them alone a prediction depends on its own target in training (derivative up to {largest:.2g}).{trained}"
    if largest == 0 and noise is not None and noise.rel < NOISE_THRESHOLD:
        return f"{name} leaks after training.{trained}"
    return f"{name} leaks: a prediction depends on its own target (derivative up to {largest:.2g}).{trained}"


def _add_stages(page: PageBuilder, stages: list[LeakStage]) -> None:
    page.table(
        "stages",
        "What each stage adds",
        "Each stage by itself, the others as if they kept samples apart. Influence: the largest change of what a prediction may read (last three "
        "rows: of the prediction) with a native sample of its target or beyond it. Reach: how far that sample lies from what is read. Copied: share "
        "of the target values that hold nothing but samples that are read.",
        ["stage", "here", "influence", "reach (values)", "reach (s)", "copied", "verdict"],
        [
            [
                o.stage,
                o.action,
                o.influence,
                o.reach,
                "" if o.seconds is None else o.seconds,
                o.copied,
                o.verdict,
            ]
            for o in stages
        ],
    )


def _add_blocks(
    page: PageBuilder, jacobian: Mapping[str, Dependence], noise: NoiseResult | None, unit: str
) -> None:
    page.table(
        "jacobian",
        "Dependence of predictions on inputs",
        "Largest dependence of any prediction, in float64. Leak-free: 0 in the first two columns and not 0 in the third.",
        ["mode", "its own target", "inputs of the forbidden side", "allowed inputs"],
        [[mode, found.own, found.beyond, found.allowed] for mode, found in jacobian.items()],
    )
    page.figure(
        "jacobian",
        f"Dependence of each prediction on each {unit}",
        "Rows: predictions, next-token ones first. A leak-free objective leaves one side of the diagonal empty.",
        HeatMap(jacobian["eval"].map, xlabel=unit, ylabel="prediction"),
    )
    if noise is None:
        return
    at, rel = ([point[k] for point in noise.curve] for k in (0, 1))
    page.figure(
        "white-noise",
        "Loss on white noise relative to the variance",
        "Noise cannot be predicted, so the loss of a leak-free objective stays at 1. A falling curve is a copy of the target.",
        LinePlot(
            [
                Line("training", at, rel),
                Line("held out, after training", [at[0], at[-1]], [noise.rel] * 2),
            ],
            xlabel="step",
            ylabel="loss / variance",
        ),
    )
