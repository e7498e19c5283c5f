"""The page of recipes, from the settings of ``recipe.py`` and the modules that read and check them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from bltoolbox.config import compatibility as partners
from bltoolbox.config import recipe, validation, yaml_text
from bltoolbox.config.describe import describe, settings_classes
from bltoolbox.config.hooks import SHORT
from bltoolbox.config.reading import RECIPE
from bltoolbox.config.signatures import Parameter, Type, plain_scalar
from docs.generate.markdown import code, fence, prose, sentence, table

#: The shortest recipe there is.
MINIMAL = """\
data: dead-leaves
regularizer: foe
budget: {steps: 100}
"""

INTRODUCTION = f"""
# Recipes

A recipe is a YAML file with the keys below. It needs `data`, `regularizer` and `budget`; everything else has a default:

{fence(MINIMAL, "yaml")}

A recipe that is not about images names a `problem` with its options instead of `data`, `regularizer` and the other
sections for images; see [Problems without images](other-problems.md).

`blt validate FILE` reports every problem in a file at once, `blt run FILE --dry-run` prints it with every default
written out, `blt recipes` lists the shipped recipes, and `blt schema` writes a JSON Schema for editors.
"""

UNITS = """
## Units

* Images have values in [0, 1]; `noise` and the tolerances are in that unit. 25 of 255 gray levels are `noise: 25/255`.
* A tolerance of a lower-level problem is a distance ‖x̃ − x̂‖ in the Euclidean norm, summed over the image.
* A computation is one iteration of the lower-level solver or of the linear solver, for one sample.
* Times are seconds of wall clock, sizes are pixels.
"""

OVERRIDES = """
For example:

```sh
blt run denoise sampler.size=8 noise=15/255
blt run denoise regularizer=tv lower_solver=mm
blt run denoise 'budget={steps: 2}' evaluation=null
blt run denoise constraint=box lower_solver.name=gd device=cpu
```
"""

PARTNERS = """
## What fits together

Some components have requirements: `mm` needs a regularizer with majorant weights, `maid` needs all data at each step. A
combination that cannot work is refused with a message that names both components and an alternative;
[components](components.md) lists what each component needs and offers.
"""

YAML = f"""
## YAML and numbers

A recipe is one document of mappings, lists and scalars, of at most {RECIPE.most // 1000} kB and
{yaml_text.MAX_DEPTH} levels. Scalars are those of YAML 1.2. Tags, anchors, aliases, unknown keys and keys given
twice are refused.
"""

#: What a value may be written as, and of which type it is meant to be.
WRITTEN: Sequence[tuple[str, Type]] = (
    ("25/255", Type("float")),
    ("1e-2", Type("float")),
    ("3", Type("float")),
    ("1e5", Type("int")),
    ("012", Type("int")),
    ("2.5", Type("int")),
    ("true", Type("bool")),
    ("on", Type("bool")),
    ("on", Type("str")),
    ("1", Type("str")),
    ("'1'", Type("str")),
    (".inf", Type("float")),
)


def page() -> str:
    described = describe(recipe.Recipe)
    parts = [INTRODUCTION.strip(), "## Keys", _table(described.parameters)]
    for name, cls in _settings():
        settings = describe(cls)
        parts += [f"## {name}", prose(settings.about), _table(settings.parameters, f"{name}.")]
    parts += [
        UNITS.strip(),
        "## Names, short forms and overrides",
        prose(_after_first(recipe)),
        OVERRIDES.strip(),
    ]
    parts += [PARTNERS.strip(), prose(_after_first(partners))]
    parts += [YAML.strip(), prose(_after_first(validation)), _values()]
    return "\n\n".join(parts)


def _settings() -> Iterator[tuple[str, type]]:
    """The nested settings of a recipe, by their key."""
    annotations = inspect.get_annotations(recipe.Recipe, eval_str=True)
    for parameter in describe(recipe.Recipe).parameters:
        for cls in settings_classes(annotations[parameter.name]):
            yield parameter.name, cls


def _table(parameters: Sequence[Parameter], prefix: str = "") -> str:
    return table(
        ("key", "type", "default", "meaning"),
        [
            (code(prefix + parameter.name), kind(parameter.type), default(parameter), sentence(parameter.doc))
            for parameter in parameters
        ],
    )


def kind(type: Type) -> str:
    """A type for a table; a component links to those there are, settings to their own table."""
    if type.name == "union":
        return " or ".join(kind(item) for item in type.items)
    if type.name == "component":
        short = "a number or " if type.role in SHORT else ""
        return f"{short}[{type.role}](components.md#{type.role})"
    if type.name == "settings":
        return "mapping, see below"
    if type.name == "choice":
        return ", ".join(code(plain_scalar(choice)) for choice in type.choices)
    return type.label()


def default(parameter: Parameter) -> str:
    if parameter.required:
        return "required"
    value = parameter.default
    if isinstance(value, dict):
        return code(value["name"]) if set(value) == {"name"} else "see below"
    return code(yaml_text.dump_inline(written(value)))


def written(value: Any) -> Any:
    """A value as a person writes it in a recipe: 25/255 instead of its digits."""
    if isinstance(value, float) and len(repr(value)) > 8 and round(value * 255) / 255 == value:
        return f"{round(value * 255)}/255"
    return value


def _values() -> str:
    rows = []
    for text, type in WRITTEN:
        checker = validation.Checker()
        value = checker.value(type, yaml_text.parse(text, yaml_text.Spot("")).data, ())
        if checker.issues:
            read = f"refused: {checker.issues[0].message}"
        else:
            read = code(
                repr(value) if isinstance(value, str) else f"{value:.6g}" if value is not True else "true"
            )
        rows.append((code(text), type.name, read))
    return table(("written", "where a … is wanted", "read as"), rows)


def _after_first(module: object) -> str:
    """A module's docstring without its first paragraph, which is for readers of the code."""
    return inspect.cleandoc(getattr(module, "__doc__", None) or "").partition("\n\n")[2]
