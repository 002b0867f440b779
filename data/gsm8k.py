"""GSM8K, grade-school word problems, from JSONL files as published:

    python grpo.py --task gsm8k --init FOLDER --train train.jsonl --test test.jsonl

A line has a `question`, and an `answer`: the working, and `#### n` at its end.
"""
import json
import re
from typing import NamedTuple

from data import Fault
from data.answers import one_number, steps, tagged  # noqa: F401, steps is the task's

# For a model of 0.5 billion parameters on a card of 24 GB.
DEFAULTS = dict(steps=500, prompts=16, group=16, max_new=384, lr=1e-6, minibatches=2,
                micro_tokens=4096, save_every=50, fit_prompts=512)

PROMPT = ("{}\nThink step by step between <think> and </think>, then give the final number alone "
          "between <answer> and </answer>.\n")


class Problem(NamedTuple):
    prompt: str
    answer: str     # "1080"
    solution: str   # the working as published, without the answer


def problems(cfg):
    """The problems of --train, and those of --test."""
    return read(cfg.train, "train"), read(cfg.test, "test")


def read(path, flag):
    """The problems of a file; raises Fault for one that is not as published."""
    if not path:
        raise Fault(f"the task gsm8k needs --{flag} FILE, a JSONL of questions and answers")
    found, n = [], 0
    try:
        with open(path, "rb") as file:
            for n, line in enumerate(file, 1):
                found.append(problem_of(json.loads(line.decode("utf-8-sig"))))
    except OSError as e:
        raise Fault(f"--{flag} {path}: {e.strerror}") from e
    except (ValueError, RecursionError) as e:
        raise Fault(f"--{flag} {path}, line {n}: {e.__class__.__name__}: {e}") from e
    if not found:
        raise Fault(f"--{flag} {path} is empty")
    return found


def problem_of(row):
    """The problem that a line's JSON holds; raises ValueError if it is not as published."""
    if not isinstance(row, dict):
        raise ValueError("not an object with a question and an answer")
    for name in ("question", "answer"):
        if not isinstance(row.get(name), str):
            raise ValueError(f"there is no text {name!r}")
        row[name].encode()                                  # a lone surrogate has no bytes
    solution, mark, answer = row["answer"].rpartition("####")
    number = one_number(answer)
    if not mark or number is None:
        raise ValueError("the answer does not end in '#### n'")
    return Problem(PROMPT.format(row["question"].strip()), str(number), solution.strip())


def demonstration(problem, rng):
    """The published working, without its calculator's marks, in tags."""
    working = re.sub("<<[^<>\n]*>>", "", problem.solution)
    return f"<think>\n{working}\n</think>\n<answer>{problem.answer}</answer>"


def answer(completion):
    """The number in the last answer's tags as text, for counting votes; "" if there is not one."""
    number = one_number(tagged(completion) or "")
    return "" if number is None else str(number)


def reward(problem, completion):
    """1 for the right number, and a tenth for an answer in its tags."""
    return {"correct": float(answer(completion) == problem.answer),
            "format": 0.1 * (tagged(completion) is not None)}
