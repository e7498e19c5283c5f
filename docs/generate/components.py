"""The page of components: those that come with the toolbox, from their records, signatures and docstrings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from bltoolbox.config.block import Block
from bltoolbox.config.compatibility import find_misfits, listed
from bltoolbox.config.hooks import KINDS, LISTS, PROJECT
from bltoolbox.config.problem_keys import LOSS
from bltoolbox.config.registry import Registered, Registry, load_registry
from bltoolbox.config.signatures import Parameter, Signature, Type
from bltoolbox.config.yaml_text import dump, dump_inline
from bltoolbox.errors import MissingError
from docs.generate.markdown import code, fence, first_paragraph, prose, sentence, table
from docs.generate.plugin_api import optional, role
from docs.generate.recipes import default, kind, written

INTRODUCTION = """
# Components

The components that come with the toolbox, by kind; the kinds are the sections of a [recipe](recipe-reference.md).
`blt list` shows everything installed, including third-party plugins; `blt show NAME` has the same text as this page.
"""

#: Longest line of a snippet before it is written as a block.
WIDTH = 100

#: The boolean class variables of the roles: what a component asks, or what it gives.
ASKS = {
    "full_batch": "a sampler that gives all samples at each step",
    "needs_bound": "a hypergradient with an adjoint, for an error bound",
    "needs_memory": "warm starts stored as they are",
    "needs_truth": "true images",
}
GIVES = {
    "by_gap": "accuracy measured by a duality gap",
    "cheap": "products that cost less than a preconditioner",
    "converges": "convergence to the minimiser",
    "convex": "convexity in x",
    "exact": "an error that vanishes with the tolerance",
    "exact_residual": "a residual that needs no second look",
    "from_sections": "the sections of a recipe for images",
    "full": "all samples at each step",
    "gives_adjoint": "an adjoint, hence error bounds",
    "handles_constraint": "iterates within a constraint on x",
    "handles_floor": "a stop of its own where the dtype allows no more accuracy",
    "handles_nonsmooth": "no need for derivatives of the regularizer",
    "identity": "measurements of the image itself",
    "moves_x": "its own iterations on x",
    "quadratic": "a curvature that does not depend on x",
    "rescales": "the same form at every noise level",
    "simultaneous": "z from the iterates of the previous step",
    "smooth": "differentiability in x",
    "stochastic": "an estimate that depends on draws",
    "uniform": "the same treatment of all places",
}
#: The optional methods of the roles, as what a component has that implements them; by kind where they differ.
OFFERS = {
    "standard_params": "standard parameters for a baseline",
    "analyse": "an analysis operator",
    "pointwise_majorant": "weights that can be compiled",
    "analysis_norm": "a bound of its analysis operator",
    "centre": "a centre of its own for a cold solve",
    "check": "a check of the image size",
    "check_measurements": "a check of the measurements",
    "check_noise": "a check of the noise level",
    "clean": "true images",
    "crop": "tiles of what differs from place to place",
    "conjugate": "the conjugate of its potential",
    "constants": "constants for certified error bounds",
    "context": "what operator and data term need to know of each image",
    "data.measured": "recorded measurements",
    "density": "an energy place by place",
    "example_contexts": "use of what the data know of each image",
    "extra_channels": "auxiliary variables",
    "gradient": "an analytic gradient",
    "group": "which of its images belong together",
    "derived": "which of its images are for training only",
    "guide": "what it reads off the measurements",
    "at_noise": "potentials for each noise level",
    "init_params": "parameters that can be learned",
    "inverse": "the inverse Hessian that it builds",
    "keeps": "a memory of each sample",
    "label": "names of its images",
    "linearize": "analytic Hessian products",
    "lipschitz": "a certified Lipschitz constant",
    "majorant": "majorant weights",
    "level_of": "the level of each sample",
    "mean": "a mean in closed form",
    "measured": "a mask of what is measured",
    "offset": "a shift of its potentials",
    "outcome": "states of one shape at the end of a solve",
    "observe": "an eye on what a step saw",
    "pairing": "an analytic mixed derivative",
    "pairing_gradients": "mixed derivatives sample by sample",
    "penalty": "a penalty on θ",
    "persists": "warm starts beside x",
    "quick": "another solver for pictures",
    "pictures": "pictures of what was learned",
    "potential": "values of its potential, entry by entry",
    "potential_sum": "values of its potential",
    "potentials": "curves of its potentials",
    "prepare": "work on θ that is done once",
    "project": "a projection of θ",
    "project_gradient": "a projection of the hypergradient",
    "prox": "a proximal map",
    "prox_conjugate": "a projection of dual variables",
    "prox_potential": "a proximal map of its potential",
    "select": "parameters for each sample",
    "shorten": "steps that can be made shorter",
    "spectrum": "bounds of its spectrum",
    "split": "a target made of measurements",
    "start": "its own start for a cold solve",
    "strong_convexity": "a strong convexity constant",
    "symbol": "eigenvalues by frequency",
    "synthesise": "its adjoint, the synthesis operator",
    "third": "a bound of its third derivative",
    "upgrade": "θ files of earlier versions",
    "variance": "a variance in closed form",
}


@dataclass(frozen=True)
class _Remembered(Registered):
    """Its signature is asked for by many pairs."""

    @cache  # noqa: B019 (as many as there are components)
    def signature(self) -> Signature:
        return super().signature()


@cache
def builtins() -> Registry:
    """The toolbox's own components, in a registry of their own; MissingError when one of its plugins is not in use."""
    everything = load_registry()
    plugins = [plugin for plugin in everything.plugins() if plugin.distribution == PROJECT]
    for plugin in plugins:
        if plugin.status != "ok":
            raise MissingError(
                f"the reference needs all built-in plugins, but {plugin.origin}: {plugin.reason}"
            )
    own = [one for plugin in plugins for one in everything.of(plugin)]
    return Registry(plugins, [_Remembered(one.component, PROJECT, one.version, one.plugin) for one in own])


def page() -> str:
    registry = builtins()
    rows = [
        (code(registered.kind), f"[{registered.name}](#{registered.name})", registered.component.summary)
        for registered in registry.components()
    ]
    parts = [INTRODUCTION.strip(), table(("kind", "name", "what it is"), rows)]
    for section in KINDS:
        parts += [f"## {section}", first_paragraph(role(section).doc)]
        parts.append(f"[The role `{role(section).name}`](plugin-api.md#{role(section).name.lower()})")
        for registered in registry.components(section):
            parts += _component(registered, registry)
    return "\n\n".join(parts)


def _component(registered: Registered, registry: Registry) -> Iterator[str]:
    signature = registered.signature()
    yield f"### {registered.name}"
    yield f"**{sentence(registered.component.summary)}**"
    yield prose(signature.doc)
    if "\n\n" in signature.about:
        yield prose(signature.about.partition("\n\n")[2])
    if signature.parameters:
        yield table(("parameter", "type", "default", "meaning"), _rows(signature.parameters))
    else:
        yield "No parameters."
    if facts := list(_partners(registered, registry)):
        yield "\n".join(f"* {fact}" for fact in facts)
    yield fence(snippet(registered, registry), "yaml")


def _rows(parameters: Sequence[Parameter], prefix: str = "") -> Iterator[tuple[str, ...]]:
    for parameter in parameters:
        yield code(prefix + parameter.name), kind(parameter.type), default(parameter), sentence(parameter.doc)
        for option in (parameter.type, *parameter.type.items):
            yield from _rows(option.parameters, f"{prefix}{parameter.name}.")


def snippet(registered: Registered, registry: Registry) -> str:
    """The component with its defaults, to paste into a recipe; ``…`` is to be filled in."""
    parameters = registered.signature().parameters
    options = {
        parameter.name: placeholder(parameter.type, parameter.doc, registry)
        if parameter.required
        else written(parameter.default)
        for parameter in parameters
    }
    value = {"name": registered.name} | {key: item for key, item in options.items() if item is not None}
    line = dump({LISTS[registered.kind]: [value]} if registered.kind in LISTS else {registered.kind: value})
    if registered.kind in LISTS or (len(line) <= WIDTH and line.count("\n") == 1):
        return line
    return "\n".join(
        [f"{registered.kind}:", *(f"  {key}: {dump_inline(item)}" for key, item in value.items())]
    )


def placeholder(type: Type, doc: str, registry: Registry) -> Any:
    """What stands for a value that has no default: ``…``, or a component without such values where one is nested, one
    that ``doc`` names if there is any."""
    if type.name in ("list", "tuple"):
        return [placeholder(type.items[0], doc, registry)]
    if type.name != "component":
        return "…"
    complete = [
        choice.name
        for choice in registry.components(type.role)
        if not any(parameter.required for parameter in choice.signature().parameters)
    ]
    named = set(re.findall(r"[\w-]+", doc))
    return next((name for name in complete if name in named), complete[0])


def _partners(registered: Registered, registry: Registry) -> Iterator[str]:
    """What it asks of its partners, what it gives them, and with whom it cannot go."""
    traits = registered.signature().traits
    asks = [
        f"a {kind} with {listed([code(method) for method in methods], 'and')}"
        for kind, methods in traits.requires.items()
    ]
    asks += [ASKS[flag] for flag in traits.flags if flag in ASKS]
    if asks:
        yield f"Needs {listed(asks, 'and')}."
    gives = [GIVES[flag] for flag in traits.flags if flag in GIVES]
    names = [method.name for method in optional(registered.kind) if method.name in traits.offers]
    gives += [f"{words(registered.kind, name)} (`{name}`)" for name in names]
    if gives:
        yield f"Offers {listed(gives, 'and')}."
    if traits.metrics:
        yield f"Measures {listed([code(metric) for metric in (*traits.metrics, LOSS)], 'and')}."
    if misfits := _misfits(registered, registry):
        yield f"Cannot be combined with {listed(misfits, 'or')}."


def words(kind: str, method: str) -> str:
    """What a component of a kind has that implements a method."""
    return OFFERS.get(f"{kind}.{method}") or OFFERS[method]


def _misfits(registered: Registered, registry: Registry) -> list[str]:
    """By the code that refuses them in a recipe."""
    block = Block(registered.kind, registered.name)
    partners = []
    for other in registry.components():
        pair = {registered.kind: block, other.kind: Block(other.kind, other.name)}
        if other.kind != registered.kind and find_misfits(pair, registry):
            partners.append(f"{other.kind} [{other.name}](#{other.name})")
    if find_misfits({registered.kind: block, "constraint": "box"}, registry):
        partners.append("a `constraint` on x")
    return partners
