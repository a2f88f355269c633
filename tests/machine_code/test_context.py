"""Templates read what records declare (codegen/context.py), and generating knows no family."""

from __future__ import annotations

import ast
import inspect
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from itertools import product
from types import ModuleType, UnionType
from typing import Any

import pytest
from jinja2 import meta, nodes

import weft
from weft.codegen import context as common
from weft.codegen import generate
from weft.codegen.context import Rows, declared, spread
from weft.codegen.loader import TEMPLATES, WITHOUT_HOLES
from weft.codegen.targets.cpu import context as of_cpu
from weft.codegen.targets.hopper import context as of_hopper
from weft.codegen.targets.hopper.features import OF_A_BACKWARD, SUMS_OF_QUERIES
from weft.codegen.targets.triton import context as of_triton
from weft.codegen.targets.triton.target import KERNELS
from weft.codegen.templates import environment
from weft.compiler.planning.sources import DENSE
from weft.ir.errors import InternalError

ROOM = TEMPLATES / "hopper" / "roles"
FAMILIES = {"cpu": of_cpu, "hopper": of_hopper, "triton": of_triton}
BESIDE = {  # modules of triton that run beside those of a direction, by template
    "triton/tile_spans.py.jinja": (of_triton.Measuring,),
    "triton/tile_lists.py.jinja": (of_triton.Measuring,),
    "triton/distance_tables.py.jinja": (of_triton.Tables,),
}
ROLES = {  # templates of roles, which programs name (codegen/targets/gluon/program.py)
    f"hopper/{root}.py.jinja": [f"hopper/roles/{p.name}" for kind in kinds for p in ROOM.glob(f"{kind}_*.jinja")]
    for root, kinds in (
        ("flash_forward", ["forward"]), ("flash_backward", ["backward", "dquery"]), ("split_kv_forward", ["split"])
    )
}  # fmt: skip
HOPPER: dict[str, type] = {
    "hopper/split_kv_forward.py.jinja": of_hopper.Latent,
    "hopper/flash_backward.py.jinja": of_hopper.Backward,
}


@cache
def records_of(module: ModuleType) -> list[type]:
    return [r for r in vars(module).values() if is_dataclass(r) and r.__module__ == module.__name__]


@cache
def nested(record: type) -> frozenset[type]:
    """Records of the context modules that the fields of a record hold."""
    found: set[type] = set()
    for hint in typing.get_type_hints(record).values():
        for part in [hint, *typing.get_args(hint), *(a for h in typing.get_args(hint) for a in typing.get_args(h))]:
            if is_dataclass(part) and any(part in records_of(m) for m in (common, *FAMILIES.values())):
                found |= {part, *nested(part)}
    return frozenset(found)


@cache
def top_level(module: ModuleType) -> list[type]:
    """Records of a module that are spread, and are in no field of another."""
    found = records_of(module)
    return [
        r for r in found if not any(r in nested(other) for m in (common, *FAMILIES.values()) for other in records_of(m))
    ]


@cache
def roots() -> list[str]:
    """Templates of modules."""
    found = [p for family in FAMILIES for p in (TEMPLATES / family).glob("*.jinja")]
    found += (TEMPLATES / "triton" / "teaching").glob("*.jinja")
    names = (str(p.relative_to(TEMPLATES)) for p in found)
    fixed = [f"triton/{name}.py.jinja" for name in WITHOUT_HOLES]
    return sorted(n for n in names if n not in fixed)


@cache
def told(root: str) -> list[type]:
    """The records that the template of a module is told."""
    if root in BESIDE:
        return [common.Comments, common.Printed, *BESIDE[root]]
    family, backward = root.split("/")[0], "backward" in root
    shared = [r for r in top_level(common) if backward or r is not common.Gradients]
    own = {
        "cpu": [*top_level(of_cpu)],
        "triton": [r for r in top_level(of_triton) if r not in (of_triton.Measuring, of_triton.Tables)],
        "hopper": [of_hopper.Operands, HOPPER.get(root, of_hopper.Forward)],
    }
    other = of_triton.Quantized if backward else of_triton.PairSums
    return [*shared, *(r for r in own[family] if r is not other)]


# -- what a template reads ---------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Text:
    """A template, parsed."""

    outside: frozenset[str]  # names that it reads and does not set
    at_once: frozenset[str]  # of these, those that are read outside of macros
    optional: frozenset[str]  # names that it asks for: `name is defined`, `name | default(...)`
    sets: frozenset[str]  # names that it sets, for what it includes too
    attributes: frozenset[str]  # attributes that it reads of anything
    reads: frozenset[tuple[str, str]]  # (name, attribute)
    others: frozenset[str]  # templates that it includes or imports


@cache
def parsed(name: str) -> Text:
    tree = environment(TEMPLATES).parse((TEMPLATES / name).read_text())
    sets = {n.name for n in tree.find_all(nodes.Name) if n.ctx != "load"}
    sets |= {n.name for n in tree.find_all(nodes.Macro)} | {n.target for n in tree.find_all(nodes.Import)}
    for n in tree.find_all(nodes.FromImport):
        sets |= {alias[1] if isinstance(alias, tuple) else alias for alias in n.names}
    dotted = [(n.node, n.attr) for n in tree.find_all(nodes.Getattr)]
    # selectattr('kind', ...), map(attribute='i')
    words = {n.value for n in tree.find_all(nodes.Const) if isinstance(n.value, str)}
    return Text(
        frozenset(meta.find_undeclared_variables(tree)),
        frozenset(_read_at_once(tree)),
        frozenset(_asked_for(tree)),
        frozenset(sets),
        frozenset({attr for _, attr in dotted} | words),
        frozenset((node.name, attr) for node, attr in dotted if isinstance(node, nodes.Name)),
        frozenset(_others(tree, words)),
    )


def _read_at_once(tree: nodes.Node) -> Iterator[str]:
    for child in tree.iter_child_nodes():
        if isinstance(child, nodes.Name) and child.ctx == "load":
            yield child.name
        if not isinstance(child, nodes.Macro):
            yield from _read_at_once(child)


def _asked_for(tree: nodes.Template) -> Iterator[str]:
    asking = [n for kind in (nodes.Filter, nodes.Test) for n in tree.find_all(kind) if n.name in ("default", "defined")]
    yield from (n.node.name for n in asking if isinstance(n.node, nodes.Name))


def _others(tree: nodes.Template, words: set[str]) -> Iterator[str]:
    """Templates that are named whole, and those whose names are put together."""
    yield from (word for word in words if word.endswith(".py.jinja") and "/" in word[1:] and not word.startswith("."))
    for n in (n for kind in (nodes.Include, nodes.Import, nodes.FromImport) for n in tree.find_all(kind)):
        if isinstance(n.template, nodes.Concat):
            for parts in product(*map(_words, n.template.nodes)):
                yield from (str(p.relative_to(TEMPLATES)) for p in TEMPLATES.glob("".join(parts)))


def _words(part: nodes.Expr) -> list[str]:
    """What an expression may stand for: two words, or anything."""
    if isinstance(part, nodes.CondExpr):
        return [*_words(part.expr1), *_words(part.expr2 or nodes.Const(""))]
    return [part.value if isinstance(part, nodes.Const) else "*"]


def parts_of(root: str) -> list[str]:
    """The parts of features of the kernels in a module."""
    if root == "hopper/flash_backward.py.jinja":
        return [feature.part for feature in (*OF_A_BACKWARD, *SUMS_OF_QUERIES)]
    of_root = [
        kernel
        for algorithm, kernels in KERNELS.items()
        for kernel in kernels
        if root == f"triton/{algorithm}_{kernel.direction}.py.jinja"
    ]
    return [feature.part for kernel in of_root for feature in kernel.features]


@cache
def closure(root: str) -> frozenset[str]:
    """A template, and all that it includes or imports."""
    found, left = set(), [root, *ROLES.get(root, ())]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            # a source of rows names parts of both directions
            left += [other for other in parsed(name).others if not ("forward" in root and "/backward_" in other)]
            left += parts_of(root) if "feature_parts" in parsed(name).outside else []
    return frozenset(found)


@pytest.mark.parametrize("root", roots())
def test_what_a_template_reads_is_declared(root: str) -> None:
    """A macro that only backwards call may read what they alone are told; one that is called elsewhere is found out by
    Jinja, which refuses to print an undefined name."""
    sets = {name for template in closure(root) for name in parsed(template).sets}
    own = {name for record in told(root) for name in declared(record)} | sets
    of_macros = own | {name for name in declared(common.Gradients)}
    for template in closure(root):
        text = parsed(template)
        assert text.outside - text.optional - of_macros == set(), template
        assert text.outside & text.at_once - text.optional - own == set(), template


@pytest.mark.parametrize("family", FAMILIES)
def test_each_field_of_a_family_is_read(family: str) -> None:
    for record in top_level(FAMILIES[family]):
        of_it = [root for root in roots() if record in told(root)]
        assert of_it, f"no template is told {record.__name__}"
        unread = set(declared(record)) - {name for root in of_it for t in closure(root) for name in parsed(t).outside}
        assert unread == set(), f"no template reads these of {record.__name__}"


def test_each_field_of_all_families_is_read() -> None:
    for record in top_level(common):
        of_it = [root for root in roots() if record in told(root)]
        unread = set(declared(record)) - {name for root in of_it for t in closure(root) for name in parsed(t).outside}
        assert unread == set(), f"no template reads these of {record.__name__}"


def test_each_field_of_a_record_in_a_field_is_read() -> None:
    modules = (common, *FAMILIES.values())
    for inner in (r for m in modules for r in records_of(m) if r not in top_level(m)):
        of_it = [root for root in roots() if any(inner in nested(record) for record in told(root))]
        read = {name for root in of_it for t in closure(root) for name in parsed(t).attributes}
        assert of_it and set(declared(inner)) - read == set(), inner.__name__


@pytest.mark.parametrize("root", roots())
def test_attributes_of_a_record_are_declared(root: str) -> None:
    """Of those that a template is handed under one name."""
    hints = {name: hint for record in told(root) for name, hint in typing.get_type_hints(record).items()}
    for template in closure(root):
        for name, attribute in parsed(template).reads:
            hint = hints.get(name)
            kinds = [hint, *(typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, UnionType) else ())]
            kinds = [kind for kind in kinds if is_dataclass(kind)]
            if kinds and name not in parsed(template).sets:
                assert any(hasattr(k, attribute) or attribute in declared(k) for k in kinds), (
                    template,
                    name,
                    attribute,
                )


# -- what records are --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("module", [common, *FAMILIES.values()], ids=lambda m: m.__name__)
def test_each_field_has_a_line_of_words(module: ModuleType) -> None:
    for record in records_of(module):
        lines = inspect.getsource(record).splitlines()
        for field in fields(record):
            assert any(re.match(rf"    {field.name}: .*  # \S", line) for line in lines), (record.__name__, field.name)


def test_a_name_has_one_record() -> None:
    with pytest.raises(InternalError, match="Rows declares sequences, which another record has"):
        spread(Rows(DENSE, "all", 64), Rows(DENSE, "all", 64))


@pytest.mark.parametrize("target", ["hopper", "triton", "cpu"])
def test_what_is_told_is_what_these_tests_take_it_for(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Generating hands a template the records that are listed here."""
    seen: dict[str, list[type]] = {}

    def written(template: str, records: Any, *rest: Any) -> str:
        seen[template] = [common.Comments, *map(type, records)]
        return original(template, records, *rest)

    original = generate.written
    monkeypatch.setattr(generate, "written", written)
    variant = weft.Attention(mask=weft.masks.causal, name="told")
    for direction in ("forward", "backward"):
        variant.source(
            weft.shape(heads=2, q_len=256, head_dim=64), direction=direction, target=target,
            device="cpu" if target == "cpu" else "h200",
        )  # fmt: skip
    assert len(seen) == 2
    for template, records in seen.items():
        assert set(records) == set(told(template)), template


# -- generating --------------------------------------------------------------------------------------------------------
def test_generating_is_short_and_knows_no_family() -> None:
    text = inspect.getsource(generate)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None and node.end_lineno - node.lineno < 40, node.name
    assert not re.search(r"family ==|triton/|hopper/|cpu/|\.targets", text)
