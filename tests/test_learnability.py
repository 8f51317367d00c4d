"""Every model starts with vectors that depend on its input and learns what it can; the table is in
docs/models/learnability.md.
"""

from itertools import product

import learnability
import pytest
import torch

from bitimely_core import registry

torch.set_num_threads(1)

EXCEPTIONS = {  # model -> tasks that its method cannot learn; see the page
    "patchtst": ("mean of 4", "mean of 12", "mean of 34"),
    "autoformer": ("mean of 4", "mean of 12", "mean of 34"),
    "fedformer": ("mean of 4", "mean of 12", "mean of 34"),
    "seft": ("frequency",),
}
IN_CI = ("frequency", "place", "mean of 12")  # with one seed; all others take an hour more
CELLS = [
    pytest.param(
        task, seed, marks=pytest.mark.slow if seed == 0 and task in IN_CI else pytest.mark.long
    )
    for task, seed in product(learnability.TASKS, range(3))
]


def test_the_page_shows_what_was_measured():
    """The table is that of the stored accuracies, none of which is below its bound but for a
    reason.
    """
    cells = learnability.read_cells(learnability.CELLS)
    assert learnability.render_table(cells) in learnability.PAGE.read_text()
    for name, tasks in cells.items():
        for task, scores in tasks.items():
            assert (min(scores) < learnability.TASKS[task][3]) == (
                task in EXCEPTIONS.get(name, ())
            ), (name, task, scores)


@pytest.mark.parametrize("name", registry.models)
def test_vectors_of_an_untrained_model_depend_on_the_input(name):
    assert max(learnability.measure_spread(name, task) for task in learnability.TASKS) >= 1e-2


@pytest.mark.parametrize(("task", "seed"), CELLS)
@pytest.mark.parametrize("name", registry.models)
def test_every_model_learns_every_task(name, task, seed):
    learnt = learnability.score(name, task, seed) >= learnability.TASKS[task][3]
    assert learnt != (task in EXCEPTIONS.get(name, ())), (
        "where it learns an exception now: correct the page"
    )
