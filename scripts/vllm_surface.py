#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Collect the names of vLLM that KVHaven uses, and compare them with a version of vLLM.

    scripts/vllm_surface.py collect            print the surface, read in src/kvhaven
    scripts/vllm_surface.py check PATH ...     compare with packages: a wheel, an sdist, or a folder
                                               that contains the folder `vllm` (site-packages)

Both read source code only: neither vLLM nor torch is imported. The surface is kept in
tests/vllm_surface.txt, in lines of these forms:

    import MODULE NAME            a name that is imported
    hook CLASS.METHOD(PARAMETERS) a method that a class of ours overrides: vLLM calls it
    call NAME(N, KEYWORDS)        a call with N positional arguments and with keywords
    read CLASS.NAME               an attribute or method of an object of vLLM
    wrap CLASS.METHOD             a method that KVHaven wraps in this class and its subclasses
    other CLASS.METHOD            a hook that KVHaven leaves as it is

`optional` means that KVHaven copes without the name; `since 0.32` and `until 0.31` limit a line to
some versions. `other` lines, `since` and `until` are written by hand: `collect` keeps them.
"""

import argparse
import ast
import re
import sys
import tarfile
import zipfile
from pathlib import Path

from vllm_names import collect, parameters

ROOT = Path(__file__).resolve().parent.parent
SURFACE = ROOT / "tests" / "vllm_surface.txt"
SOURCES = ROOT / "src" / "kvhaven" / "integrations" / "vllm"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    collected = commands.add_parser("collect", help="print the surface, read in src/kvhaven")
    collected.add_argument("--sources", type=Path, default=SOURCES, help="folder of modules")
    check = commands.add_parser("check", help="compare with versions of vLLM")
    check.add_argument("packages", nargs="+", type=Path, metavar="PATH")
    for command in (collected, check):
        command.add_argument("--surface", type=Path, default=SURFACE, help="the file of names")
    arguments = parser.parse_args()
    before = arguments.surface.read_text() if arguments.surface.exists() else ""
    if arguments.command == "collect":
        print(surface_text(before, arguments.sources), end="")
        return
    failed = False
    for path in arguments.packages:
        package = open_package(path)
        problems, notes = compare(before, package)
        failed |= bool(problems)
        lines = sum(1 for _ in entries(before))
        print(f"{package.name} {package.version}: {lines} names, {len(problems)} differ")
        for problem in problems:
            print(f"  {problem}")
        for note in notes:
            print(f"  (optional) {note}")
    sys.exit(failed)


# --- the surface, from our sources ----------------------------------------------------------------


def surface_text(before, sources):
    """Return the surface of these sources; what is written by hand in `before` is kept."""
    notes = {entry.key: entry for entry in entries(before)}
    head = [line for line in before.splitlines() if line.startswith("#")]
    found = collect({file.name: file.read_text() for file in sorted(sources.glob("*.py"))})
    others = [entry for entry in notes.values() if entry.kind == "other"]
    found.update({entry.key: entry.optional for entry in others})
    lines = []
    for key, optional in found.items():
        line = key + (" optional" if optional else "")
        for word in ("since", "until"):
            value = getattr(notes[key], word) if key in notes else None
            line += f" {word} {value}" if value else ""
        lines.append(line)
    order = ("import", "hook", "other", "call", "read", "wrap")
    lines.sort(key=lambda line: (order.index(line.split()[0]), line))
    return "\n".join([*head, *lines]) + "\n"


# --- the file -------------------------------------------------------------------------------------


class Entry:
    """A line of the surface."""

    def __init__(self, line):
        match = re.fullmatch(
            r"((\w+) (.+?))( optional)?(?: since ([\d.]+))?(?: until ([\d.]+))?", line
        )
        if match is None:
            raise ValueError(f"tests/vllm_surface.txt: a line cannot be read (got {line!r})")
        self.key, self.kind, self.name, optional, self.since, self.until = match.groups()
        self.optional = bool(optional)

    def concerns(self, version):
        return not (
            (self.since and version < number(self.since))
            or (self.until and version > number(self.until))
        )


def entries(text):
    """Yield the lines of the surface."""
    for line in text.splitlines():
        if line and not line.startswith("#"):
            yield Entry(line)


def number(version):
    """Return major and minor of a version as a tuple."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


# --- a version of vLLM ----------------------------------------------------------------------------


class Package:
    """Source code of a version of vLLM; `read` returns a file's text by its path, or None."""

    def __init__(self, name, version, read, names):
        self.name = name
        self.version = version
        self.read = read
        self.names = names
        self._trees = {}
        self._callers = None

    def module(self, name):
        """Return the statements of a module, None if there is no such module."""
        if name not in self._trees:
            path = name.replace(".", "/")
            text = self.read(f"{path}.py")
            package = text is None
            text = self.read(f"{path}/__init__.py") if package else text
            tree = None if text is None else ast.parse(text)
            self._trees[name] = (tree, package)
        return self._trees[name][0]

    def find(self, module, name, seen=()):
        """Return `(module, node)` of a name, following imports; None if it is not there."""
        tree = self.module(module)
        if tree is None or (module, name) in seen:
            return None
        for node in statements(tree.body):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return module, node
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
            if any(isinstance(one, ast.Name) and one.id == name for one in targets):
                return module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        origin = self.origin(module, node)
                        there = self.find(origin, alias.name, (*seen, (module, name)))
                        return there or self.as_module(f"{origin}.{alias.name}")
        return self.as_module(f"{module}.{name}")

    def calls(self, place, name):
        """Return whether vLLM's code outside of its connectors uses a member of a class.

        A base class's own method may pass the call on, if that method is used.
        """
        if self.mentions(rf"\.{name}\b"):
            return True
        module, _, owner = place.rpartition(".")
        there = self.find(module, owner)
        methods = self.members(*there)[0].values() if there else ()
        return any(
            isinstance(one, ast.FunctionDef)
            and f"self.{name}(" in ast.unparse(one)
            and self.mentions(rf"\.{one.name}\b")
            for one in methods
        )

    def mentions(self, pattern):
        """Return whether vLLM's code outside of its own connectors matches the pattern."""
        if self._callers is None:
            folders = ("vllm/v1/", "vllm/distributed/kv_transfer/", "vllm/model_executor/layers/")
            connectors = "vllm/distributed/kv_transfer/kv_connector/v1/"
            files = [
                name
                for name in sorted(self.names)
                if name.startswith(folders)
                and (not name.startswith(connectors) or name == f"{connectors}metrics.py")
            ]
            text = "\n".join(self.read(name) or "" for name in files)
            self._callers = re.sub(r"^\s*(?:def|#).*|`[^`]*`", "", text, flags=re.MULTILINE)
        return re.search(pattern, self._callers) is not None

    def as_module(self, name):
        tree = self.module(name)
        return (name, tree) if tree is not None else None

    def origin(self, module, node):
        if not node.level:
            return node.module or ""
        self.module(module)
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + self._trees[module][1]]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def members(self, module, node, depth=0):
        """Return the members of a class and its bases, by name, and whether all were found."""
        found, complete = {}, True
        if not isinstance(node, ast.ClassDef) or depth > 8:  # noqa: PLR2004
            return found, False
        for base in node.bases:
            name = ast.unparse(base).partition("[")[0]
            if name in {"ABC", "object", "Generic", "Protocol", "Enum", "NamedTuple"}:
                continue
            there = self.find(module, name)
            if there is None:
                complete &= name.startswith("msgspec.") or name in {"str", "int"}
                continue
            inherited, whole = self.members(*there, depth + 1)
            found |= inherited
            complete &= whole
        for member in statements(node.body):
            found |= own_members(member, found)
        return found, complete


def own_members(node, before):
    """Return what a statement of a class's body adds to its members."""
    if isinstance(node, ast.FunctionDef):
        stored = {
            part.attr: part
            for part in ast.walk(node)
            if isinstance(part, ast.Attribute)
            and isinstance(part.ctx, ast.Store)
            and ast.unparse(part.value) == "self"
        }
        return {n: one for n, one in stored.items() if n not in before} | {node.name: node}
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
    return {one.id: node for one in targets if isinstance(one, ast.Name)}


def statements(body):
    """Yield the statements of a module or class, with those inside of `if` and `try`."""
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            inner = [*node.body, *node.orelse]
            if isinstance(node, ast.Try):
                inner += [one for handler in node.handlers for one in handler.body]
            yield from statements(inner)
        else:
            yield node


def open_package(path):
    """Return the package in a wheel, an sdist or a folder."""
    if path.is_dir():
        distributions = sorted(path.glob("vllm*.dist-info/METADATA"))
        metadata = [file.read_text(errors="replace") for file in distributions]

        def read_file(name):
            file = path / name
            return file.read_text(encoding="utf-8") if file.is_file() else None

        names = {str(file.relative_to(path)) for file in (path / "vllm").rglob("*.py")}
        return Package(path.name, version_in(metadata, path), read_file, names)
    if path.name.endswith((".tar.gz", ".tgz")):
        files = {}
        with tarfile.open(path) as archive:
            for member in archive:
                name = member.name.partition("/")[2]
                if member.isfile() and (name.endswith(".py") or name == "PKG-INFO"):
                    files[name] = archive.extractfile(member).read().decode(errors="replace")
    else:
        with zipfile.ZipFile(path) as archive:
            files = {
                name: archive.read(name).decode(errors="replace")
                for name in archive.namelist()
                if name.endswith((".py", ".dist-info/METADATA"))
            }
    metadata = [text for name, text in files.items() if name.endswith(("METADATA", "PKG-INFO"))]
    names = {name for name in files if name.startswith("vllm/")}
    return Package(path.name, version_in(metadata, path), files.get, names)


def version_in(metadata, path):
    """Return the version in a distribution's metadata."""
    for text in metadata:
        if match := re.search(r"^Version: (\S+)", text, re.MULTILINE):
            return match.group(1)
    sys.exit(f"{path}: no version of vLLM found; expected its wheel, sdist, or site-packages")


# --- the comparison -------------------------------------------------------------------------------


def compare(surface, package):
    """Return sentences about what differs, and about optional names that are absent."""
    problems, notes = [], []
    version, hooks = number(package.version), set()
    for entry in entries(surface):
        if entry.kind in {"hook", "other"}:
            hooks.add(entry.name.partition("(")[0])
        if not entry.concerns(version):
            continue
        problem = CHECKS[entry.kind](package, entry.name)
        if problem:
            (notes if entry.optional else problems).append(f"{entry.key}: {problem}")
    return problems + sorted(new_hooks(package, hooks)), notes


def new_hooks(package, known):
    """Yield a sentence for each public member of the connector's base class not in the surface."""
    module = "vllm.distributed.kv_transfer.kv_connector.v1.base"
    there = package.find(module, "KVConnectorBase_V1")
    for name, member in package.members(*there)[0].items() if there else ():
        public = not name.startswith("_") and isinstance(member, ast.FunctionDef)
        if public and f"{module}.KVConnectorBase_V1.{name}" not in known:
            yield f"other {module}.KVConnectorBase_V1.{name}: a hook that the surface lacks"


def check_import(package, text):
    module, _, name = text.partition(" ")
    if package.module(module) is None:
        return f"there is no module {module}"
    return None if not name or package.find(module, name) else f"{module} has no {name}"


def member_of(package, text):
    """Return the member that a dotted name means, its class's state, and what is wrong."""
    place, _, name = text.rpartition(".")
    module, _, owner = place.rpartition(".")
    there = package.find(module, owner)
    if there is None:
        return None, f"{module} has no {owner}"
    if isinstance(there[1], ast.Module):
        found = package.find(there[0], name)
        return (found[1], None) if found else (None, f"{place} has no {name}")
    members, complete = package.members(*there)
    if name in members:
        return members[name], None
    unsure = "" if complete else " (not all of its bases were found)"
    return None, f"{owner} has no {name}{unsure}"


def check_read(package, text):
    if text.startswith("vllm.envs."):
        name = text.rpartition(".")[2]
        source = package.read("vllm/envs.py") or ""
        return None if f'"{name}"' in source else f"vllm.envs has no {name}"
    return member_of(package, text)[1]


def check_hook(package, text):
    name, _, given = text.removesuffix(")").partition("(")
    member, problem = member_of(package, name)
    if problem:
        return problem
    place, _, called = name.rpartition(".")
    if called != "__init__" and not package.calls(place, called):
        return "nothing in vLLM calls it"
    if not given:
        return None
    if not isinstance(member, ast.FunctionDef):
        return "is no method any more"
    return differing(given.split(", "), parameters(member.args))


def differing(ours, theirs):
    """Return why a call with their parameters would not fit ours, None if it does."""
    plain = [one.rstrip("=") for one in ours if not one.startswith("**")]
    expected = [one.rstrip("=") for one in theirs if not one.startswith("**")]
    more = [one for one in ours[len(theirs) :] if not one.endswith("=") and one[0] != "*"]
    if plain[: len(expected)] != expected or more:
        return f"has other parameters (got {', '.join(theirs)})"
    keywords = any(one.startswith("**") for one in theirs)
    if keywords and not any(one.startswith("**") for one in ours):
        return "passes further keywords now"
    return None


def check_call(package, text):
    name, _, given = text.removesuffix(")").partition("(")
    count, *keywords = given.split(", ")
    place, _, last = name.rpartition(".")
    there = package.find(place, last)
    if there is not None and isinstance(there[1], ast.ClassDef):
        members, _ = package.members(*there)
        initial = members.get("__init__")
        if initial is None:  # a dataclass or struct: fields of all bases, in their order
            fields = [n for n, one in members.items() if isinstance(one, ast.AnnAssign)]
            return fits(int(count), keywords, fields, {*fields})
        names = parameters(initial.args)[1:]
    else:
        node = there[1] if there is not None else member_of(package, name)[0]
        if not isinstance(node, ast.FunctionDef):
            return f"{place} has no function {last}"
        names = parameters(node.args)
        if any(ast.unparse(one) == "classmethod" for one in node.decorator_list):
            names = names[1:]
    star = names.index("*") if "*" in names else len(names)
    optional = {one.rstrip("=") for one in names if one.endswith("=")}
    return fits(int(count), keywords, [one.rstrip("=") for one in names[:star]], optional) or None


def fits(count, keywords, names, optional):
    """Return what is wrong with a call of `count` arguments and keywords, None if it fits."""
    given = [*names[:count], *(keyword.rstrip("=") for keyword in keywords)]
    unknown = [one for one in given[count:] if one not in names]
    lacking = [one for one in names if one not in given and one not in optional]
    lacking = [one for one in lacking if not one.startswith("*")]
    if count > len(names) or unknown or lacking:
        return f"has other parameters (got {', '.join(names)})"
    return None


def check_wrap(package, text):
    """A method of this class or of a subclass, which may be in any file beside it."""
    place, _, name = text.rpartition(".")
    module, _, owner = place.rpartition(".")
    if package.find(module, owner) is None:
        return f"{module} has no {owner}"
    folder = module.rpartition(".")[0].replace(".", "/")
    pattern = re.compile(rf"^    (?:async )?def {name}\(", re.MULTILINE)
    files = [one for one in package.names if one.startswith(f"{folder}/")]
    if any(pattern.search(package.read(file) or "") for file in files):
        return None
    return f"no class in {folder} has {name}"


CHECKS = {
    "import": check_import,
    "hook": check_hook,
    "other": check_read,
    "call": check_call,
    "read": check_read,
    "wrap": check_wrap,
}


if __name__ == "__main__":
    main()
