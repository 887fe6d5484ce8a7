"""Which addresses a server may dial on behalf of a stranger: public unicast ones, nothing else.

The tables follow the IANA registries of special-purpose addresses rather than the interpreter's
`ipaddress.is_global`, whose answer has changed from release to release.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final

_SPECIAL_V4: Final = tuple(
    IPv4Network(text)
    for text in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # carrier-grade NAT
        "127.0.0.0/8",  # loopback
        "169.254.0.0/16",  # link-local, metadata services of clouds
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments
        "192.0.2.0/24",  # documentation
        "192.31.196.0/24",  # AS112
        "192.52.193.0/24",  # AMT
        "192.88.99.0/24",  # relays of 6to4
        "192.168.0.0/16",  # private
        "192.175.48.0/24",  # AS112
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/3",  # multicast, reserved, broadcast
    )
)
_UNICAST_V6: Final = IPv6Network("2000::/3")
"""The only range given out so far. Loopback, mapped and compatible IPv4, NAT64, unique local,
link-local and multicast addresses all lie outside of it."""
_SPECIAL_V6: Final = tuple(
    IPv6Network(text)
    for text in (
        "2001::/23",  # protocol assignments, among them Teredo, which embeds IPv4
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4, which embeds IPv4
        "2620:4f:8000::/48",  # AS112
        "3fff::/20",  # documentation
    )
)
_ISATAP: Final = frozenset({0x00005EFE, 0x02005EFE})
"""Upper half of an interface id whose lower half is an IPv4 address."""


def is_public(text: str) -> bool:
    """Whether a numeric address, as a resolver returns it, is public unicast.

    False for anything that is no canonical address, and for one with a scope.
    """
    try:
        address = ip_address(text)
    except ValueError:
        return False
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _SPECIAL_V4)
    return _is_public_v6(address)


def _is_public_v6(address: IPv6Address) -> bool:
    if address.scope_id is not None or address not in _UNICAST_V6:
        return False
    if (int(address) >> 32) & 0xFFFFFFFF in _ISATAP:
        return False
    return not any(address in network for network in _SPECIAL_V6)
