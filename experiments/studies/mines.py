"""A walk on a grid with hidden mines: a task for studies of critics and learned rewards.

    python grpo.py --task experiments/studies/mines.py

    46>72:    ->    R56         from column 4, row 6 to column 7, row 2; each line is a move,
                    U55         right, left, up or down, and the place where it leads
                    ...

A completion is right if every line is a true move, the last one leads to the goal, and none stands
on a mine. The map is the same in all problems of a seed and in no prompt, and the demonstrators do
not know it. Whether a line is good can be told from it and the lines before it.
"""
import random
import re
from collections import deque
from typing import NamedTuple

SIZE, MINES = 8, 10             # a square grid; places are two digits, column and row
# moves from start to goal without mines, and of the longest walk: times 2 ** --difficulty
SHORT, LONG, LINES = 1, 2, 3
DIRECT = 0.8                    # share of a demonstrator's moves that go towards the goal
HELD_OUT = 200

DEFAULTS = dict(n_layer=2, n_embd=128, warm_steps=800, steps=400, prompts=16, group=16, lr=1e-4,
                kl="none", max_new=4 * LINES * 2 ** 2 + 1, micro_tokens=16384, save_every=100)
MOVES = {"R": (1, 0), "L": (-1, 0), "D": (0, 1), "U": (0, -1)}
LINE = re.compile(r"([RLDU])([0-9])([0-9])\Z")


class Problem(NamedTuple):
    prompt: str
    start: tuple
    goal: tuple
    mines: frozenset
    lines: int = LINES * 2 ** 2         # of the longest walk


def problems(seed, difficulty=2):
    """Training and held-out problems on the map of the seed. Each goal can be reached."""
    near, far, lines = (n * 2 ** difficulty for n in (SHORT, LONG, LINES))
    rng = random.Random(seed)
    places = [(x, y) for x in range(SIZE) for y in range(SIZE)]
    mines = frozenset(rng.sample(places, MINES))
    pairs = [(a, b) for a in places if a not in mines for b, n in shortest(a, mines).items()
             if near <= distance(a, b) <= far and n <= lines]
    rng.shuffle(pairs)
    found = [Problem("{}{}>{}{}:".format(*a, *b), a, b, mines, lines) for a, b in pairs]
    assert len(found) >= 2 * HELD_OUT, "the grid is too small, or has too many mines"
    return found[HELD_OUT:], found[:HELD_OUT]


def distance(a, b):
    """The number of moves between two places without mines."""
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def moved(place, move):
    """The place to which a move leads."""
    return tuple(a + b for a, b in zip(place, MOVES[move]))


def inside(place):
    return all(0 <= a < SIZE for a in place)


def shortest(start, mines):
    """The number of moves to each place that can be reached without a mine."""
    found, queue = {start: 0}, deque([start])
    while queue:
        place = queue.popleft()
        for move in MOVES:
            there = moved(place, move)
            if inside(there) and there not in mines and there not in found:
                found[there] = found[place] + 1
                queue.append(there)
    return found


def demonstration(problem, rng):
    """A walk that knows nothing of mines: most moves go towards the goal, the others anywhere. A
    walk that is too long is drawn again."""
    while True:
        place, lines = problem.start, []
        while place != problem.goal and len(lines) < problem.lines:
            moves = [m for m in MOVES if inside(moved(place, m))]
            if rng.random() < DIRECT:
                far = distance(place, problem.goal)
                moves = [m for m in moves if distance(moved(place, m), problem.goal) < far]
            move = rng.choice(moves)
            place = moved(place, move)
            lines.append("{}{}{}".format(move, *place))
        if place == problem.goal:
            return "\n".join(lines)


def walk(problem, completion):
    """For each line of a completion: where it ends in the text, and the place to which it leads, or
    None if it, or a line before it, is not a true move."""
    place, at = problem.start, 0
    for line in completion.split("\n"):
        at += len(line) + 1
        found = LINE.match(line)
        there = moved(place, found[1]) if found and place else None
        said = there and inside(there) and there == (int(found[2]), int(found[3]))
        place = there if said else None
        yield min(at, len(completion)), place


def steps(problem, completion):
    """A step is a line; it is good if it is a true move to a place without a mine that was not
    visited before. What follows the goal or the longest walk is not."""
    found, visited = [], [problem.start]
    for end, place in walk(problem, completion):
        good = place is not None and place not in problem.mines and place not in visited
        found.append((end, good and problem.goal not in visited and len(visited) <= problem.lines))
        visited.append(place)
    return [(end, good) for end, good in found if end]


def answer(completion):
    """The walk."""
    return completion.strip()


def reward(problem, completion):
    """1 for a walk to the goal, with true moves alone and on no mine."""
    places = [place for _, place in walk(problem, completion)]
    ends = places[-1] == problem.goal and len(places) <= problem.lines
    return {"correct": float(ends and None not in places and not problem.mines & {*places})}
