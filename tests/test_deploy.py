"""What docs/deploy.md promises of its files, beside what tests/e2e/test_proxies.py runs."""

from __future__ import annotations

import re
import shlex
from configparser import RawConfigParser

import pytest

from ninfer.cli.parser import parse_invocation
from ninfer.gateway.limits import GatewayLimits
from ninfer.options import ServeOptions
from tests.helpers.model_paths import REPOSITORY
from tests.helpers.proxies import DEPLOY

GUIDE = (REPOSITORY / "docs" / "deploy.md").read_text(encoding="utf-8")
NGINX = (DEPLOY / "nginx.conf").read_text(encoding="utf-8")


@pytest.fixture
def service() -> dict[str, str]:
    parser = RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((DEPLOY / "ninfer@.service").read_text(encoding="utf-8"))
    return dict(parser["Service"])


def test_the_unit_starts_a_replica_and_waits_until_it_has_drained(service: dict[str, str]) -> None:
    program, *arguments = shlex.split(service["ExecStart"].replace("%i", "8081"))
    assert program.endswith("/bin/ninfer")
    options = parse_invocation(arguments, {}).read(ServeOptions)
    assert (options.host, options.port) == ("127.0.0.1", 8081)
    assert service["KillSignal"] == "SIGTERM"
    drain_s = options.drain_grace + options.drain_timeout
    assert drain_s < float(service["TimeoutStopSec"]) < drain_s + 30


def test_nginx_agrees_with_the_server_on_limits() -> None:
    (body_mib,) = re.findall(r"client_max_body_size (\d+)m;", NGINX)
    assert int(body_mib) == ServeOptions().max_request_mib
    (idle_s,) = re.findall(r"keepalive_timeout (\d+)s;", NGINX)
    assert int(idle_s) < GatewayLimits().idle_timeout_s


def test_every_file_is_in_the_guide_and_every_link_leads_to_one() -> None:
    files = {path.name for path in DEPLOY.iterdir()}
    assert set(re.findall(r"\]\(deploy/([^)]+)\)", GUIDE)) == files
    options = {name.replace("-", "_") for name in re.findall(r"`--([a-z-]+)`", GUIDE)}
    assert options - set(ServeOptions.__dataclass_fields__) <= {"queue_timeout", "cache_dir"}
