"""Whether the components of a recipe fit together, checked by their traits and without torch.

Requirements of nested components apply to the sections of the recipe, too; only the component of a section itself can
satisfy them, not one nested in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from bltoolbox.config.block import Block
from bltoolbox.config.hooks import KINDS
from bltoolbox.config.problem_keys import IMAGE_KEYS
from bltoolbox.config.signatures import Traits
from bltoolbox.errors import MissingError

if TYPE_CHECKING:
    from bltoolbox.config.registry import Registry

#: Maximum number of alternatives in a message.
CHOICES = 3

#: Methods of roles that state constants. Other problems than images state them for their lower levels as a whole.
_CONSTANTS = ("lipschitz", "spectrum", "strong_convexity")

TraitsOf = Callable[[str, str], Traits | None]


@dataclass(frozen=True)
class Misfit:
    """Two incompatible sections; ``section`` is the one to change first."""

    section: str
    partner: str
    message: str


def find_misfits(settings: Mapping[str, Any], registry: Registry) -> list[Misfit]:
    """Every impossible combination, as one sentence that names both sides and an alternative.

    ``settings`` are those of a recipe; the sections that contain a Block and ``constraint`` are examined.
    """

    @cache
    def traits_of(kind: str, name: str) -> Traits | None:
        try:
            return registry.get(kind, name).signature().traits
        except MissingError:
            return None  # reported elsewhere

    blocks = {
        section: settings[section]
        for section in (*KINDS, "baseline", "evaluation_solver")
        if isinstance(settings.get(section), Block)
    }
    constraint = settings.get("constraint") or "none"
    complaints = list(_complaints(blocks, constraint, traits_of))
    return [
        *(
            replace(
                complaint,
                message=complaint.message + _advice(complaint, blocks, constraint, registry, traits_of),
            )
            for complaint in complaints
        ),
        *_lost_iterates(settings.get("checkpoint"), blocks, traits_of),
    ]


def _lost_iterates(checkpoint: Any, blocks: Mapping[str, Block], traits_of: TraitsOf) -> Iterator[Misfit]:
    """Methods whose iterates are the warm starts, where these are rounded or dropped."""
    given = checkpoint if isinstance(checkpoint, Mapping) else getattr(checkpoint, "__dict__", {})
    keeping = given.get("warm_starts", "full")
    effect = {"float16": "rounds", "none": "drops"}.get(keeping) if isinstance(keeping, str) else None
    for section in ("hypergradient", "upper_optimizer") if effect else ():
        for block in _with_nested(blocks.get(section)):
            if "needs_memory" in (traits_of(block.kind, block.name) or Traits()).flags:
                owner = f"{section} {block.name!r}"
                sentence = f"warm_starts: {keeping} {effect} what {owner} iterates on from step to step"
                yield Misfit(
                    "checkpoint", section, f"{sentence}; use warm_starts: full, or another {section}"
                )


def _complaints(blocks: Mapping[str, Block], constraint: str, traits_of: TraitsOf) -> Iterator[Misfit]:
    for section, block in blocks.items():
        yield from _lacking(section, block, blocks, traits_of)
    yield from _unmet(blocks, constraint, traits_of)


def _lacking(
    section: str, block: Block, blocks: Mapping[str, Block], traits_of: TraitsOf
) -> Iterator[Misfit]:
    """``requires`` against ``offers``."""
    for needy in _with_nested(block):
        traits = traits_of(needy.kind, needy.name) or Traits()
        for kind, methods in traits.requires.items():
            # A baseline is solved by the same solver as an evaluation, and never differentiated.
            evaluating = "evaluation_solver" if "evaluation_solver" in blocks else "lower_solver"
            partners = (kind, "baseline") if (section, kind) == (evaluating, "regularizer") else (kind,)
            if kind in IMAGE_KEYS and kind not in blocks and (problem := _other_problem(blocks, traits_of)):
                if missing := [method for method in methods if method not in _CONSTANTS]:
                    sentence = f"{needy.name!r} needs a {kind} with {listed(missing, 'and')}"
                    yield Misfit(section, "problem", f"{sentence}, which problem {problem!r} does not have")
                continue
            for partner in partners:
                other = blocks.get(partner)
                theirs = traits_of(other.kind, other.name) if other else None
                missing = [method for method in methods if theirs and method not in theirs.offers]
                if missing and other:
                    sentence = f"{needy.name!r} needs a {kind} with {listed(missing, 'and')}"
                    # A hypergradient is chosen for what it is, and a solver can follow.
                    first, second = (partner, section) if kind == "lower_solver" else (section, partner)
                    yield Misfit(first, second, f"{sentence}, which {other.name!r} does not have")


def _other_problem(blocks: Mapping[str, Block], traits_of: TraitsOf) -> str | None:
    """The name of the problem, unless it is made of the sections for images."""
    problem = blocks.get("problem")
    traits = traits_of(problem.kind, problem.name) if problem else None
    return None if problem is None or traits is None or "from_sections" in traits.flags else problem.name


def _unmet(blocks: Mapping[str, Block], constraint: str, traits_of: TraitsOf) -> Iterator[Misfit]:
    """The flags of roles against each other."""

    def gives(section: str, flag: str) -> bool:
        block = blocks.get(section)
        traits = traits_of(block.kind, block.name) if block else None
        return traits is None or flag in traits.flags

    def who_needs(section: str, flag: str) -> str | None:
        nested = _with_nested(blocks[section]) if section in blocks else ()
        flags = {block.name: (traits_of(block.kind, block.name) or Traits()).flags for block in nested}
        return next((name for name, raised in flags.items() if flag in raised), None)

    for section in ("lower_solver", "evaluation_solver"):
        if constraint != "none" and not gives(section, "handles_constraint"):
            solver = blocks[section].name
            yield Misfit(section, "constraint", f"{solver!r} cannot keep x in the constraint {constraint!r}")
    solvers = ("lower_solver", "evaluation_solver")
    for partner in ("regularizer", "baseline"):
        if gives(partner, "smooth"):
            continue
        other = blocks[partner].name
        # A baseline is solved by the same solver, and never differentiated.
        for section in solvers + ("hypergradient",) * (partner == "regularizer"):
            if not gives(section, "handles_nonsmooth"):
                sentence = f"{blocks[section].name!r} needs derivatives of the regularizer, and {other!r} is not smooth"
                yield Misfit(section, partner, sentence)
    data, loss = (blocks.get(section) for section in ("data", "upper_loss"))
    theirs = traits_of(data.kind, data.name) if data else None
    needy = traits_of(loss.kind, loss.name) if loss else None
    if theirs and needy and "clean" not in theirs.offers and "needs_truth" in needy.flags:
        assert data is not None and loss is not None
        yield Misfit("upper_loss", "data", _truth_sentence(loss.name, data.name))
    demands = (
        ("full_batch", "sampler", "full", "all data at each step, which sampler {!r} does not provide"),
        (
            "needs_bound",
            "hypergradient",
            "gives_adjoint",
            "an error bound, for which hypergradient {!r} has no adjoint",
        ),
    )
    for need, section, flag, what in demands:
        if (name := who_needs("upper_optimizer", need)) and not gives(section, flag):
            sentence = f"upper_optimizer {name!r} needs {what.format(blocks[section].name)}"
            yield Misfit(section, "upper_optimizer", sentence)


def _truth_sentence(loss: str, data: str) -> str:
    return f"{loss!r} compares with true images, which data {data!r} does not have"


def without_truth(loss: str, data: str, registry: Registry) -> str:
    """The same, with losses that fit, for data that have no true images because of their options."""
    names = [
        entry.name
        for entry in registry.components("upper_loss")
        if "needs_truth" not in entry.signature().traits.flags
    ]
    advice = f"; use {listed(names[:CHOICES], 'or')}, or give true images" if names else "; give true images"
    return _truth_sentence(loss, data) + advice


def _advice(
    misfit: Misfit, blocks: Mapping[str, Block], constraint: str, registry: Registry, traits_of: TraitsOf
) -> str:
    """The end of the sentence: what fits instead."""

    def fitting(section: str) -> list[str]:
        kind = {"baseline": "regularizer", "evaluation_solver": "lower_solver"}.get(section, section)
        names = [entry.name for entry in registry.components(kind) if traits_of(kind, entry.name)]
        return [name for name in names if not _complains(section, {**blocks, section: Block(kind, name)})]

    def _complains(section: str, changed: Mapping[str, Block]) -> bool:
        complaints = _complaints(changed, constraint, traits_of)
        return any(section in (complaint.section, complaint.partner) for complaint in complaints)

    choices = [listed(fitting(misfit.section)[:CHOICES], "or")]
    if misfit.partner == "constraint":
        choices.append("constraint: none")
    elif not choices[0] and (others := fitting(misfit.partner)):
        choices = [f"{misfit.partner} {listed(others[:CHOICES], 'or')}"]
    text = ", or ".join(filter(None, choices))
    return f"; use {text}" if text else f"; choose another {misfit.section} or another {misfit.partner}"


def _with_nested(value: Any) -> Iterator[Block]:
    if isinstance(value, Block):
        yield value
        value = list(value.options.values())
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _with_nested(item)


def listed(words: Sequence[str], joint: str) -> str:
    """``a, b and c``."""
    return f" {joint} ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
