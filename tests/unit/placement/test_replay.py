"""Replay of journal segments and of expert traces."""

from itertools import pairwise

import msgspec
import numpy as np
import pytest

from placement.config import RebalanceConfig
from placement.messages import events as ev
from placement.messages.codec import encode
from placement.messages.effects import ComputeTarget, WakeAt
from placement.replay import (
    PerfectExecutor,
    recomputed,
    replay_segment,
    replay_trace,
    trace_windows,
)
from placement.sim.world import World
from tests.builders import make_spec, make_topology


def journal(seed=3, until_s=12.0):
    """A controller that has lived in a quiet world, and (event, effects) of its engine."""
    world = World(seed, faults=0)
    world.stage.clock.run_until(until_s)
    (controller,) = world.fleet.controllers
    return controller, list(controller.inputs)


def as_bytes(snapshot, steps):
    return encode(snapshot), [encode(event) for event, _ in steps], [encode(e) for _, e in steps]


def test_recorded_events_give_the_recorded_effects_byte_for_byte():
    controller, steps = journal()
    assert len(steps) > 50
    assert replay_segment(*as_bytes(controller.started_from, steps)) == ()


def test_replay_may_start_at_any_segment():
    world = World(4, faults=0)
    (controller,) = world.fleet.controllers
    cuts = [(controller.started_from, 0)]
    for end_s in (1.5, 3.7, 4.6, 10.0):
        world.stage.clock.run_until(end_s)
        cuts.append((controller.engine.snapshot(), len(controller.inputs)))
    for (snapshot, start), (_, end) in pairwise(cuts):
        assert replay_segment(*as_bytes(snapshot, controller.inputs[start:end])) == ()


def test_a_changed_effect_is_named():
    controller, steps = journal()
    number = next(i for i, (_, effects) in enumerate(steps) if effects.records)
    event, effects = steps[number]
    changed = list(steps)
    changed[number] = event, msgspec.structs.replace(effects, records=())
    (difference,) = replay_segment(*as_bytes(controller.started_from, changed))
    assert difference.startswith(f"event {number} ")
    assert "records[0] was nothing" in difference
    commands = (*effects.commands, WakeAt(at_s=1.0))
    changed[number] = event, msgspec.structs.replace(effects, commands=commands)
    (difference,) = replay_segment(*as_bytes(controller.started_from, changed))
    assert "is nothing" in difference


def test_the_first_of_several_effects_that_differs_is_named():
    controller, steps = journal()
    number = next(i for i, (_, effects) in enumerate(steps) if len(effects.commands) > 1)
    event, effects = steps[number]
    *others, last = effects.commands
    commands = (*others, msgspec.structs.replace(last, at_s=last.at_s + 1.0))
    changed = list(steps)
    changed[number] = event, msgspec.structs.replace(effects, commands=commands)
    (difference,) = replay_segment(*as_bytes(controller.started_from, changed))
    assert difference.endswith(f"commands[{len(others)}] was WakeAt, is WakeAt with other content")


def test_recorded_targets_can_be_computed_again():
    controller, steps = journal(seed=7)
    config = controller.engine.config
    events, effects = [e for e, _ in steps], [e for _, e in steps]
    targets = [e.plan for e in events if isinstance(e, ev.TargetComputed)]
    assert any(plan.moves for plan in targets)
    assert recomputed(events, effects, config) == ()
    other = msgspec.structs.replace(config, wave_adds_per_rank=1, wave_copies_from_rank=1)
    assert "computed differently" in recomputed(events, effects, other)[0]


def test_a_target_that_was_computed_and_can_be_no_more_is_a_difference():
    controller, steps = journal()
    events, effects = [e for e, _ in steps], [e for _, e in steps]
    at = next(
        i for i, e in enumerate(effects) if any(isinstance(c, ComputeTarget) for c in e.commands)
    )
    asked = [
        msgspec.structs.replace(c, policy="gone") if isinstance(c, ComputeTarget) else c
        for c in effects[at].commands
    ]
    effects[at] = msgspec.structs.replace(effects[at], commands=tuple(asked))
    (command,) = [c for c in asked if isinstance(c, ComputeTarget)]
    assert recomputed(events, effects, controller.engine.config) == (
        f"target {command.request_id} is computed differently now",
    )


def test_a_perfect_executor_carries_out_budgets_too():
    spec = make_spec(num_layers=2, num_experts=8)
    executor = PerfectExecutor(spec, make_topology([9, 9, 9]), RebalanceConfig())
    assert executor.totals() == (0, 0, 0)
    executor.take(ev.BudgetAsked(at_s=1.0, request_id=1, rank=0, budget_bytes=7 * 1000))
    layout = executor.engine.layout()
    assert (layout.slots[0, 7:] < 0).all()
    assert executor.engine.state.ranks[0].num_slots == 7
    assert layout.missing() == ()


def skewed_ids(rng, tokens, layers, experts, top_k):
    order = np.stack([rng.permutation(experts) for _ in range(layers)])
    drawn = np.minimum(rng.zipf(1.5, size=(tokens, layers, top_k)) - 1, experts - 1)
    return order[np.arange(layers)[None, :, None], drawn]


def test_a_trace_is_served_better_than_a_static_layout():
    rng = np.random.default_rng(0)
    spec = make_spec(num_layers=2, num_experts=16, top_k=2)
    ids = skewed_ids(rng, 8 * 512, 2, 16, 2)
    windows = trace_windows(ids, spec, window_tokens=512, window_s=2.0, sub_windows=4)
    assert len(windows) == 8
    assert sum(int(w.demand.sum()) for w in windows) == ids.size
    figures = replay_trace(windows, spec, make_topology([12] * 4), RebalanceConfig())
    assert figures.static <= figures.static_leveled < figures.served <= 1.0
    assert figures.windows[-1].served > 0.97
    assert figures.windows[-1].served > figures.windows[0].served
    assert figures.slot_writes == sum(w.slot_writes for w in figures.windows) > 0
    assert figures.copy_bytes == figures.slot_writes * spec.expert_bytes
    assert sum(figures.moves.values()) == sum(w.moves for w in figures.windows)
    assert "regret_reached" in figures.records


def test_a_trace_without_a_full_window_is_empty():
    spec = make_spec()
    ids = np.zeros((10, 1, 2), dtype=np.int32)
    windows = trace_windows(ids, spec, window_tokens=512, window_s=2.0, sub_windows=4)
    figures = replay_trace(windows, spec, make_topology([4, 4]), RebalanceConfig())
    assert (figures.windows, figures.served) == ((), 1.0)


def test_traces_of_another_shape_are_refused():
    spec = make_spec()
    with pytest.raises(ValueError, match="tokens, 1, top_k"):
        trace_windows(
            np.zeros((4, 2, 2), np.int32), spec, window_tokens=2, window_s=1.0, sub_windows=1
        )
    with pytest.raises(ValueError, match="ids must lie"):
        trace_windows(np.full((4, 1, 2), 4), spec, window_tokens=2, window_s=1.0, sub_windows=1)
