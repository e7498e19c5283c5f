"""Which keys of a recipe belong to its problem.

The problem ``variational``, which recipes have that name none, is made of the sections for images. Any other problem is
one component with options of its own, and a recipe that names it has none of these sections.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bltoolbox.config.signatures import Traits
from bltoolbox.config.validation import Issue
from bltoolbox.config.wording import did_you_mean

#: The problem of recipes that name none.
IMAGES = "variational"
#: What it is made of, and what it needs.
IMAGE_KEYS = (
    "color",
    "data",
    "evaluation",
    "operator",
    "noise",
    "data_term",
    "constraint",
    "strong_convexity",
    "regularizer",
    "upper_loss",
    "freeze",
    "baseline",
    "workers",
)
NEEDED = ("data", "regularizer")
#: Images are held out by number; other problems have their own tasks for validation.
_COUNT = ("validation", "count")
#: The mean of the upper loss, which every problem has, besides its own metrics.
LOSS = "loss"


def named_problem(settings: Mapping[str, Any]) -> str:
    """The name of the problem in the plain data of a recipe, which may be anything."""
    problem = settings.get("problem", IMAGES)
    name = problem.get("name", IMAGES) if isinstance(problem, Mapping) else problem
    return name if isinstance(name, str) else IMAGES


def is_of_images(settings: Mapping[str, Any]) -> bool:
    """Whether the records of a recipe are about images."""
    return named_problem(settings) == IMAGES


def task_noun(settings: Mapping[str, Any]) -> str:
    """What a task is called: an image, or a task of another problem."""
    return "image" if is_of_images(settings) else "task"


def start_noun(settings: Mapping[str, Any]) -> str:
    """What a cold start is called: of an image it is what was measured."""
    return "measured" if is_of_images(settings) else "start"


def foreign_keys(name: str, settings: Mapping[str, Any]) -> Iterator[Issue]:
    """The keys of ``settings`` that belong to images, where the problem is another one."""
    for key in IMAGE_KEYS:
        if key in settings:
            message = (
                f"{key}: a section of problem {IMAGES!r}, which problem {name!r} does not have; remove it (blt show"
                f" problem/{name} lists its options)"
            )
            yield Issue((key,), message, at_key=True)
    checks = settings.get(_COUNT[0])
    if isinstance(checks, Mapping) and _COUNT[1] in checks:
        message = (
            f"validation.count: a number of images of problem {IMAGES!r}, but problem {name!r} has its own tasks for"
            " validation; remove it"
        )
        yield Issue(_COUNT, message, at_key=True)


def own_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a recipe of another problem, without what belongs to images."""
    own = {key: value for key, value in settings.items() if key not in IMAGE_KEYS}
    return own | {_COUNT[0]: {key: value for key, value in own[_COUNT[0]].items() if key != _COUNT[1]}}


def check_metric(metric: str | None, problem: Traits) -> tuple[str, Issue | None]:
    """The metric that decides, by default the first of the problem, and what is wrong with it."""
    among = (*problem.metrics, LOSS)
    if metric is None or metric in among:
        return metric or among[0], None
    hint = did_you_mean(metric, among) or f"; choose from {', '.join(among)}"
    where = ("validation", "metric")
    return metric, Issue(where, f"{'.'.join(where)}: there is no metric {metric!r}{hint}")
