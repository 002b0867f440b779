"""The task of experiments/studies/mines.py: its maps, demonstrations, rewards and steps, on a map drawn by hand."""
import random
import sys

import pytest
from conftest import ROOT


sys.path.insert(0, str(ROOT / "experiments" / "studies"))
import mines  # noqa: E402

# S at (1, 1), G at (3, 2), a mine at (2, 1).
WALK = mines.Problem("11>32:", (1, 1), (3, 2), frozenset({(2, 1)}))
RIGHT = "D12\nR22\nR32"


@pytest.mark.parametrize("text, right, good", [
    (RIGHT, 1, [1, 1, 1]),
    ("R21\nR31\nD32", 0, [0, 1, 1]),                    # over the mine
    ("D12\nR22", 0, [1, 1]),                            # not at the goal
    ("D12\nR22\nR33", 0, [1, 1, 0]),                    # not where the move leads
    ("D12\nR23\nR33\nU32", 0, [1, 0, 0, 0]),            # nothing counts after a false line
    ("D12\nU11\nD12\nR22\nR32", 1, [1, 0, 0, 1, 1]),    # places twice
    (RIGHT + "\nL22\nR32", 1, [1, 1, 1, 0, 0]),         # beyond the goal, and back
    (RIGHT + "\n", 0, [1, 1, 1, 0]), ("", 0, []), ("\n", 0, [0, 0]), ("D12 \nR22\nR32", 0, [0, 0, 0]), ("x\u0662", 0, [0]),
    ("D12\nR2\u0662\nR32", 0, [1, 0, 0])])
def test_rewards_and_steps_by_hand(text, right, good):
    assert mines.reward(WALK, text) == {"correct": right}
    found = mines.steps(WALK, text)
    assert [truth for _, truth in found] == good
    lines = [line + "\n" for line in text.split("\n")]
    ends = [min(sum(map(len, lines[:n + 1])), len(text)) for n in range(len(lines))]
    assert [end for end, _ in found] == ends[:len(found)]


def test_the_edge_of_the_grid_and_the_longest_walk():
    corner = mines.Problem("00>01:", (0, 0), (0, 1), frozenset())
    assert mines.steps(corner, "L-10") == [(4, False)] and mines.steps(corner, "U00") == [(3, False)]
    there_and_back = "\n".join(["R10", "L00"] * (corner.lines // 2) + ["D01"])
    assert mines.reward(corner, there_and_back) == {"correct": 0} and not mines.steps(corner, there_and_back)[-1][1]
    assert mines.reward(corner, there_and_back.partition("\n")[2].partition("\n")[2]) == {"correct": 1}


def test_a_map_is_that_of_its_seed():
    of_seed = {seed: mines.problems(seed) for seed in (1, 2)}
    maps = {seed: {p.mines for part in parts for p in part} for seed, parts in of_seed.items()}
    assert all(len(x) == 1 and len(next(iter(x))) == mines.MINES for x in maps.values()) and maps[1] != maps[2]
    train, held_out = of_seed[1]
    assert len(held_out) == mines.HELD_OUT and not {p.prompt for p in train} & {p.prompt for p in held_out}
    for p in train + held_out:
        assert p.prompt == "{}{}>{}{}:".format(*p.start, *p.goal) and not {p.start, p.goal} & p.mines
        assert 4 <= mines.distance(p.start, p.goal) <= 8 and mines.shortest(p.start, p.mines)[p.goal] <= p.lines == 12


def test_walks_are_longer_where_the_task_is_more_difficult():
    for difficulty, lines in ((1, 6), (3, 24)):
        for p in mines.problems(1, difficulty)[1]:
            assert p.lines == lines and lines / 3 <= mines.distance(p.start, p.goal) <= lines / 3 * 2
            assert len(mines.demonstration(p, random.Random(0)).split("\n")) <= lines


def test_demonstrators_know_the_goal_and_no_mine():
    problems, rng = mines.problems(1)[0], random.Random(0)
    towards = moves = mined = 0
    for problem in problems[:500]:
        text = mines.demonstration(problem, rng)
        places = [problem.start, *(place for _, place in mines.walk(problem, text))]
        assert None not in places and places[-1] == problem.goal and len(places) <= problem.lines + 1
        moves += len(places) - 1
        towards += sum(mines.distance(b, problem.goal) < mines.distance(a, problem.goal) for a, b in zip(places, places[1:]))
        mined += not problem.mines.isdisjoint(places)
    assert 0.8 < towards / moves < 0.95 and 200 < mined < 450
