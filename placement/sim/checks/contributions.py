"""I4, exactly one contribution, I5, one version, and I13, the right sum.

Responsible for joining what shards computed with what routers added.
"""

from __future__ import annotations

from collections import Counter

from placement.messages.history import RequestEnded, RequestOpened, RowsServed
from placement.sim.checks.base import InvariantBroken, Rules

Served = dict[int, tuple[tuple[int, ...], str]]
"""Row -> which k of it, and the version they were computed with."""


class ExactlyOnce:
    """I4: of a request that succeeds every valid pair is added once and nothing else is; of one
    that fails nothing is returned. I5: all of one version. I13: the sum is the oracle's."""

    def __init__(self) -> None:
        self._open: dict[int, RequestOpened] = {}
        self._served: dict[int, dict[int, Served]] = {}
        self.contributions = 0

    def rules(self) -> Rules:
        """See `Checker`."""
        return {
            RequestOpened: self._opened,
            RowsServed: self._rows_served,
            RequestEnded: self._ended,
        }

    def _opened(self, fact: RequestOpened) -> None:
        self._open[fact.request] = fact

    def _rows_served(self, fact: RowsServed) -> None:
        by_row: dict[int, list[int]] = {}
        for row, k in zip(fact.row, fact.k, strict=True):
            by_row.setdefault(row, []).append(k)
        served = self._served.setdefault(fact.request, {}).setdefault(fact.sub_id, {})
        for row, ks in by_row.items():
            served[row] = (tuple(ks), fact.held_version)

    def _ended(self, fact: RequestEnded) -> None:
        opened = self._open.pop(fact.request, None)
        served = self._served.pop(fact.request, {})
        if opened is None:
            raise InvariantBroken(f"I4: request {fact.request} ended twice, or never began")
        if fact.outcome != "ok":
            if fact.added:
                raise InvariantBroken(f"I4: request {fact.request} failed, yet returns a sum")
            return
        added: Counter[int] = Counter()
        versions = set()
        for sub_id, rows in fact.added:
            for row in rows:
                ks, version = served.get(sub_id, {}).get(row, ((), ""))
                if not ks:
                    raise InvariantBroken(
                        f"I4: request {fact.request} adds row {row} of sub-call {sub_id}, which no "
                        "shard computed"
                    )
                versions.add(version)
                added.update(row * opened.top_k + k for k in ks)
        wanted = Counter(opened.pairs)
        if added != wanted:
            lost, twice = sorted(wanted - added), sorted(added - wanted)
            raise InvariantBroken(
                f"I4: request {fact.request} lost pairs {lost[:4]}, added {twice[:4]} too often"
            )
        if len(versions) > 1:
            raise InvariantBroken(f"I5: request {fact.request} mixes versions {sorted(versions)}")
        if fact.wrong_rows:
            raise InvariantBroken(f"I13: request {fact.request}: {fact.wrong_rows} wrong rows")
        self.contributions += len(opened.pairs)

    def finish(self) -> None:
        """See `Checker`."""
