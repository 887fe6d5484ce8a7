"""Which URLs may be asked for before any name is resolved."""

from __future__ import annotations

import pytest
from yarl import URL

from ninfer.gateway.media.hosts import HostRules


@pytest.mark.parametrize(
    "url", ["http://a.org/x", "https://a.org", "http://a.org:80/", "https://a.org:443/?q#f"]
)
def test_any_host_at_the_usual_port(url: str) -> None:
    assert HostRules().allows(URL(url))


@pytest.mark.parametrize(
    "url",
    [
        "ftp://a.org/",
        "file:///etc/passwd",
        "gopher://a.org/",
        "//a.org/",
        "/x",
        "http:///x",
        "http://a.org:443/",
        "https://a.org:80/",
        "http://a.org:22/",
        "http://a.org:6379/",
        "http://user@a.org/",
        "http://user:word@a.org/",
        "http://:word@a.org/",
    ],
)
def test_nothing_else(url: str) -> None:
    assert not HostRules().allows(URL(url))


def test_list_names_hosts_suffixes_and_ports() -> None:
    rules = HostRules(("a.org", ".b.org", "c.org:8080"))
    allowed = ("http://A.org/", "https://a.org./", "http://x.b.org/", "http://y.x.b.org/",
               "http://c.org:8080/")  # fmt: skip
    assert all(rules.allows(URL(url)) for url in allowed)
    refused = ("http://x.a.org/", "http://b.org/", "http://evilb.org/", "http://c.org/",
               "http://a.org:8080/", "http://a.org.evil/", "http://u@a.org/")  # fmt: skip
    assert not any(rules.allows(URL(url)) for url in refused)
    assert not HostRules(()).allows(URL("http://a.org/"))
