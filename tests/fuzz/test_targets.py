"""Every decode path on valid, nearly valid and random bytes: typed errors, bounded memory, round
trips. `make fuzz` runs the same targets for long."""

import dataclasses
import random
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moe_serve.errors import FieldViolation, InvalidArgument
from tests.fuzz import mutations
from tests.fuzz.target import Target, joined, pieces, refused
from tests.fuzz.targets import CORPUS, TARGETS, kept, target
from tests.fuzz.watch import Costly, run_watched

CORPUS_BYTES_MAX = 300_000
CHANGES_MAX = 4
RAW_BYTES_MAX = 400
FINDINGS = Path(__file__).parents[2] / ".fuzz" / "findings"
"""Where `make fuzz` puts them, too."""


class Shown(bytes):
    """An input that a report shows the beginning of."""

    def __repr__(self) -> str:
        return f"<{len(self)} bytes, {bytes(self[:200])!r}>"


@pytest.fixture(params=TARGETS, ids=lambda one: one.name)
def warm(request: pytest.FixtureRequest) -> Target:
    """A target that has loaded and compiled what it needs, which is not counted as an input's."""
    one: Target = request.param
    for seed in one.seeds():
        one.run(seed)
    return one


def test_valid_inputs_are_taken(warm: Target) -> None:
    seeds = warm.seeds()
    assert seeds
    for seed in seeds:
        assert run_watched(warm, seed), seed[:80]


def test_kept_inputs_hold(warm: Target) -> None:
    for data in kept(warm.name):
        run_watched(warm, data)


def test_changed_and_random_inputs_hold(warm: Target) -> None:
    pool = [*warm.seeds(), *kept(warm.name)]

    @settings(max_examples=warm.examples, database=None)
    @given(
        st.one_of(
            st.integers(0, 2**63).map(lambda seed: _changed(warm, pool, seed)),
            st.integers(0, 2**63).map(lambda seed: _changed(warm, pool, seed)),
            st.binary(max_size=RAW_BYTES_MAX).map(Shown),
        )
    )
    @example(Shown(b""))
    @example(Shown(b"\x91" * 3000))
    @example(Shown(b"[" * 3000))
    @example(Shown(b'{"a":' * 3000))
    def holds(data: Shown) -> None:
        try:
            run_watched(warm, data)
        except Exception as error:
            FINDINGS.mkdir(parents=True, exist_ok=True)
            (FINDINGS / warm.name).write_bytes(data)
            error.add_note(f"the input lies in {FINDINGS / warm.name}")
            raise

    holds()


def _changed(one: Target, pool: list[bytes], seed: int) -> Shown:
    rng = random.Random(seed)
    data = rng.choice(pool)
    for _ in range(rng.randint(1, CHANGES_MAX)):
        data = one.mutate(data, rng)
    return Shown(data[: one.max_bytes])


def test_what_is_kept_is_small_and_of_targets() -> None:
    names = {one.name for one in TARGETS}
    assert len(names) == len(TARGETS)
    folders = {path.name for path in CORPUS.iterdir()}
    assert folders == names
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= CORPUS_BYTES_MAX
    for one in TARGETS:
        assert all(len(data) <= one.max_bytes for data in kept(one.name)), one.name


def test_a_target_is_found_by_name() -> None:
    assert target("wire_frames").name == "wire_frames"
    with pytest.raises(KeyError, match="wire_frames"):
        target("none")


# ----------------------------------------------------------------- what the watch and targets see
def _broken(run: object) -> Target:
    return dataclasses.replace(TARGETS[0], name="broken", run=run)  # type: ignore[arg-type]


def test_memory_beyond_the_size_of_the_input_is_seen() -> None:
    one = _broken(lambda data: bool(bytearray(1 << 20)))
    with pytest.raises(Costly, match="allocate"):
        run_watched(one, b"1234")


def test_time_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzz.watch.INPUT_S_MAX", 0.0)
    with pytest.raises(Costly, match="kept broken"):
        run_watched(_broken(lambda data: True), b"")


def test_a_refusal_says_something_bounded_and_names_its_field() -> None:
    assert not refused(InvalidArgument("no"))
    with pytest.raises(AssertionError, match="says nothing"):
        refused(InvalidArgument(" "))
    with pytest.raises(AssertionError, match="5000 characters"):
        refused(InvalidArgument("x" * 5000))
    with pytest.raises(AssertionError, match="no field"):
        refused(InvalidArgument("no field", violations=(FieldViolation("", "x"),)))


def test_several_inputs_in_one_come_apart_again() -> None:
    parts = [b"", b"abc", b"x" * 300, b""]
    assert pieces(joined(parts), 8) == parts
    assert pieces(b"", 8) == [b""]
    assert len(pieces(b"\xff" * 100, 4)) <= 4


@pytest.mark.parametrize("mutate", [mutations.msgpack, mutations.json_text, mutations.yaml_text])
def test_changes_are_those_of_their_seed(mutate: mutations.Mutate) -> None:
    data = b'{"a": [1, 2.5, "x"], "b": {"c": null}}'
    made = [mutate(data, random.Random(seed)) for seed in range(50)]
    assert made == [mutate(data, random.Random(seed)) for seed in range(50)]
    assert len(set(made)) > 25
