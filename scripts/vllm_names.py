# SPDX-License-Identifier: Apache-2.0
"""Names of vLLM in KVHaven's sources, read from their syntax trees: part of vllm_surface.py.

Objects of vLLM are known by the names of our variables, attributes and annotations, in the tables.
"""

import ast
import re

VARIABLES = {
    "config": "VllmConfig",
    "vllm_config": "VllmConfig",
    "self._vllm_config": "VllmConfig",
    "model": "ModelConfig",
    "parallel": "ParallelConfig",
    "scheduler": "SchedulerConfig",
    "load": "LoadConfig",
    "load_config": "LoadConfig",
    "transfer": "KVTransferConfig",
    "speculative": "SpeculativeConfig",
    "multimodal": "MultiModalConfig",
    "request": "Request",
    "raw": "Request",
    "self.raw": "Request",
    "lora": "LoRARequest",
    "lora_request": "LoRARequest",
    "sampling": "SamplingParams",
    "output": "SchedulerOutput",
    "scheduler_output": "SchedulerOutput",
    "new": "NewRequestData",
    "cached": "CachedRequestData",
    "pool": "BlockPool",
    "block": "KVCacheBlock",
    "blocks": "KVCacheBlocks",
    "kv_cache": "KVCacheConfig",
    "group": "KVCacheGroupSpec",
    "groups[0]": "KVCacheGroupSpec",
    "spec": "FullAttentionSpec",
    "mamba": "MambaSpec",
    "backend": "AttentionBackend",
    "connector_output": "KVConnectorOutput",
    "feature": "MultiModalFeatureSpec",
    "place": "PlaceholderRange",
    "events": "KVEventsConfig",
    "known[layer]": "Attention",
    "known.get(layer)": "Attention",
    "kernel": "AttentionImpl",
}
"""Classes of variables by their names, where they have no annotation."""

FIELDS = {
    "VllmConfig.model_config": "ModelConfig",
    "VllmConfig.cache_config": "CacheConfig",
    "VllmConfig.parallel_config": "ParallelConfig",
    "VllmConfig.scheduler_config": "SchedulerConfig",
    "VllmConfig.device_config": "DeviceConfig",
    "VllmConfig.load_config": "LoadConfig",
    "VllmConfig.compilation_config": "CompilationConfig",
    "VllmConfig.speculative_config": "SpeculativeConfig",
    "VllmConfig.kv_transfer_config": "KVTransferConfig",
    "VllmConfig.kv_events_config": "KVEventsConfig",
    "ModelConfig.multimodal_config": "MultiModalConfig",
    "SpeculativeConfig.draft_model_config": "ModelConfig",
    "Request.lora_request": "LoRARequest",
    "Request.sampling_params": "SamplingParams",
    "SchedulerOutput.scheduled_cached_reqs": "CachedRequestData",
    "KVCacheConfig.kv_cache_groups": "[KVCacheGroupSpec]",
    "KVCacheGroupSpec.kv_cache_spec": "FullAttentionSpec",
    "MultiModalFeatureSpec.mm_position": "PlaceholderRange",
}
"""Classes of attributes."""

PLACES = {
    "VllmConfig": "vllm.config",
    "ModelConfig": "vllm.config",
    "ParallelConfig": "vllm.config",
    "SchedulerConfig": "vllm.config",
    "CacheConfig": "vllm.config",
    "DeviceConfig": "vllm.config",
    "LoadConfig": "vllm.config",
    "CompilationConfig": "vllm.config",
    "SpeculativeConfig": "vllm.config",
    "KVTransferConfig": "vllm.config",
    "KVEventsConfig": "vllm.config",
    "MultiModalConfig": "vllm.config",
    "Request": "vllm.v1.request",
    "LoRARequest": "vllm.lora.request",
    "SamplingParams": "vllm.sampling_params",
    "SchedulerOutput": "vllm.v1.core.sched.output",
    "NewRequestData": "vllm.v1.core.sched.output",
    "CachedRequestData": "vllm.v1.core.sched.output",
    "BlockPool": "vllm.v1.core.block_pool",
    "KVCacheBlock": "vllm.v1.core.kv_cache_utils",
    "KVCacheBlocks": "vllm.v1.core.kv_cache_manager",
    "KVCacheConfig": "vllm.v1.kv_cache_interface",
    "KVCacheGroupSpec": "vllm.v1.kv_cache_interface",
    "FullAttentionSpec": "vllm.v1.kv_cache_interface",
    "MambaSpec": "vllm.v1.kv_cache_interface",
    "AttentionBackend": "vllm.v1.attention.backend",
    "Attention": "vllm.model_executor.layers.attention.attention",
    "AttentionImpl": "vllm.v1.attention.backend",
    "KVConnectorOutput": "vllm.v1.outputs",
    "MultiModalFeatureSpec": "vllm.multimodal.inputs",
    "PlaceholderRange": "vllm.multimodal.inputs",
    "Scheduler": "vllm.v1.core.sched.scheduler",
    "WorkerBase": "vllm.v1.worker.worker_base",
    "WorkerLoRAManager": "vllm.lora.worker_manager",
    "AutoWeightsLoader": "vllm.model_executor.models.utils",
}
"""Modules of the classes above and of those that are wrapped."""

WRAPPED = {
    "_CHANGE_WEIGHTS": "WorkerBase",
    "_TAKE_MEMORY": "WorkerBase",
    "_load_adapter": "WorkerLoRAManager",
    "load_weights": "AutoWeightsLoader",
    "reset_encoder_cache": "Scheduler",
}
"""Classes whose methods are wrapped, by a constant's name or by the method's."""

OURS = {"in_doubt", "encodings_dropped", "plan", "report", "requests", "data"}
"""Members that classes of ours add to those of vLLM."""

IN_FILES = {
    "encoder_cache.py": {"scheduler": "Scheduler"},
    "events.py": {"events": None},
    "loaded_model.py": {"model": None},
    "media.py": {"item": "MultiModalFeatureSpec", "feature": None},
    "requests.py": {"spec": None},
}
"""Variables that mean something else in one file (None: no object of vLLM)."""


def collect(sources):
    """Return the names in these sources as keys of lines; the value says if it is optional."""
    found = {}
    for name, text in sources.items():
        collector = Collector(IN_FILES.get(name, {}))
        collector.visit(ast.parse(text))
        for key, optional in collector.found.items():
            found[key] = optional and found.get(key, True)
    return found


class Collector(ast.NodeVisitor):
    """Collects the names of vLLM in one file."""

    def __init__(self, variables):
        self.found = {}
        self.imported = {}
        self.variables = VARIABLES | variables
        self.scopes = [{}]
        self.guarded = 0

    def add(self, key, *, optional=False):
        self.found[key] = (optional or bool(self.guarded)) and self.found.get(key, True)

    def visit_Try(self, node):
        caught = " ".join(ast.unparse(h.type) for h in node.handlers if h.type is not None)
        guard = int(bool(re.search(r"\b(ImportError|Exception)\b", caught)))
        self.guarded += guard
        for child in node.body:
            self.visit(child)
        self.guarded -= guard
        for child in [*node.handlers, *node.orelse, *node.finalbody]:
            self.visit(child)

    def visit_Import(self, node):
        for alias in node.names:
            if alias.name.partition(".")[0] == "vllm" and "." in alias.name:
                self.add(f"import {alias.name}")

    def visit_ImportFrom(self, node):
        if (node.module or "").partition(".")[0] != "vllm":
            return
        for alias in node.names:
            self.imported[alias.name] = node.module
            self.add(f"import {node.module} {alias.name}")

    def visit_ClassDef(self, node):
        for base in map(ast.unparse, node.bases):
            if base not in self.imported:
                continue
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and member.name not in OURS:
                    plain = not member.name.startswith("_") or member.name == "__init__"
                    decorators = {ast.unparse(one) for one in member.decorator_list}
                    if plain and "property" in decorators:
                        self.add(f"hook {self.imported[base]}.{base}.{member.name}")
                    elif plain:
                        names = parameters(member.args)
                        key = f"{self.imported[base]}.{base}.{member.name}"
                        self.add(f"hook {key}({', '.join(names)})")
        self.generic_visit(node)

    def visit_FunctionDef(self, node):
        scope = {}
        for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
            if argument.annotation is not None:
                names = re.findall(r"\w+", ast.unparse(argument.annotation).replace("None", ""))
                known = [name for name in names if name in PLACES]
                if known and len(names) == 1:
                    scope[argument.arg] = known[0]
                elif names[:1] != ["Any"]:
                    scope[argument.arg] = None  # an object of ours that has such a name
        self.scopes.append(scope)
        self.generic_visit(node)
        self.scopes.pop()

    def visit_Assign(self, node):
        self.generic_visit(node)
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            for one, value in pairs:
                kind = self.kind(value)
                if isinstance(one, ast.Name) and kind is not None:
                    self.scopes[-1][one.id] = kind
            if isinstance(target, ast.Name) and target.id in WRAPPED:
                for name in ast.literal_eval(node.value):
                    self.wrap(WRAPPED[target.id], name)

    def visit_For(self, node):
        self.bind(node.target, node.iter)
        self.generic_visit(node)

    def visit_comprehension(self, node):
        self.bind(node.target, node.iter)
        self.generic_visit(node)

    def visit_GeneratorExp(self, node):
        self.comprehended(node)

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp  # noqa: N815

    def comprehended(self, node):
        for generator in node.generators:
            self.visit(generator)
        for field in ("elt", "key", "value"):
            if hasattr(node, field):
                self.visit(getattr(node, field))

    def bind(self, target, iterated):
        kind = self.kind(iterated)
        if isinstance(target, ast.Name) and kind is not None and kind.startswith("["):
            self.scopes[-1][target.id] = kind[1:-1]

    def visit_Attribute(self, node):
        self.generic_visit(node)
        owner = ast.unparse(node.value)
        if owner == "vllm.envs":
            self.add(f"read vllm.envs.{node.attr}")
        elif owner in self.imported and owner[:1].isupper():
            self.add(f"read {self.imported[owner]}.{owner}.{node.attr}")
        elif owner in self.imported:  # a module
            self.add(f"import {self.imported[owner]}.{owner} {node.attr}")
        kind = self.kind(node.value)
        if kind is not None and not kind.startswith("[") and node.attr != "__name__":
            self.add(f"read {PLACES[kind]}.{kind}.{node.attr}")

    def visit_Call(self, node):
        name = ast.unparse(node.func)
        if name in {"getattr", "hasattr"} and len(node.args) > 1:
            self.read_by_name(node)
        elif name == "wrap_method" and isinstance(node.args[1], ast.Constant):
            self.wrap(WRAPPED[node.args[1].value], node.args[1].value)
        elif name.partition(".")[0] in self.imported and not name.startswith("self"):
            owner = name.partition(".")[0]
            keywords = [f"{keyword.arg}=" for keyword in node.keywords if keyword.arg]
            shape = ", ".join([str(len(node.args)), *keywords])
            self.add(f"call {self.imported[owner]}.{name}({shape})")
        self.generic_visit(node)

    def read_by_name(self, node):
        owner, name = node.args[:2]
        if not isinstance(name, ast.Constant):
            return
        optional = len(node.args) > 2 or ast.unparse(node.func) == "hasattr"  # noqa: PLR2004
        kind = self.kind(owner)
        if ast.unparse(owner) == "vllm.envs":
            self.add(f"read vllm.envs.{name.value}", optional=optional)
        elif kind is not None and not kind.startswith("["):
            self.add(f"read {PLACES[kind]}.{kind}.{name.value}", optional=optional)

    def wrap(self, kind, name):
        self.add(f"wrap {PLACES[kind]}.{kind}.{name}")

    def kind(self, node):
        """Return the class of an expression's value, None if it is not known or not vLLM's."""
        text = ast.unparse(node)
        for scope in reversed(self.scopes):
            if text in scope:
                return scope[text]
        if isinstance(node, ast.Attribute):
            owner = self.kind(node.value)
            if owner is not None and f"{owner}.{node.attr}" in FIELDS:
                return FIELDS[f"{owner}.{node.attr}"]
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            owner, name = self.kind(node.args[0]), node.args[1]
            if owner is not None and isinstance(name, ast.Constant):
                return FIELDS.get(f"{owner}.{name.value}")
        return self.variables.get(text)


def parameters(arguments):
    """Return a signature's parameters without annotations; `=` marks those with a default."""
    positional = [*arguments.posonlyargs, *arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    names = [one.arg + "=" * (at >= first_default) for at, one in enumerate(positional)]
    if arguments.vararg:
        names.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        names.append("*")
    for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        names.append(one.arg + "=" * (default is not None))
    if arguments.kwarg:
        names.append(f"**{arguments.kwarg.arg}")
    return names
