"""Which router to ask next. Pure: time comes in.

Responsible for the order of routers: the one that worked stays first, one that failed goes to the
end and is set aside for a while. Must never drop an address the caller gave: what the service names
may not be reachable from here (a forwarded port, a name that stands for all routers), and after a
full replacement only the caller's name may still lead anywhere. Called by AsyncClient.
"""

from __future__ import annotations

from collections.abc import Iterable

from moe_serve.errors import FieldViolation, InvalidArgument

SET_ASIDE_S = 5.0
"""A failed router is tried last for this long."""
ADDRESSES_MAX = 256
"""Routers remembered; more than that in the service's own list are not used."""


class Endpoints:
    """Addresses in the order of preference of this client.

    Args:
        addresses: the caller's, host:port; kept for good.
        first: rotates the order, so that clients spread over routers.

    Raises InvalidArgument for no address, more than ADDRESSES_MAX, or one without a port.
    """

    def __init__(self, addresses: Iterable[str], first: int = 0) -> None:
        if isinstance(addresses, str):
            raise _invalid(f"is the text {addresses!r}; want a list of host:port")
        given = list(dict.fromkeys(addresses))
        if not 1 <= len(given) <= ADDRESSES_MAX:
            raise _invalid(f"holds {len(given)}; want 1 to {ADDRESSES_MAX}, each host:port")
        for address in given:
            if not address.rpartition(":")[0] or not address.rpartition(":")[2].isdecimal():
                raise _invalid(f"holds {address!r}; want host:port")
        self._given = frozenset(given)
        self._set_aside: dict[str, float] = {}
        shift = first % len(given)
        self._addresses = given[shift:] + given[:shift]

    @property
    def addresses(self) -> tuple[str, ...]:
        """All known routers, preferred first."""
        return tuple(self._addresses)

    def pick(self, at_s: float, not_these: frozenset[str] = frozenset()) -> str:
        """Preferred router that is neither set aside nor in `not_these`; failing that, one not in
        `not_these`; failing that, any: each time the one set aside longest ago."""
        for address in self._addresses:
            if address not in not_these and self._set_aside.get(address, at_s) <= at_s:
                return address
        rest = [a for a in self._addresses if a not in not_these] or self._addresses
        return min(rest, key=lambda a: self._set_aside.get(a, at_s))

    def failed(self, address: str, at_s: float) -> None:
        """Set a router aside and prefer all others to it."""
        if address not in self._addresses:
            return
        self._set_aside[address] = at_s + SET_ASIDE_S
        self._addresses.remove(address)
        self._addresses.append(address)

    def worked(self, address: str) -> None:
        """A router answered."""
        self._set_aside.pop(address, None)

    def learn(self, addresses: Iterable[str]) -> None:
        """Take the service's own list: new routers are added behind the known ones, those it no
        longer names are dropped unless the caller gave them."""
        named = list(dict.fromkeys(addresses))
        kept = [a for a in self._addresses if a in named or a in self._given]
        new = [a for a in named if a not in kept]
        self._addresses = (kept + new)[:ADDRESSES_MAX]
        self._set_aside = {a: t for a, t in self._set_aside.items() if a in self._addresses}


def _invalid(description: str) -> InvalidArgument:
    return InvalidArgument(
        f"addresses: {description}", violations=(FieldViolation("addresses", description),)
    )
