"""A number is hidden in an interval, and each guess is answered: a game of several turns.

    17-79:                          the prompt: 17 to 79
    40                              a turn of the policy, which ends with a stop token
    +                               the reply: the number is larger; `-`: it is smaller
    63
    -
    51                              found; or the guesses are used up

There are as many guesses as halving needs. The demonstrations stay within what is left, but guess
anywhere in it: nobody shows that one should halve.

A task with a function `reply` is a game or has tools: see docs/turns.md. Its other functions get a
completion as a list of turns, the policy's, a reply, the policy's, and so on.
"""
import random
import re
from typing import NamedTuple

# On intervals set aside for this choice pass@1 rises from 63 % to 84 %. With one minibatch it rises
# to 81 %, with the KL to 80 %, at a learning rate of 1e-4 to 76 %, and at 6e-4 more slowly.
DEFAULTS = dict(steps=100, prompts=32, group=16, max_new=32, lr=3e-4, minibatches=2, kl="none",
                n_embd=128)

LEAST, MOST = 10, 99        # of the hidden numbers
SHORTEST, LONGEST = 7, 63   # numbers in an interval
EACH = 4                    # training problems of an interval
HELD_OUT = 500              # held-out problems, each of another interval

class Problem(NamedTuple):
    prompt: str     # "17-79:"
    hidden: int     # 51

def problems():
    """Training and held-out problems, of different intervals, the same for every seed."""
    rng = random.Random(0)
    intervals = [(low, high) for low in range(LEAST, MOST + 1) for high in range(low, MOST + 1)
                 if SHORTEST <= high - low + 1 <= LONGEST]
    rng.shuffle(intervals)
    made = [[Problem(f"{low}-{high}:", rng.randint(low, high)) for _ in range(EACH)]
            for low, high in intervals]
    held_out = [four[0] for four in made[:HELD_OUT]]
    return [problem for four in made[HELD_OUT:] for problem in four], held_out

def interval(problem):
    """The least and the largest number that may be hidden."""
    low, high = problem.prompt[:-1].split("-")
    return int(low), int(high)

def guesses(problem):
    """The number of guesses: with k, halving finds one of 2^k - 1 numbers."""
    low, high = interval(problem)
    return (high - low + 1).bit_length()

def number(text):
    """The number that a guess is, or None."""
    return int(text) if re.fullmatch("[0-9]{1,3}", text) else None

def reply(problem, turns):
    """The answer to the last guess; None if it is right, or no number, or there are no more."""
    guess = number(turns[-1])
    if guess in (None, problem.hidden) or len(turns[::2]) == guesses(problem):
        return None
    return "+" if problem.hidden > guess else "-"

def left(problem, turns):
    """The least and the largest number that the replies in `turns` leave."""
    low, high = interval(problem)
    for guess, said in zip(turns[::2], turns[1::2]):
        if said == "+":
            low = max(low, int(guess) + 1)
        else:
            high = min(high, int(guess) - 1)
    return low, high

def demonstration(problem, rng):
    """A game in which each guess is any number that is left."""
    turns = []
    while True:
        turns.append(str(rng.randint(*left(problem, turns))))
        said = reply(problem, turns)
        if said is None:
            return turns
        turns.append(said)

def answer(turns):
    """The last guess."""
    return turns[-1]

def steps(problem, turns):
    """The guesses as (end, truth): true ones are among the numbers that are left."""
    found, end = [], 0
    for i in range(0, len(turns), 2):
        end += len(turns[i])
        low, high = left(problem, turns[:i])
        guess = number(turns[i])
        found.append((end, guess is not None and low <= guess <= high))
    return found

def reward(problem, turns):
    """1 if the last guess is the hidden number."""
    return {"correct": float(number(turns[-1]) == problem.hidden)}
