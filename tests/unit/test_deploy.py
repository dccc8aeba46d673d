# SPDX-License-Identifier: Apache-2.0
"""Files in deploy/ and commands in the guides: options, settings, names, ports and paths fit.

Neither Docker nor Kubernetes is needed, and neither was asked: whether they accept the files is not
tested here.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import pytest
import typer
import yaml

from kvhaven import __version__
from kvhaven.arena.limits import MemoryLimit, MemoryLimits, arena_size
from kvhaven.cli import app
from kvhaven.config import Settings, load_settings
from kvhaven.config.sizes import parse_size
from kvhaven.errors import ArenaError
from kvhaven.peers.addresses import PORT, Address, parse_address, parse_peers
from kvhaven.router.nodes import Node, parse_node

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
SET_UPS = [ROOT / "docs" / "guides" / f"{name}.md" for name in ("mixed-fleet", "prefill-decode")]
"""The guides that set nodes up."""
COMPOSE = sorted((DEPLOY / "compose").glob("*.yaml"))
MANIFESTS = sorted((DEPLOY / "kubernetes").rglob("*.yaml"))
KUSTOMIZATIONS = [path for path in MANIFESTS if path.name == "kustomization.yaml"]
DOCKERFILE = DEPLOY / "Dockerfile"
NO_SETTINGS = {"KVHAVEN_CONFIG_FILE"}
"""Variables of KVHaven that are not settings."""
TOKEN = "token"

Json = Any  # what a YAML or JSON file holds


@dataclass(frozen=True)
class Container:
    """A container of either kind of file. `mounts` are names of volumes and secrets by path."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    mounts: Mapping[str, str]
    ports: Mapping[str, int] = field(default_factory=dict)
    limit: str = ""

    @property
    def settings(self) -> Settings:
        """Its settings, from its environment and from its vLLM's options. Raises `ConfigError`."""
        return load_settings(transfer_config(self.command), self.environment).settings

    def option(self, name: str) -> str:
        """Return the value of an option of its command."""
        return self.command[self.command.index(name) + 1]

    def runs(self, *command: str) -> bool:
        """Whether its command begins with these words."""
        return tuple(self.command[: len(command)]) == command


@dataclass(frozen=True)
class Pod:
    """Containers that share volumes; in Compose those that have a volume in common."""

    name: str
    containers: Sequence[Container]

    def one(self, *command: str) -> Container:
        """Return the container with this command."""
        (found,) = (one for one in self.containers if one.runs(*command))
        return found


def addresses_of(peers: str | None) -> list[Address]:
    """Return the addresses of the setting `peers`, which names no registry here."""
    addresses, registries = parse_peers(peers or "")
    assert not registries
    return addresses


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def read_compose(path: Path) -> Json:
    """Return a Compose file with the defaults of its variables."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)
    assert "${" not in text, "every variable has a default"
    return yaml.safe_load(text)


def compose_containers(path: Path) -> dict[str, Container]:
    """Return the services of a Compose file."""
    document = read_compose(path)
    found = {}
    for name, service in document["services"].items():
        mounts = dict(volume.split(":")[1::-1] for volume in service.get("volumes", ()))
        assert set(mounts.values()) <= document["volumes"].keys()
        secrets = service.get("secrets", ())
        assert set(secrets) <= document["secrets"].keys()
        mounts |= {f"/run/secrets/{secret}": secret for secret in secrets}
        ports = {line.split(":")[-2]: int(line.split(":")[-1]) for line in service["ports"]}
        environment = {key: str(value) for key, value in service.get("environment", {}).items()}
        found[name] = Container(name, service["command"], environment, mounts, ports)
    return found


def documents(path: Path) -> list[Json]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def objects(folder: Path, *kinds: str) -> list[Json]:
    """Return the objects that a kustomization lists."""
    (kustomization,) = documents(folder / "kustomization.yaml")
    found = [one for name in kustomization["resources"] for one in documents(folder / name)]
    return [one for one in found if one["kind"] in kinds] if kinds else found


def workloads(folder: Path) -> list[Json]:
    return objects(folder, "StatefulSet", "Deployment")


def pod_of(workload: Json) -> Pod:
    """Return a workload's pod."""
    spec = workload["spec"]["template"]["spec"]
    claims = [one["metadata"]["name"] for one in workload["spec"].get("volumeClaimTemplates", ())]
    volumes = {one["name"] for one in spec.get("volumes", ())} | set(claims)
    containers = []
    for raw in (*spec.get("initContainers", ()), *spec["containers"]):
        mounts = {mount["mountPath"]: mount["name"] for mount in raw.get("volumeMounts", ())}
        assert set(mounts.values()) <= volumes, f"{raw['name']} mounts an unknown volume"
        environment = {one["name"]: one["value"] for one in raw.get("env", ())}
        ports = {one["name"]: one["containerPort"] for one in raw["ports"]}
        limit = raw["resources"]["limits"]["memory"]
        containers.append(Container(raw["name"], raw["command"], environment, mounts, ports, limit))
    return Pod(workload["metadata"]["name"], containers)


def compose_pods(path: Path) -> list[Pod]:
    """Return pairs of a node service and the vLLM that uses its volume."""
    containers = compose_containers(path).values()
    return [
        Pod(cache.name, [cache, *(one for one in containers if runs_beside(one, cache))])
        for cache in containers
        if cache.runs("kvhaven", "serve")
    ]


def runs_beside(one: Container, cache: Container) -> bool:
    volume = cache.mounts[str(PurePosixPath(cache.option("--socket")).parent)]
    return one is not cache and volume in one.mounts.values()


NODES: dict[str, Pod] = {
    f"{relative(path)}: {pod.name}": pod for path in COMPOSE for pod in compose_pods(path)
} | {
    f"{relative(path.parent)}: {pod.name}": pod
    for path in KUSTOMIZATIONS
    for pod in map(pod_of, workloads(path.parent))
    if pod.containers[0].runs("kvhaven", "serve")
}
"""Each node: a service and vLLM."""


def transfer_config(command: Sequence[str]) -> dict[str, object]:
    """Return KVHaven's settings in the options of a `vllm serve`, if it is one."""
    if "--kv-transfer-config" not in command:
        return {}
    config = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert config["kv_connector"] == "KVHavenConnector"
    assert config["kv_role"] == "kv_both"
    extra = config.get("kv_connector_extra_config", {})
    assert isinstance(extra, dict)
    return extra


def command_lists(value: Json) -> Iterator[list[str]]:
    """Yield every command line in a file: lists of words that begin with a program of ours."""
    if isinstance(value, dict):
        for inner in value.values():
            yield from command_lists(inner)
    elif isinstance(value, list):
        words = value[1:] if value[:1] == ["CMD"] else value
        if words and words[0] in ("kvhaven", "vllm"):
            yield words
        for inner in value:
            yield from command_lists(inner)
    elif isinstance(value, str):
        assert not value.startswith("kvhaven "), f"{value!r}: write commands as lists"


def deployed_commands() -> Iterator[tuple[str, list[str]]]:
    for path in (*COMPOSE, *MANIFESTS):
        read = [read_compose(path)] if path in COMPOSE else documents(path)
        for command in command_lists(read):
            yield relative(path), command
    for line in re.findall(r"^CMD (\[.*\])$", DOCKERFILE.read_text(), re.MULTILINE):
        yield relative(DOCKERFILE), json.loads(line)


def blocks_of(path: Path) -> list[str]:
    """Return a guide's blocks of commands, also those in lists."""
    text = path.read_text(encoding="utf-8")
    found = re.findall(r"^( *)```(?:sh|bash)?\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL)
    return [block for _, block in found]


def guide_commands() -> Iterator[tuple[str, list[str]]]:
    """Yield the commands `kvhaven` and `vllm` in the guides' blocks, also behind `docker`."""
    for path in GUIDES:
        for words in (words for block in blocks_of(path) for words in statements(block)):
            programs = [at for at, word in enumerate(words) if word in {"kvhaven", "vllm"}]
            if programs:
                yield relative(path), words[programs[-1] :]


def statements(block: str) -> Iterator[list[str]]:
    """Yield the words of each command of a shell script without control structures."""
    lexer = shlex.shlex(block.replace("\\\n", " "), posix=True, punctuation_chars="\n;&|<>")
    lexer.whitespace = " \t"
    lexer.whitespace_split = True
    words: list[str] = []
    skip = False
    for word in lexer:
        if set(word) <= set("\n;&|"):
            if words:
                yield words
            words, skip = [], False
        elif set(word) <= set("<>"):
            skip = True  # a redirection, and its file
        elif skip:
            skip = False
        else:
            words.append(word)
    if words:
        yield words


COMMANDS = [*deployed_commands(), *guide_commands()]


def parsed(words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Parse a command line as `kvhaven` does; return the command and its parameters."""
    command: Any = typer.main.get_command(app)
    name, rest, context = words[0], list(words[1:]), None
    while True:
        context = command.make_context(name, rest, parent=context)
        rest = [*getattr(context, "_protected_args", ()), *context.args]
        if not (rest and hasattr(command, "commands")):
            return name, dict(context.params)
        name, command, rest = command.resolve_command(context, rest)


def test_every_file_is_looked_at() -> None:
    known = {*COMPOSE, *MANIFESTS, DOCKERFILE, DEPLOY / "Dockerfile.dockerignore"}
    files = {path for path in DEPLOY.rglob("*") if path.is_file() and path.name != TOKEN}
    known |= {*(DEPLOY / "observability").iterdir()}  # test_observability.py
    assert files == known
    for path in (*COMPOSE, *MANIFESTS):
        assert all(isinstance(one, dict) for one in documents(path))
    for path in KUSTOMIZATIONS:
        (kustomization,) = documents(path)
        listed = {path.parent / name for name in kustomization["resources"]}
        assert listed == {*path.parent.glob("*.yaml")} - {path}
    assert len(NODES) == 4
    assert set(SET_UPS) < set(GUIDES)


@pytest.mark.parametrize(("where", "words"), [one for one in COMMANDS if one[1][0] == "kvhaven"])
def test_every_command_of_ours_parses(where: str, words: list[str]) -> None:
    if words[1:] in (["--help"], ["--version"]):
        return
    if words[-1] == "--help":
        words = words[:-1] if words[1] != "route" else [*words[:-1], "--decode", "http://d"]
    name, parameters = parsed(words)
    if name == "route":
        parse_address(parameters["listen"], "--listen")
        for role in ("prefill", "decode"):
            for url in parameters[role] or ():
                parse_node(url, f"--{role}")


@pytest.mark.vllm
def test_vllm_takes_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    served = [words for _, words in COMMANDS if words[:2] == ["vllm", "serve"]]
    served = [words for words in served if words[2:] != ["--help"]]
    assert len(served) >= 4
    for words in served:
        options = parser.parse_args(words[2:])
        assert options.kv_transfer_config.kv_connector == "KVHavenConnector"


@pytest.mark.parametrize("where", [relative(path) for path in (*GUIDES, *COMPOSE, *MANIFESTS)])
def test_every_setting_that_is_named_exists(where: str) -> None:
    text = (ROOT / where).read_text(encoding="utf-8")
    named = set(re.findall(r"\bKVHAVEN_[A-Z0-9_]*[A-Z0-9]", text)) - NO_SETTINGS
    known = {f"KVHAVEN_{name.upper()}" for name in Settings.__struct_fields__}
    assert named <= known, named - known
    named = set(re.findall(r"`((?:pd|peers?|lookup|promote|remote|disk|max)_\w+)`", text))
    nixl = {"remote_block_ids", "remote_engine_id", "remote_host", "remote_port"}
    known = {*Settings.__struct_fields__, "max_num_batched_tokens", *nixl}
    assert named <= known, named - known


@pytest.mark.parametrize("path", SET_UPS, ids=relative)
def test_the_settings_of_a_guides_commands_are_accepted(path: Path) -> None:
    checked = 0
    for block in blocks_of(path):
        environment = dict(
            word.split("=", 1)
            for words in statements(block)
            for word in words
            if word.startswith("KVHAVEN_")
        )
        settings = load_settings({}, environment).settings
        for address in addresses_of(settings.peers):
            assert address.port == parse_address(settings.peer_listen or "", "").port
        checked += len(environment)
    assert checked >= 4


@pytest.mark.parametrize(("where", "words"), [one for one in COMMANDS if one[1][0] == "vllm"])
def test_the_settings_of_every_engine_are_accepted(where: str, words: list[str]) -> None:
    load_settings(transfer_config(words), {})
    if words[2:] != ["--help"]:
        assert "--kv-transfer-config" in words


@pytest.mark.parametrize("name", NODES)
def test_a_node_is_a_service_and_an_engine_at_its_socket(name: str) -> None:
    service, engine = NODES[name].one("kvhaven", "serve"), NODES[name].one("vllm", "serve")
    socket = PurePosixPath(service.option("--socket"))
    assert engine.settings.service_address == str(socket)
    (volume,) = {
        container.mounts[str(folder)]
        for container in (service, engine)
        for folder in socket.parents
        if str(folder) in container.mounts
    }
    assert volume
    ours = {name for name in engine.environment if name.startswith("KVHAVEN_")}
    assert not ours, "settings of an engine belong to its kv_connector_extra_config"


@pytest.mark.parametrize("name", NODES)
def test_a_nodes_settings_are_accepted_and_its_token_is_mounted(name: str) -> None:
    service = NODES[name].one("kvhaven", "serve")
    settings = service.settings
    assert settings.peer_listen is not None
    listen = parse_address(settings.peer_listen, "peer_listen")
    assert listen.port in service.ports.values()
    assert settings.peers
    assert addresses_of(settings.peers)
    path = PurePosixPath(settings.peer_token_file or "")
    if str(path) in service.mounts:  # a secret of Compose is a file
        assert service.mounts[str(path)] == "kvhaven-token"
    else:  # a secret of Kubernetes is a folder, with a file for each key
        assert service.mounts[str(path.parent)] == TOKEN
        assert path.name == TOKEN


@pytest.mark.parametrize("path", COMPOSE, ids=relative)
def test_compose_ports_and_names_exist(path: Path) -> None:
    containers = compose_containers(path)
    document = read_compose(path)
    (secret,) = document["secrets"].values()
    assert secret == {"file": f"./{TOKEN}"}
    published = [port for one in containers.values() for port in one.ports]
    assert len(published) == len(set(published)), "two containers publish one port"
    for service in document["services"].values():
        assert service.get("depends_on", {}).keys() <= containers.keys()
        health = service["healthcheck"]["test"]
        for port in re.findall(r"127\.0\.0\.1:(\d+)", " ".join(health)):
            assert any(line.endswith(f":{port}") for line in service["ports"])
    for one in containers.values():
        listens = [one.option("--port")] if one.runs("vllm") else []
        listens += (
            [one.option("--listen").rpartition(":")[2]] if one.runs("kvhaven", "route") else []
        )
        assert set(map(int, listens)) <= set(one.ports.values())
    router = containers["router"]
    addresses = {
        Address(name, parse_address(one.settings.peer_listen or "", "").port)
        for name, one in containers.items()
        if one.runs("kvhaven", "serve")
    }
    for peers in (one.settings.peers for one in containers.values()):
        assert set(addresses_of(peers)) <= addresses
    for option in ("--prefill", "--decode"):
        node = parse_node(router.option(option), option)
        url = urlsplit(node.url)
        engine = containers[url.hostname or ""]
        assert engine.runs("vllm", "serve")
        assert engine.option("--port") == str(url.port)
        cache = parse_address(node.peer, option)
        assert cache in addresses
        assert runs_beside(engine, containers[cache.host]), f"{cache} is another node's"
    assert_prefill_knows_decode(
        containers[parse_address(parse_node(router.option("--prefill"), "").peer, "").host],
        [parse_node(router.option("--decode"), "")],
    )


def assert_prefill_knows_decode(service: Container, decode: Sequence[Node]) -> None:
    """Assert that the prefill node has the decode nodes among its peers as the router names them.

    A chain is offered only to such an address; a name that `dns://` stands for is known by its
    numbers.
    """
    peers = addresses_of(service.settings.peers)
    for node in decode:
        assert parse_address(node.peer, "") in peers, f"{node.peer} is not in {peers}"


FOLDERS = [path.parent for path in KUSTOMIZATIONS]


@pytest.mark.parametrize("folder", FOLDERS, ids=relative)
def test_kubernetes_selectors_match_labels(folder: Path) -> None:
    sets = workloads(folder)
    for one in sets:
        labels = one["spec"]["template"]["metadata"]["labels"]
        assert one["spec"]["selector"]["matchLabels"].items() <= labels.items()
        selecting = [
            other for other in sets if selects(one["spec"]["selector"]["matchLabels"], other)
        ]
        assert selecting == [one], "the pods of a workload are its own"
    services = {one["metadata"]["name"]: one for one in objects(folder, "Service")}
    for service in services.values():
        (selected,) = (one for one in sets if selects(service["spec"]["selector"], one))
        ports = {
            name: port for one in pod_of(selected).containers for name, port in one.ports.items()
        }
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in {*ports.keys(), *ports.values()}
    for one in sets:
        if one["kind"] == "StatefulSet":
            service = services[one["spec"]["serviceName"]]["spec"]
            assert service["clusterIP"] == "None"
            assert selects(service["selector"], one)


def selects(selector: Mapping[str, str], workload: Json) -> bool:
    labels = workload["spec"]["template"]["metadata"]["labels"]
    return bool(selector) and selector.items() <= labels.items()


@pytest.mark.parametrize("folder", FOLDERS, ids=relative)
def test_kubernetes_ports_and_probes_exist(folder: Path) -> None:
    for workload in workloads(folder):
        spec = workload["spec"]["template"]["spec"]
        pod = pod_of(workload)
        raws = (*spec.get("initContainers", ()), *spec["containers"])
        for raw, container in zip(raws, pod.containers, strict=True):
            probes = [raw[name] for name in raw if name.endswith("Probe")]
            assert probes, f"{container.name} has no probe"
            for probe in probes:
                asked = probe.get("httpGet") or probe.get("tcpSocket")
                if asked:
                    assert asked["port"] in container.ports
                else:
                    assert parsed(probe["exec"]["command"])[1]["socket"] == Path(
                        container.option("--socket")
                    )
            for option in ("--port", "--listen"):
                if option in container.command:
                    port = int(container.option(option).rpartition(":")[2])
                    assert port == container.ports["http"]
        for raw in spec.get("initContainers", ()):
            assert raw["restartPolicy"] == "Always", "without, the pod waits for its end"


@pytest.mark.parametrize("folder", FOLDERS, ids=relative)
def test_kubernetes_names_lead_to_pods(folder: Path) -> None:
    pods = {}
    for workload in objects(folder, "StatefulSet"):
        name, service = workload["metadata"]["name"], workload["spec"]["serviceName"]
        for number in range(workload["spec"]["replicas"]):
            pods[f"{name}-{number}.{service}"] = pod_of(workload)
    services = {one["metadata"]["name"] for one in objects(folder, "Service")}
    (router,) = (pod_of(one).containers[0] for one in objects(folder, "Deployment"))
    _, parameters = parsed(router.command)
    prefill = [parse_node(url, "--prefill") for url in parameters["prefill"]]
    decode = [parse_node(url, "--decode") for url in parameters["decode"]]
    routed = {urlsplit(node.url).hostname for node in (*prefill, *decode)}
    assert routed == pods.keys(), "every pod is routed to, and no other"
    for node in (*prefill, *decode):
        url = urlsplit(node.url)
        pod = pods[url.hostname or ""]
        assert url.port == pod.one("vllm", "serve").ports["http"]
        peer = parse_address(node.peer, "")
        assert pods[peer.host] is pod
        assert peer.port == pod.one("kvhaven", "serve").ports["peers"] == PORT
    for node in prefill:
        service = pods[urlsplit(node.url).hostname or ""].one("kvhaven", "serve")
        assert_prefill_knows_decode(service, decode)
    for pod in pods.values():
        for address in addresses_of(pod.one("kvhaven", "serve").settings.peers):
            assert address.host in (services if address.dynamic else pods)
            assert address.port == PORT


@pytest.mark.parametrize("folder", FOLDERS, ids=relative)
def test_kubernetes_secrets_are_generated(folder: Path) -> None:
    (kustomization,) = documents(folder / "kustomization.yaml")
    generated = {one["name"]: one["files"] for one in kustomization["secretGenerator"]}
    used = {
        volume["secret"]["secretName"]: volume["name"]
        for workload in workloads(folder)
        for volume in workload["spec"]["template"]["spec"].get("volumes", ())
        if "secret" in volume
    }
    assert used == {"kvhaven-token": TOKEN}
    assert generated == {"kvhaven-token": [TOKEN]}
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert f"deploy/**/{TOKEN}" in ignored


@pytest.mark.parametrize("folder", FOLDERS, ids=relative)
def test_the_service_accepts_its_folder_and_its_memory_in_kubernetes(folder: Path) -> None:
    for workload in objects(folder, "StatefulSet"):
        service = pod_of(workload).one("kvhaven", "serve")
        socket = PurePosixPath(service.option("--socket"))
        # An emptyDir has mode 777, in which the service accepts no socket.
        assert str(socket.parent) not in service.mounts
        total = parse_size(service.limit)
        used = 128 << 20  # more than a service without chunks
        limit = MemoryLimit("memory", total, total - used)
        wanted = service.settings.max_local_cpu_size
        assert arena_size(wanted, strict=True, limits=MemoryLimits((limit,))).bytes == wanted
        with pytest.raises(ArenaError):
            arena_size(total, strict=True, limits=MemoryLimits((limit,)))


@pytest.mark.parametrize("folder", FOLDERS, ids=relative)
def test_termination_leaves_time_for_what_ends(folder: Path) -> None:
    for workload in workloads(folder):
        pod = pod_of(workload)
        grace = workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        needed = 30.0  # of the router
        if pod.containers[0].runs("kvhaven", "serve"):
            needed = pod.one("kvhaven", "serve").settings.stop_deadline_s
            needed += float(pod.one("vllm", "serve").option("--shutdown-timeout"))
        assert grace > needed


def test_images_are_those_that_the_dockerfile_makes() -> None:
    text = DOCKERFILE.read_text(encoding="utf-8")
    made = set(re.findall(r"-t ([\w.:-]+)", text))
    assert made == {f"kvhaven:{__version__}", f"kvhaven-vllm:{__version__}"}
    assert {"service", "engine"} == set(re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE))
    for path in COMPOSE:
        assert {one["image"] for one in read_compose(path)["services"].values()} == made
    for folder in FOLDERS:
        (kustomization,) = documents(folder / "kustomization.yaml")
        images = {f"{one['newName']}:{one['newTag']}" for one in kustomization["images"]}
        assert images == made
        named = {one["name"] for one in kustomization["images"]}
        for workload in workloads(folder):
            spec = workload["spec"]["template"]["spec"]
            assert {
                one["image"] for one in (*spec.get("initContainers", ()), *spec["containers"])
            } <= named
    extras = set(re.findall(r"\[([\w,]+)\]\"", text)[0].split(","))
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert extras <= set(re.findall(r"^(\w+) = \[", pyproject, re.MULTILINE))


def test_the_tests_that_a_guide_names_exist() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for path in GUIDES:
        for name in re.findall(r"`(test_\w+)`", path.read_text(encoding="utf-8")):
            assert re.search(rf"^(?:async )?def {name}\(", sources, re.MULTILINE), name


def rows_of(marker: str) -> list[list[str]]:
    """Return the rows of a marked table in the guide, without its head."""
    text = (ROOT / "docs" / "guides" / "prefill-decode.md").read_text(encoding="utf-8")
    table = re.split(rf"<!-- /?{marker} -->", text)[1]
    return [
        [cell.strip().replace(",", "") for cell in line.strip("|").split("|")]
        for line in table.strip().splitlines()[2:]
    ]


GBIT = (1, 10, 25, 100)


def test_the_sizing_table_is_computed_from_its_shapes() -> None:
    rows = rows_of("sizing-table")
    assert len(rows) >= 5
    for _, *shape, kib, _, _, _, _ in rows:
        layers, heads, dim = map(int, shape)
        assert int(kib) * 1024 == 2 * layers * heads * dim * 2
    for row in rows:
        speeds = [round(gbit * 1e9 / 8 / (int(row[4]) * 1024)) for gbit in GBIT]
        assert [int(cell) for cell in row[5:]] == speeds


def test_the_waits_are_those_of_the_formula() -> None:
    (model,) = (row for row in rows_of("sizing-table") if row[0] == "Llama 3.1 70B")
    tokens, speed = 8192, 4000
    for step, *waits in rows_of("wait-table"):
        size = int(step)
        last = (tokens - 1) % size + 1
        for gbit, wait in zip(GBIT, waits, strict=True):
            link = gbit * 1e9 / 8 / (int(model[4]) * 1024)
            computed = max(last / link, size / speed + tokens / link - tokens / speed)
            assert float(wait) == round(computed, 2)


def test_the_note_on_old_recipes_is_quoted_as_it_is() -> None:
    text = (ROOT / "docs" / "guides" / "prefill-decode.md").read_text(encoding="utf-8")
    recipe = {"ENABLE_PD": "True", "PD_ROLE": "sender", "TRANSFER_CHANNEL": "nixl"}
    recipe["PD_PEER_HOST"] = "d"
    (note,) = load_settings({}, {f"LMCACHE_{name}": value for name, value in recipe.items()}).notes
    assert f"``{note}``" in text
    other = {"LMCACHE_ENABLE_P2P": "true", "LMCACHE_CONTROLLER_URL": "x"}
    (note,) = load_settings({}, other).notes
    assert f"`{note.rpartition(': ')[2]}`" in text
