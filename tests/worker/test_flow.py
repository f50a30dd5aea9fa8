"""How many frames pay: tables of measured seconds, and a simulated ring that agrees with them."""

import pytest

from specsot_worker.core.pipeline import MIN_PROMPT_ROWS, PipelineDepth

FLAT = ((1, 0.010), (256, 0.010))
KNEE = ((1, 0.010), (64, 0.010), (128, 0.020), (256, 0.040))
STEEP = ((1, 0.001), (256, 0.256))


def flow_of(curve, stages=4, hops=0.0, row=0.0, shares=None) -> PipelineDepth:
    """A flow that has seen steps of one row and of many, as `curve` says; hops take `row` more a row."""
    flow = PipelineDepth(stages, curve)
    shares = shares or [1 / stages] * stages
    table = dict(curve)
    for rows in (1, max(table)):
        for _ in range(60):
            spent = [table[rows] * share for share in shares]
            flow.record_step(rows, spent, sum(spent) + hops + row * rows, was_alone=True)
    return flow


@pytest.mark.parametrize(
    ("curve", "hops", "row", "rows", "branches", "most", "parts"),
    [
        (FLAT, 0.0, 0.0, 96, 6, 4, 1),  # every frame takes as long: one is best
        (FLAT, 0.2, 0.0, 96, 6, 4, 1),  # a long way changes nothing about that
        (KNEE, 0.0, 0.0, 48, 6, 4, 1),  # below the knee
        (STEEP, 0.0, 0.0, 240, 6, 4, 4),  # far past it: a frame for every stage
        (STEEP, 0.0, 0.0, 240, 2, 4, 2),  # no more frames than branches
        (STEEP, 0.0, 0.0, 240, 6, 1, 1),  # others have the credits
        (STEEP, 4.0, 0.0, 240, 6, 4, 1),  # past it, but the way is nearly all of a step
        (FLAT, 0.01, 0.001, 240, 6, 4, 4),  # rows take long to travel
    ],
)
def test_a_family_is_spread_past_the_knee_or_where_rows_travel_long(
    curve, hops, row, rows, branches, most, parts
):
    assert flow_of(curve, 4, hops, row).frames_per_family(rows, branches, most) == parts


def test_a_spread_changes_only_for_a_clear_gain_and_ends_where_there_is_none():
    flat, steep = flow_of(FLAT), flow_of(STEEP)
    flat.num_frames = 2
    assert flat.frames_per_family(96, 6, 4) == 1, "each frame costs something that no curve tells"
    assert steep.frames_per_family(240, 6, 4) == 4
    assert flow_of(KNEE).frames_per_family(100, 6, 4) == 2
    little, wavering = flow_of(KNEE, hops=0.03), flow_of(KNEE, hops=0.03)
    wavering.num_frames = 2
    assert little.frames_per_family(98, 6, 4) == 1, "two would be an eighth better"
    assert wavering.frames_per_family(98, 6, 4) == 2, "and are kept"


@pytest.mark.parametrize(
    ("stages", "hops", "shares", "limit", "most"),
    [
        (4, 0.0, None, 5, 4),  # a frame for every stage
        (4, 0.0025, None, 5, 5),  # and one for the way
        (4, 1.0, None, 5, 5),  # never more than the budget
        (2, 0.0, (0.9, 0.1), 3, 1),  # a second frame would wait for the slow stage
    ],
)
def test_as_many_frames_fly_as_fit_into_a_step(stages, hops, shares, limit, most):
    assert flow_of(FLAT, stages, hops, shares=shares).max_frames(limit - 1, limit) == most


def test_before_anything_is_known_the_least_fly():
    assert PipelineDepth(4, FLAT).max_frames(4, 5) == 4


@pytest.mark.parametrize(
    ("curve", "stages", "rows", "chunk"),
    [
        (FLAT, 4, 512, 512),  # a chunk costs the same whatever its length
        (STEEP, 4, 512, 64),  # stages work side by side on short ones
        (STEEP, 1, 512, 512),  # nobody to hand over to
        (STEEP, 4, 40, 512),  # it fits into one
    ],
)
def test_chunks_are_as_long_as_brings_a_prompt_through_soonest(curve, stages, rows, chunk):
    size = PipelineDepth(stages, curve).chunk_rows(rows, 512)
    assert size == chunk or (size >= rows and chunk >= rows)


def test_where_one_frame_flies_a_prompt_is_not_cut():
    assert PipelineDepth(4, STEEP, overlap=False).chunk_rows(512, 512) == 512


@pytest.mark.parametrize(
    ("curve", "stages", "writing", "waiting", "room", "rows"),
    [
        (FLAT, 1, 1, 1, 255, 255),  # nobody notices
        (KNEE, 1, 1, 1, 255, 143),  # 22.5 ms beside 10; all of them would take 40
        (STEEP, 1, 64, 1, 192, 82),  # 146 ms beside 64
        (STEEP, 1, 64, 31, 192, 149),  # half as many more will write soon
        (STEEP, 1, 1, 1, 255, MIN_PROMPT_ROWS),  # slowly, but they go on
        (STEEP, 1, 1, 1, 5, 5),
        (STEEP, 1, 9, 0, 64, 11),  # 20.25 ms beside 9
        (STEEP, 4, 40, 20, 192, 23),  # of a frame in four, and of stages that compute side by side
    ],
)
def test_a_decoding_sequence_does_not_stall_for_a_prompt(curve, stages, writing, waiting, room, rows):
    assert PipelineDepth(stages, curve).prompt_rows(writing, waiting, room) == rows


def test_where_one_frame_flies_it_takes_the_prompts_of_all():
    alone, together = PipelineDepth(4, STEEP, overlap=False), PipelineDepth(4, STEEP)
    assert alone.prompt_rows(40, 20, 192) > 3 * together.prompt_rows(40, 20, 192)


def test_what_steps_really_take_corrects_what_was_measured_beforehand():
    """Stages that share their cores: two frames take more than twice as long each, so a spread loses."""
    flow = flow_of(STEEP, 2)
    flow.record_step(240, (0.12, 0.12), 0.24, was_alone=True)
    assert flow.frames_per_family(240, 4, 2) == 2
    for _ in range(60):
        flow.record_step(120, (0.2, 0.2), 0.4, was_alone=False)
    assert flow.frames_per_family(240, 4, 2) == 1


def test_two_slow_steps_of_a_process_that_begins_are_forgotten_at_once():
    flow = flow_of(FLAT)
    for seconds in (0.1, 0.08, *[0.01] * 3):
        flow.record_step(6, [seconds / 4] * 4, seconds, was_alone=True)
    assert flow.frames_per_family(6, 6, 4) == 1


def test_a_step_with_others_in_flight_says_nothing_about_the_way():
    flow = flow_of(FLAT, 2, 0.001)
    before = flow.max_frames(2, 99)
    for _ in range(60):
        flow.record_step(1, (0.005, 0.005), 5.0, was_alone=False)
    assert flow.max_frames(2, 99) == before
