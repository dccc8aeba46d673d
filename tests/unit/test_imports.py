# SPDX-License-Identifier: Apache-2.0
"""Imports point one way (STYLE.md), and torch and vLLM stay where they belong."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"

_LEVELS = (
    {
        "errors",
        "types",
        "keys",
        "maps",
        "tenants",
        "plugins",
        "niceness",
        "ending",
        "descriptors",
        "protocol",
        "config",
    },
    {"arena", "catalog", "devices", "layouts", "peers", "tiers"},
    {"client", "gateway", "http_server", "router", "service"},
    {"identity"},
    {"engine"},
    {"cli", "integrations", "testing"},
)
"""Parts of KVHaven, lowest first: each imports from its own level and those below."""

_WITHOUT_TORCH = (_LEVELS[0] | _LEVELS[1] | _LEVELS[2]) - {"devices", "layouts"}

_WITHOUT_AIOHTTP = _LEVELS[0] | _LEVELS[1] | {"client", "service"}
"""The core, which is installed without the extras `api` and `router`."""

_MAKES = {make: f"kvhaven.devices.{make}" for make in ("cuda", "xpu", "hpu")}
"""Torch's modules for accelerators, and the only file that may use each."""

Sources = Mapping[str, str]
"""Source text by module name."""


def violations(sources: Sources) -> list[str]:
    """Return a sentence for each import that points the wrong way."""
    imports = {module: _imports(module, ast.parse(text)) for module, text in sources.items()}
    return [
        *_unknown_parts(imports),
        *_upward(imports),
        *_torch_within_reach(imports),
        *_vllm_outside_its_place(imports),
        *_aiohttp_within_reach(imports),
        *_makes_outside_their_places(sources, imports),
    ]


def circles(sources: Sources) -> list[list[str]]:
    """Return groups of modules that import each other, directly or through others.

    Imports for type checking and inside of functions count, too. `from package import module`
    imports the module; that it also runs the package's `__init__` is no circle.
    """
    found = {module: _imports(module, ast.parse(text)) for module, text in sources.items()}
    targets: dict[str, set[str]] = {}
    for module, names in found.items():
        ours = names & sources.keys() - {module}
        targets[module] = {n for n in ours if not any(m.startswith(f"{n}.") for m in ours)}
    reach = {module: _reachable(module, targets) for module in targets}
    groups = {
        tuple(sorted(other for other in reach[module] if module in reach[other]))
        for module in targets
        if module in reach[module]
    }
    return sorted(map(list, groups))


def hidden_names(text: str) -> list[str]:
    """Return names in annotations of fields that the same class defines otherwise.

    Python 3.14 evaluates annotations when they are read, and then finds the class's own attribute.
    """
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
            defined = {item.target.id for item in fields if isinstance(item.target, ast.Name)}
            used = (name for item in fields for name in ast.walk(item.annotation))
            found += [n.id for n in used if isinstance(n, ast.Name) and n.id in defined]
    return found


def _reachable(module: str, targets: Mapping[str, set[str]]) -> set[str]:
    """Return what a module imports, directly or through others; itself only by a circle."""
    reached: set[str] = set()
    pending = [*targets[module]]
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            pending += targets[name]
    return reached


def _unknown_parts(imports: Mapping[str, set[str]]) -> Iterator[str]:
    for module in imports:
        if module != "kvhaven" and _level(module) is None:
            yield f"{module}: no level is known for it; add it to _LEVELS"


def _upward(imports: Mapping[str, set[str]]) -> Iterator[str]:
    for module, targets in imports.items():
        for target in sorted(targets):
            level, above = _level(module), _level(target)
            if level is not None and above is not None and above > level:
                yield f"{module} imports {target}, which is a level above"


def _torch_within_reach(imports: Mapping[str, set[str]]) -> Iterator[str]:
    """Also through others: what a part imports must not import torch either."""
    for module in imports:
        if _part(module) not in _WITHOUT_TORCH:
            continue
        for reached in sorted(_reach(module, imports)):
            if any(_is_in(target, "torch") for target in imports[reached]):
                yield f"{module} reaches torch by {reached}"


def _aiohttp_within_reach(imports: Mapping[str, set[str]]) -> Iterator[str]:
    for module in imports:
        if _part(module) not in _WITHOUT_AIOHTTP:
            continue
        for reached in sorted(_reach(module, imports)):
            if any(_is_in(target, "aiohttp") for target in imports[reached]):
                yield f"{module} reaches aiohttp by {reached}"


def _vllm_outside_its_place(imports: Mapping[str, set[str]]) -> Iterator[str]:
    for module, targets in imports.items():
        if any(_is_in(target, "vllm") for target in targets) and not _is_in(
            module, "kvhaven.integrations.vllm"
        ):
            yield f"{module} imports vllm"


def _makes_outside_their_places(sources: Sources, imports: Mapping[str, set[str]]) -> Iterator[str]:
    for module, text in sources.items():
        attributes = {
            node.attr
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "torch"
        }
        for make, place in _MAKES.items():
            imported = any(_is_in(target, f"torch.{make}") for target in imports[module])
            if module != place and (make in attributes or imported):
                yield f"{module} uses torch.{make}"
        bridge = "habana_frameworks" in text
        if bridge and module != _MAKES["hpu"]:
            yield f"{module} uses Habana's bridge"


def _imports(module: str, tree: ast.Module) -> set[str]:
    """Every module named by an import anywhere in the file, and every `from` name as if one."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names)
    return found


def _reach(module: str, imports: Mapping[str, set[str]]) -> set[str]:
    """Return the modules of ours that importing `module` can load, itself and packages too."""
    reached: set[str] = set()
    pending = [module]
    while pending:
        name = pending.pop()
        if name not in imports or name in reached:
            continue
        reached.add(name)
        pending += [*imports[name], *([name.rpartition(".")[0]] if "." in name else [])]
    return reached


def _part(module: str) -> str:
    words = module.split(".")
    return words[1] if words[0] == "kvhaven" and len(words) > 1 else ""


def _level(module: str) -> int | None:
    part = _part(module)
    return next((level for level, parts in enumerate(_LEVELS) if part in parts), None)


def _is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def _read_sources() -> dict[str, str]:
    sources = {}
    for file in sorted((SOURCE / "kvhaven").rglob("*.py")):
        words = file.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(words[:-1] if words[-1] == "__init__" else words)
        sources[name] = file.read_text(encoding="utf-8")
    return sources


def test_imports_of_kvhaven_point_one_way() -> None:
    sources = _read_sources()
    assert len(sources) > 10
    assert violations(sources) == []


def test_no_modules_import_each_other() -> None:
    assert circles(_read_sources()) == []


def test_the_checker_sees_circles() -> None:
    sources = {
        "kvhaven.a": "def f():\n    from kvhaven.b import g",
        "kvhaven.b": "from kvhaven import c",
        "kvhaven.c": "if TYPE_CHECKING:\n    import kvhaven.a",
        "kvhaven.d": "import kvhaven.a",
    }
    assert circles(sources) == [["kvhaven.a", "kvhaven.b", "kvhaven.c"]]


@pytest.mark.parametrize(
    ("module", "text", "found"),
    [
        ("kvhaven.catalog.core", "from kvhaven.service import server", "a level above"),
        ("kvhaven.keys", "import kvhaven.tiers.local.tier", "a level above"),
        ("kvhaven.types", "def f():\n    from kvhaven import client", "a level above"),
        ("kvhaven.service.server", "import kvhaven.cli.serve", "a level above"),
        ("kvhaven.service.server", "import torch", "reaches torch"),
        ("kvhaven.arena", "from torch import Tensor", "reaches torch"),
        ("kvhaven.client", "import torch.nn as nn", "reaches torch"),
        (
            "kvhaven.tiers.local.tier",
            "from kvhaven.devices import cpu",
            "torch by kvhaven.dev",
        ),
        ("kvhaven.tiers.local.tier", "def f():\n    import torch", "reaches torch"),
        ("kvhaven.devices.cpu", "from vllm import LLM", "imports vllm"),
        ("kvhaven.cli.demo", "import vllm.config", "imports vllm"),
        ("kvhaven.service.server", "from kvhaven.gateway import app", "aiohttp by kvhaven.gateway"),
        ("kvhaven.layouts.paged", "import torch\ntorch.cuda.synchronize()", "uses torch.cuda"),
        ("kvhaven.engine.worker", "from torch import cuda", "uses torch.cuda"),
        ("kvhaven.engine.worker", "from kvhaven.integrations import vllm", "a level above"),
        ("kvhaven.devices.cuda", "import torch\ntorch.xpu.synchronize()", "uses torch.xpu"),
        ("kvhaven.devices.gather", "import habana_frameworks.torch", "uses Habana's bridge"),
        ("kvhaven.novelty", "", "no level is known"),
    ],
)
def test_the_checker_sees_what_points_the_wrong_way(module: str, text: str, found: str) -> None:
    others = {"kvhaven.devices": "", "kvhaven.devices.cpu": "import torch"}
    others["kvhaven.gateway.app"] = "from aiohttp import web"
    seen = violations({**others, module: text})
    assert any(found in sentence and sentence.startswith(module) for sentence in seen)


def test_the_checker_lets_pass_what_points_the_right_way() -> None:
    good = {
        "kvhaven": "",
        "kvhaven.types": "import msgspec",
        "kvhaven.devices.cuda": "import torch\ntorch.cuda.is_available()",
        "kvhaven.service.server": "from kvhaven.catalog import core\nfrom kvhaven import types",
        "kvhaven.integrations.vllm.start": "import vllm, torch\nfrom kvhaven.engine import worker",
        "kvhaven.cli.serve": "from kvhaven.service import server",
        "kvhaven.catalog.core": "import torchlike, vllmlike",
    }
    assert violations(good) == []


def test_the_checker_resolves_relative_imports() -> None:
    seen = violations({"kvhaven.catalog.core": "from ..service import server"})
    assert seen == [
        "kvhaven.catalog.core imports kvhaven.service, which is a level above",
        "kvhaven.catalog.core imports kvhaven.service.server, which is a level above",
    ]


def test_no_field_hides_a_name_that_its_class_annotates_with() -> None:
    found = {module: hidden_names(text) for module, text in _read_sources().items()}
    assert {module: names for module, names in found.items() if names} == {}


def test_hidden_names_are_found() -> None:
    assert hidden_names("class A:\n    b: b.C\n    d: int\n") == ["b"]
