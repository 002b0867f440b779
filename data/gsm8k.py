r"""GSM8K, grade-school word problems, from the published JSONL files:

    python grpo.py --task gsm8k --init FOLDER --train train.jsonl --test test.jsonl

Each line has a `question` and an `answer`, which is the working followed by `#### n`. A completion
must give the same number in its last \boxed{}, in whatever format `one_number` reads.
"""
import re
from typing import NamedTuple

from data import read_lines
from data.answers import boxed, last_number, one_number, steps  # noqa: F401, re-exports steps

# lr: measured with 0.5 billion parameters; the rest estimated for 24 GB.
DEFAULTS = dict(steps=500, prompts=16, group=16, max_new=384, lr=2e-6, minibatches=2,
                save_every=50)

def prompt(question):
    """A question as it is sent to the model, also by --ask, and in Qwen2.5's own evaluations: so
    Qwen2.5-Coder-0.5B solves 20 %, but 7.5 % if asked for tags."""
    return question + "\nPlease reason step by step, and put your final answer within \\boxed{}."

class Problem(NamedTuple):
    prompt: str
    answer: str     # "1080"
    solution: str   # the working as published, without the answer

def problems(train="", test="", longest=100_000):
    """Training problems from --train, which evaluations do not need, and held-out problems from
    --test. --longest N leaves out those whose question has more than N characters."""
    training = read_lines(train, problem_of) if train else []
    most = len(prompt("")) + longest
    return tuple([p for p in part if len(p.prompt) <= most]
                 for part in (training, read_lines(test, problem_of)))

def problem_of(row):
    """The problem in a line's JSON; an exception for another format."""
    solution, mark, answer = row["answer"].rpartition("####")
    number = one_number(answer)
    if not mark or number is None:
        raise ValueError("the answer does not end in '#### n'")
    return Problem(prompt(row["question"].strip()), str(number), solution.strip())

def demonstration(problem, rng):
    """The published working without its calculator annotations, and the answer in a box."""
    working = re.sub("<<[^<>\n]*>>", "", problem.solution)
    return f"{working}\nThe answer is \\boxed{{{problem.answer}}}."

def answer(completion):
    """The number in the last box as text, or ""."""
    number = one_number(boxed(completion) or "")
    return "" if number is None else str(number)

def reward(problem, completion):
    """1 for the right number in a box; 0 for a box alone, or policies would learn to guess.
    `lenient`, whether the last number is right, is only logged."""
    correct = float(answer(completion) == problem.answer)
    lenient = float(str(last_number(completion)) == problem.answer)
    return {"reward": correct, "correct": correct, "lenient": lenient}
