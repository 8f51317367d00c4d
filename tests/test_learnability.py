"""Every model starts with vectors that depend on its input and learns what it can; the table is in docs/models/learnability.md."""

import learnability
import pytest
import torch

from bitimely_core import registry

torch.set_num_threads(1)

EXCEPTIONS = {  # model -> tasks that its method cannot learn, or that it does not learn in 300 steps; see the page
    "patchtst": ("mean of 4", "mean of 12", "mean of 34"),
    "autoformer": ("mean of 4", "mean of 12", "mean of 34"),
    "fedformer": ("mean of 4", "mean of 12", "mean of 34"),
    "seft": ("frequency",),
    "raindrop": ("frequency",),
    "gpt": ("place",),
    "gpt-baar": ("frequency", "place"),
}
QUICK = {"tst": "frequency", "raindrop": "mean of 12", "mtand-enc": "place", "gru-d": "frequency"}


@pytest.mark.parametrize("name", registry.models)
def test_vectors_of_an_untrained_model_depend_on_the_input(name):
    assert max(learnability.measure_spread(name, task) for task in learnability.TASKS) >= 1e-2


@pytest.mark.long
@pytest.mark.parametrize("name", QUICK)
def test_what_was_not_learnt_is_learnt(name):
    task = QUICK[name]
    assert learnability.score(name, task, seed=0, steps=200) >= learnability.TASKS[task][3]


@pytest.mark.long
@pytest.mark.parametrize("task", learnability.TASKS)
@pytest.mark.parametrize("name", registry.models)
def test_every_model_learns_every_task(name, task):
    scores = [learnability.score(name, task, seed) for seed in range(3)]
    if task in EXCEPTIONS.get(name, ()):
        assert min(scores) < learnability.TASKS[task][3], "now it learns this: correct the page"
    else:
        assert min(scores) >= learnability.TASKS[task][3]
