"""What deploy/ and the pages about it say is so: command lines parse, metrics and routes are served, files exist."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
import yaml

from quire.cli.main import app
from quire.types.config import EngineOptions, flat_fields
from quire.types.serving import ServeOptions

ROOT = Path(__file__).parents[2]
HADOLINT = shutil.which("hadolint", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
UNIT = DEPLOY / "systemd" / "quire.service"
MANIFEST = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "quire.yaml").read_text()))
KUBERAY = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "kuberay" / "quire-ray.yaml").read_text()))
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
PAGES = ("deploy.md", "from-vllm.md", "from-ollama.md", "from-llama-cpp.md", "troubleshooting.md")
# What is exposed only once there is something to count.
LATER = {"quire_energy_joules_total", "quire_admission_refused_total", "quire_kv_tier_failed_total"}


@cache
def program() -> Any:
    return typer.main.get_command(app)


def parse(words: list[str]) -> None:
    """Refuses words after `quire` that the program would: unknown commands and options, values out of range."""
    command, at = program(), 0
    while hasattr(command, "commands") and not words[at].startswith("-"):
        assert words[at] in command.commands, f"no command {words[at]!r}: {words}"
        command, at = command.commands[words[at]], at + 1
    with command.make_context("quire", words[at:]) as context:
        said = context.params
    if command.name == "serve":
        EngineOptions.of(**{f.name: said[f.name] for f in flat_fields()})
        ServeOptions(**{name: said[name] for name in ServeOptions.__dataclass_fields__})


def container() -> dict[str, Any]:
    return next(part for part in MANIFEST if part["kind"] == "Deployment")["spec"]["template"]["spec"]["containers"][0]


def ray_job() -> dict[str, Any]:
    return next(part for part in KUBERAY if part["kind"] == "RayJob")["spec"]


def ray_pods() -> list[dict[str, Any]]:
    cluster = ray_job()["rayClusterSpec"]
    return [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def unit(section: str, text: str) -> dict[str, str]:
    body = text.partition(f"[{section}]\n")[2].partition("\n[")[0]
    return dict(line.split("=", 1) for line in body.splitlines() if "=" in line and not line.startswith("#"))


def started() -> Iterator[tuple[str, list[str]]]:
    """(where, words after `quire`) of every server that a file here starts."""
    yield "Dockerfile", json.loads(re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)[-1])
    yield "compose", [re.sub(r"\$\{\w+:-(.*)\}", r"\1", word) for word in COMPOSE["services"]["quire"]["command"]]
    yield "kubernetes", container()["args"]
    program, *words = shlex.split(ray_job()["entrypoint"])
    assert program == "quire"
    yield "kuberay", words
    program, *words = shlex.split(unit("Service", UNIT.read_text())["ExecStart"])
    assert program.endswith("/bin/quire")
    yield "systemd", words


@pytest.mark.parametrize(("where", "words"), list(started()), ids=lambda value: value if isinstance(value, str) else "")
def test_servers_are_started_by_options_that_exist(where: str, words: list[str]) -> None:
    assert words[0] == "serve"
    parse(words)
    if where != "systemd":
        assert {"--host", "--host=0.0.0.0"} & set(words), "others must reach it through its container's port"


def test_ray_nodes_have_room_for_the_replicas_that_the_server_starts() -> None:
    said = dict(word[2:].split("=", 1) for word in shlex.split(ray_job()["entrypoint"]) if word.startswith("--"))
    cluster, (head, worker) = ray_job()["rayClusterSpec"], ray_pods()
    (group,), (one,) = cluster["workerGroupSpecs"], worker["spec"]["containers"]
    assert group["maxReplicas"] >= int(said["max-replicas"]) and group["minReplicas"] >= int(said["replicas"])
    assert one["resources"]["limits"]["nvidia.com/gpu"] == int(said["replica-gpus"])
    assert int(one["resources"]["requests"]["cpu"]) >= int(said["replica-cpus"])
    assert cluster["authOptions"] == {"mode": "token"}
    service = next(part for part in KUBERAY if part["kind"] == "Service")["spec"]
    assert service["selector"].items() <= {**head["metadata"]["labels"], "ray.io/node-type": "head"}.items()
    assert service["ports"][0]["targetPort"] in [port["name"] for port in head["spec"]["containers"][0]["ports"]]


def test_the_parser_refuses_what_the_program_refuses() -> None:
    wrong = {"No such option": ["--no-such"], "kv_memory": ["--kv-memory", "much"], "port": ["--port", "99999"]}
    for said, words in wrong.items():
        with pytest.raises(Exception, match=said):
            parse(["serve", *words])
    with pytest.raises(AssertionError, match="no command"):
        parse(["sreve"])


def blocks(page: str) -> Iterator[str]:
    """Command lines of a page's console blocks, comments and what comes before a program's name left out."""
    for block in re.findall(r"^```(?:console|sh)?\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        for line in block.splitlines():
            if match := re.match(r"(?:[$#] )?(?:\S*bin/)?(quire .*)", line):
                yield match[1]


@pytest.mark.parametrize("page", [*PAGES, "../README.md"])
def test_commands_of_the_pages_parse(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    for line in blocks(text):
        words = shlex.split(line, comments=True)[1:]
        end = next((i for i, word in enumerate(words) if word in (">", ">>", "|", "&&", "&")), len(words))
        parse(words[:end])


@pytest.mark.parametrize("page", PAGES)
def test_flags_that_pages_name_exist(page: str) -> None:
    """In prose and in the tables' columns about Quire; another program's flags stand in the first column only."""
    known = {name for command in every(program()) for p in command.params for name in (*p.opts, *p.secondary_opts)}
    text = re.sub(r"^```.*?^```", "", (ROOT / "docs" / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    if page.startswith("from-"):
        text = "\n".join(line.split(" | ", 1)[-1] if line.startswith("| ") else line for line in text.splitlines())
    text = re.sub(r"`(docker|podman|kubectl|--build-arg)\b[^`]*`", "", text)
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))
    assert named and named <= known, named - known


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("from-")])
def test_routes_are_the_same_or_not_there_as_pages_say(page: str, fake_server: str) -> None:
    rows = re.findall(r"^\| (`/.*?) \| (the same|\(none\))", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    assert rows
    for routes, said in rows:
        for route in re.findall(r"`(/[\w/]+)`", routes):
            there = httpx.get(fake_server + route).status_code != 404
            assert there == (said == "the same"), route


def every(command: Any) -> Iterator[Any]:
    yield command
    for inner in getattr(command, "commands", {}).values():
        yield from every(inner)


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> list[str]:
    board = json.loads((DEPLOY / "grafana" / "quire.json").read_text())
    return [t["expr"] for panel in board["panels"] for t in panel["targets"]] + [rule["expr"] for rule in rules()]


def test_rules_and_dashboards_ask_for_what_is_served(fake_server: str) -> None:
    text = httpx.get(f"{fake_server}/metrics").text
    served = set(re.findall(r"^((?:quire_|vllm:)\w+)", text, re.MULTILINE))
    asked = {name for expression in expressions() for name in re.findall(r"(?:quire_|vllm:)\w+", expression)}
    assert len(asked) >= 20 and asked <= served | LATER, asked - served - LATER
    for expression in expressions():
        for name, label, value in re.findall(r"((?:quire_|vllm:)\w+)\{(\w+)=\"([^\"$]+)\"", expression):
            assert re.search(rf'^{name}{{.*\b{label}="{value}"', text, re.MULTILINE), (name, label, value)


def test_rules_say_what_happened_and_how_urgent_it_is() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names)) >= 8
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket") and rule["annotations"]["summary"], rule["alert"]
        assert rule["expr"].count("(") == rule["expr"].count(")"), rule["alert"]


def test_probes_ask_routes_that_answer(fake_server: str) -> None:
    paths = {container()[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")}
    paths |= set(re.findall(r"urlopen\('http://127.0.0.1:8000(/\w+)'", DOCKERFILE))
    assert paths == {"/ready", "/health"}
    for path in paths:
        assert httpx.get(fake_server + path).status_code == 200


def test_scraping_goes_where_the_server_is() -> None:
    (job,) = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"][0]["targets"] == ["quire:8000"] and "quire" in COMPOSE["services"]
    secret = Path(job["authorization"]["credentials_file"]).name
    assert secret in COMPOSE["services"]["prometheus"]["secrets"] and secret in COMPOSE["secrets"]
    assert f'job="{job["job_name"]}"' in next(rule["expr"] for rule in rules() if rule["alert"] == "QuireDown")
    board = "/etc/quire-dashboards/quire.json"
    assert COMPOSE["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == board
    assert f"./grafana/quire.json:{board}:ro" in COMPOSE["services"]["grafana"]["volumes"]


def test_files_that_are_mounted_copied_or_included_are_there() -> None:
    mounts = [v.split(":")[0] for service in COMPOSE["services"].values() for v in service["volumes"]]
    for mount in (m for m in mounts if m.startswith(".")):
        assert (DEPLOY / mount).exists(), mount
    passed = re.findall(r"^!(\S+)", (DEPLOY / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    copied = [w for words in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE) for w in words.split()]
    assert set(copied) == set(passed) and all((ROOT / name).exists() for name in copied)
    for file in DEPLOY.rglob("kustomization.yaml"):
        told = yaml.safe_load(file.read_text())
        for name in (*told["resources"], *(patch["path"] for patch in told.get("patches", ()))):
            assert (file.parent / name).exists(), name


def test_nothing_runs_as_root_or_holds_a_secret() -> None:
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)
    for target in ("cpu", "cuda"):
        (stage,) = [s for s in stages if re.match(rf"\S+ AS {target}\n", s)]
        assert stage.rstrip().endswith("USER 10001:10001")
    pod = next(part for part in MANIFEST if part["kind"] == "Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 10001
    assert not any(part["kind"] == "Secret" for part in MANIFEST)
    for file in (path for path in DEPLOY.rglob("*") if path.is_file() and "secrets" not in path.parts):
        assert not re.search(r"sk-quire-|BEGIN [A-Z ]*PRIVATE KEY|(?i:password)\s*[:=]", file.read_text()), file


def test_stages_declare_the_arguments_they_use() -> None:
    """podman and buildah hand none down from one stage to the next."""
    for stage in re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]:
        used = set(re.findall(r"\$\{(PIP_ARGS|EXTRAS)\b", stage))
        assert used <= set(re.findall(r"^ARG (\w+)", stage, re.MULTILINE)), stage.partition("\n")[0]


def test_time_to_stop_is_longer_than_the_grace() -> None:
    grace = next(float(word.partition("=")[2]) for word in container()["args"] if word.startswith("--grace="))
    pod = next(part for part in MANIFEST if part["kind"] == "Deployment")["spec"]["template"]["spec"]
    pause = float(container()["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > pause + grace
    assert float(COMPOSE["services"]["quire"]["stop_grace_period"].rstrip("s")) > grace
    service = unit("Service", UNIT.read_text())
    words = shlex.split(service["ExecStart"])
    assert float(service["TimeoutStopSec"]) > float(words[words.index("--grace") + 1])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_knows_every_line_of_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/quire/bin/quire", "/bin/true"))
    extra = tmp_path / "quire.service.d"
    extra.mkdir()
    shutil.copy(UNIT.with_name("gpu.conf"), extra)
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool: apt-get install prometheus")
def test_prometheus_takes_its_files() -> None:
    for words in (["rules", "alerts.yml"], ["config", "--syntax-only", "prometheus.yml"]):
        done = subprocess.run(["promtool", "check", *words], cwd=DEPLOY / "prometheus", capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed; `make test-all` installs it")
def test_checkers_of_others_are_content() -> None:
    """hadolint, the schemas of Kubernetes, a parser of PromQL."""
    promql = pytest.importorskip("promql_parser")
    kubernetes = pytest.importorskip("kubernetes_validate")
    for expression in expressions():
        promql.parse(re.sub(r"\$__\w+", "5m", expression))
    with pytest.raises(ValueError):
        promql.parse("quire_a > 0.05 * on (instance) quire_b")  # matching beside a number
    for part in MANIFEST:
        kubernetes.validate(part, kubernetes.latest_version(), strict=True)
    pods = [
        {"apiVersion": "v1", "kind": "Pod", **pod} for pod in ray_pods()
    ]  # of KubeRay's own kinds there is no schema
    for part in (*pods, *(part for part in KUBERAY if part["kind"] == "Service")):
        kubernetes.validate(part, kubernetes.latest_version(), strict=True)
    done = subprocess.run([str(HADOLINT), str(DEPLOY / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
