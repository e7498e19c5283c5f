"""The docs say what the code does: generated pages are fresh, nothing is undocumented, links and commands work."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Install

from bltoolbox.cli.common import split_overrides
from bltoolbox.config.describe import describe
from bltoolbox.config.hooks import KINDS
from bltoolbox.config.recipe import Recipe, load_recipe, recipe_from_dict
from bltoolbox.config.registry import Registered, load_registry
from bltoolbox.config.shipped_recipes import shipped_recipes
from bltoolbox.config.signatures import Parameter, Signature
from bltoolbox.config.yaml_text import Spot, parse
from bltoolbox.errors import MissingError, RecipeError
from docs.generate import components, pages, plugin_api
from docs.generate.commands import command_line
from docs.generate.markdown import prose, table
from docs.generate.recipes import MINIMAL

DOCS = ROOT / "docs"
TEXTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)

#: Components that are no method of anybody's.
NOTHING_TO_CITE = {
    ("data", "array"),
    ("data", "folder"),
    ("noise", "none"),
    ("operator", "identity"),
    ("sampler", "full"),
}


@cache
def generated() -> dict[str, str]:
    return pages()


# Generated pages


@pytest.mark.parametrize(
    "name",
    [
        "components.md",
        "recipe-reference.md",
        "cli-reference.md",
        "plugin-api.md",
        "api/python.md",
        "api/plugin.md",
        "api/testing.md",
        "api/errors.md",
    ],
)
def test_generated_pages_are_fresh(name: str) -> None:
    path = DOCS / name
    assert path.is_file(), f"docs/{name} is missing: run make docs"
    fresh = path.read_text(encoding="utf-8") == generated()[name]
    assert fresh, f"docs/{name} is stale: run make docs"


def test_every_page_says_that_it_is_generated() -> None:
    for name, text in generated().items():
        assert text.startswith("<!-- Generated from the code by `make docs`"), name
        assert not re.search(r"[ \t]+$(?<!  )", text, re.MULTILINE), f"{name} has trailing spaces"


def test_the_pages_are_light_and_the_same_every_time() -> None:
    """Once the signatures are cached no torch is needed."""
    script = (
        "import json, sys; from docs.generate import pages\n"
        "print(json.dumps([pages(), 'torch' in sys.modules]))"
    )
    told = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-X", "utf8", "-c", script]
        done = subprocess.run(
            command, env=environment, text=True, encoding="utf-8", capture_output=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        told.append(json.loads(done.stdout))
    (first, _), (second, with_torch) = told
    assert first == second == generated()
    assert not with_torch


def test_plugins_of_others_do_not_appear(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither their components nor the clashes they cause."""
    source = (
        "from bltoolbox.plugin import Component, hookimpl\n"
        "@hookimpl\n"
        "def blt_components():\n"
        "    return [Component('regularizer', name, 'x:Y', 'Foreign.') for name in ('foreign', 'tv')]\n"
    )
    install("stranger", {"stranger": "stranger_hook"}, {"stranger_hook": source})
    assert any(one.name == "foreign" for one in load_registry().components())
    components.builtins.cache_clear()
    try:
        assert components.page() in generated()["components.md"]
        monkeypatch.setenv("BLT_PLUGINS", "stranger")
        components.builtins.cache_clear()
        with pytest.raises(MissingError, match="needs all built-in plugins"):
            components.page()
    finally:
        components.builtins.cache_clear()


def test_the_command_writes_only_what_changed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "docs.generate", str(tmp_path / "docs")]
    first, second = (subprocess.run(command, text=True, capture_output=True, timeout=120) for _ in range(2))
    written = {Path(line).relative_to(tmp_path / "docs").as_posix() for line in first.stdout.splitlines()}
    assert written == set(generated()), first.stderr
    assert second.stdout == ""
    for name, text in generated().items():
        assert (tmp_path / "docs" / name).read_text(encoding="utf-8") == text
    assert subprocess.run(command[:-1], capture_output=True, timeout=120).returncode == 2


def test_docstrings_become_markdown() -> None:
    text = "A ``word`` and x*.\n\n    a = b\n\n    c = d\n\nFor example: blt list, or blt show tv"
    assert (
        prose(text)
        == "A `word` and x\\*.\n\n```text\na = b\n\nc = d\n```\n\n```sh\nblt list\nblt show tv\n```"
    )
    assert table(("a", "b"), [("x | y", "`p | q`")]).splitlines()[-1] == r"| x \| y | `p \| q` |"
    assert prose("") == ""


# Nothing is undocumented


def _each(parameters: tuple[Parameter, ...], prefix: str = "") -> Iterator[tuple[str, Parameter]]:
    for one in parameters:
        yield prefix + one.name, one
        for option in (one.type, *one.type.items):
            yield from _each(option.parameters, f"{prefix}{one.name}.")


def test_every_component_is_documented() -> None:
    complaints = [text for one in components.builtins().components() for text in _undocumented(one)]
    assert not complaints, "\n" + "\n".join(complaints)


def _undocumented(one: Registered) -> Iterator[str]:
    signature, doc = one.signature(), one.signature().doc
    module, _, cls = one.component.target.partition(":")
    if not re.search(r"^When to choose it: |(^|\. )Prefer (it|them) ", doc, re.MULTILINE):
        yield f"the docstring of {module} does not say when to choose it"
    title = doc.partition("\n\n")[0]
    if one.kind != "data" and not re.search(r"^    \S", doc, re.MULTILINE) and " = " not in title:
        yield f"the docstring of {module} has no equation"
    if (one.kind, one.name) not in NOTHING_TO_CITE and not re.search(r"^References?: ", doc, re.MULTILINE):
        yield f"the docstring of {module} has no reference"
    if not one.component.summary.endswith("."):
        yield f"the summary of {one.kind}/{one.name} is not a sentence"
    if not signature.about:
        yield f"{module}.{cls} has no docstring"
    for name, parameter in _each(signature.parameters):
        if not parameter.doc:
            yield f"parameter {name!r} of {module}.{cls} is not in its Args"


def test_documentation_that_is_missing_is_noticed() -> None:
    good = components.builtins().get("regularizer", "tv")
    bare = replace(good.signature(), doc="A title.", about="")
    bare = replace(bare, parameters=tuple(replace(one, doc="") for one in bare.parameters))

    class Bare(Registered):
        def signature(self) -> Signature:
            return bare

    complaints = list(_undocumented(Bare(good.component, "", "", good.plugin)))
    for what in ("when to choose it", "no equation", "no reference", "no docstring", "'weight'", "'nu'"):
        assert any(what in text for text in complaints), what
    assert not list(_undocumented(good))


def test_every_key_of_a_recipe_is_documented() -> None:
    missing = [name for name, parameter in _each(describe(Recipe).parameters) if not parameter.doc]
    assert not missing, f"not in the Args of the settings in recipe.py: {', '.join(missing)}"


def test_every_command_and_option_is_documented() -> None:
    for name, command in command_line().commands.items():
        assert command.help, f"blt {name} has no docstring"
        for parameter in command.params:
            assert parameter.help, f"{parameter.opts} of blt {name} has no help"
        assert f"\n## {name}\n" in generated()["cli-reference.md"]


def test_every_role_and_method_is_documented() -> None:
    known = plugin_api.classes("bltoolbox.bilevel.roles")
    for kind in KINDS:
        assert f"\nKind `{kind}`." in generated()["plugin-api.md"]
        assert f"\n## {kind}\n" in generated()["components.md"]
        assert plugin_api.role(kind).doc, f"the role of kind {kind} has no docstring"
    for one in [known["Role"], known["Parametric"], known["Oracle"], *map(plugin_api.role, KINDS)]:
        for method in one.methods:
            assert method.doc, f"{one.name}.{method.name} has no docstring"
        for flag in one.flags:
            assert flag in one.doc, f"the docstring of {one.name} does not explain {flag}"


def test_every_hook_and_its_record_are_documented() -> None:
    from bltoolbox.config import hooks as hookspecs

    hooks = [name for name, value in vars(hookspecs).items() if hasattr(value, "bltoolbox_spec")]
    assert hooks == ["blt_components"]
    for name in hooks:
        assert getattr(hookspecs, name).__doc__
        assert f"def {name}(" in generated()["plugin-api.md"]
        assert name in (DOCS / "write-a-plugin.md").read_text(encoding="utf-8")
    assert plugin_api.classes("bltoolbox.config.hooks")["Component"].doc


def test_every_trait_has_words() -> None:
    """What the page of components says of the flags and optional methods of roles."""
    roles = [plugin_api.role(kind) for kind in KINDS]
    flags = {flag for one in roles for flag in one.flags}
    assert flags == {*components.ASKS, *components.GIVES}, "of docs/generate/components.py"
    optional = {(kind, method.name) for kind in KINDS for method in plugin_api.optional(kind)}
    wanted = {name for _, name in optional} | {key for key in components.OFFERS if "." in key}
    assert wanted == set(components.OFFERS), "of docs/generate/components.py"
    for kind, name in (key.split(".") for key in components.OFFERS if "." in key):
        assert (kind, name) in optional
    guide = (DOCS / "write-a-plugin.md").read_text(encoding="utf-8")
    for flag in flags:
        assert f"`{flag} = " in guide, f"docs/write-a-plugin.md does not name the trait {flag}"


# Snippets


def _blocks(path: Path, language: str) -> Iterator[tuple[int, str]]:
    text = path.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        if found[1] == language:
            yield text.count("\n", 0, found.start()) + 2, found[2]


def _load(text: str) -> dict[str, Any]:
    document = parse(text, Spot("<docs>"))
    assert not document.problems, document.problems
    settings: dict[str, Any] = document.data
    return settings


NONSMOOTH = {"regularizer": "tv-nonsmooth", "lower_solver": "pdhg", "hypergradient": "piggyback"}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_recipes_that_are_shown_are_valid(path: Path) -> None:
    """Parts of a recipe are completed by the shortest one."""
    rest = _load(MINIMAL)
    for line, text in _blocks(path, "yaml"):
        if "name: sum" in text or "operator: motion" in text:  # components that the guides make
            continue
        settings = _load(text)
        # Some optimizers need all data; a sampler of its own is no obstacle to anything else.
        sampler = {"sampler": "full"} if "upper_optimizer" in settings else {}
        # Where a regularizer has no derivatives, and for what needs its conjugate instead.
        saddle = NONSMOOTH if any(name in text for name in ("nonsmooth", "pdhg", "piggyback")) else {}
        # One hypergradient uses the inverse Hessian that a solver has built.
        inverse = {"lower_solver": "lbfgs"} if "shine" in text else {}
        # Another problem than images has no sections for them.
        other = settings.get("problem", {"name": "variational"})["name"] != "variational"
        least = {"budget": rest["budget"]} if other else rest
        try:
            recipe_from_dict({**least, **sampler, **saddle, **inverse, **settings})
        except RecipeError as error:
            pytest.fail(f"{path.name}:{line}: {error}")


def test_the_shortest_recipe_runs_with_defaults_only() -> None:
    assert set(_load(MINIMAL)) == {one.name for one in describe(Recipe).parameters if one.required}


# Links


def _prose(path: Path) -> str:
    """Without code."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", path.read_text(encoding="utf-8")))


def _anchors(path: Path) -> set[str]:
    """As GitHub makes them of headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        number = 0
        while (slug if number == 0 else f"{slug}-{number}") in found:
            number += 1
        found.add(slug if number == 0 else f"{slug}-{number}")
    return found


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_links_and_images_lead_somewhere(path: Path) -> None:
    text = _prose(path)
    for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        assert found.exists(), f"{path.name} links to {target}, which does not exist"
        assert found.is_relative_to(ROOT), f"{path.name} links to {target}, outside of the project"
        assert not anchor or anchor in _anchors(found), (
            f"{path.name} links to {target}, a heading that is not there"
        )


def test_every_page_can_be_reached() -> None:
    seen, todo = set(), [ROOT / "README.md"]
    while todo:
        path = todo.pop()
        if path in seen or path.suffix != ".md" or not path.exists():
            continue
        seen.add(path)
        targets = re.findall(r"\]\(([^)#\s]+)", _prose(path))
        todo += [(path.parent / target).resolve() for target in targets if ":" not in target]
    assert not set(DOCS.rglob("*.md")) - seen, "pages that no link leads to from README.md"


# Commands


def _command_lines(text: str) -> Iterator[tuple[str, str]]:
    """Each ``blt …`` of a block of commands, and the comment behind it."""
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split(r"&&|\|\|?|;|(?:^|\s)>", line.partition(" #")[0]):
            if part.strip().startswith("blt "):
                yield part.strip(), line.partition(" #")[2]


def _parse(words: list[str]) -> tuple[str, dict[str, Any]]:
    """The command and its parameters, as the command line would understand them; nothing is run."""
    group = command_line()
    name = words[0]
    if name not in group.commands:
        raise LookupError(f"there is no command {name!r}")
    return name, group.commands[name].make_context(name, words[1:]).params


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_commands_that_are_shown_can_be_understood(path: Path) -> None:
    for start, block in _blocks(path, "sh"):
        for line, comment in _command_lines(block):
            try:
                name, parameters = _parse(shlex.split(line)[1:])
            except Exception as error:  # Typer's own errors, which are of no public class
                pytest.fail(f"{path.name}:{start}: {line}: {getattr(error, 'message', error)}")
            if name not in ("run", "validate") or parameters["plugin"]:
                continue
            sources, overrides = split_overrides(parameters["arguments"])
            for source in sources:
                if source in shipped_recipes():
                    _check_overrides(source, overrides, wrong=comment.strip().startswith("error:"))


def _check_overrides(source: str, overrides: list[str], wrong: bool) -> None:
    try:
        load_recipe(source, overrides)
    except RecipeError as error:
        assert wrong, f"{source} {' '.join(overrides)}: {error}"
    else:
        assert not wrong, f"{source} {' '.join(overrides)} is said to be an error, and is not"


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_commands_within_sentences_exist(path: Path) -> None:
    group = command_line()
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    for line in re.findall(r"`blt ([^`]+)`", text):
        first, *rest = line.split()
        exists = first in group.commands or first.isupper() or first.startswith("-")
        assert exists, f"{path.name}: blt {line}: there is no command {first!r}"
        command = group.commands.get(first, group)
        known = {name for one in command.params for name in one.opts} | {"-h", "--help"}
        for word in [first, *rest]:
            assert not word.startswith("-") or word in known, f"{path.name}: blt {line}: there is no {word}"
