"""Faults in a person's own task or algorithm: the traceback, whose last lines say what failed and how to go on."""
import os
import subprocess
import sys

import pytest
from conftest import ROOT

TASK = '''
import os
from types import SimpleNamespace as P
DEFAULTS = dict(steps=3, prompts=2, group=2, max_new=4, held_out=2, samples=1, n_layer=1, n_embd=32, warm_steps=2, save_every=1)
def problems():
    made = [P(prompt=f"{i}?") for i in range(9)]
    return made[2:], made[:2]
def answer(said): return said
def demonstration(problem, rng): return "a"
TIMES = []
def reward(problem, said):
    os.chdir("/")
    TIMES.append(1)
    if len(TIMES) > 10: @@
    return {"correct": 0.0}
'''


def run(folder, *words):
    done = subprocess.run([sys.executable, str(ROOT / "grpo.py"), *words], cwd=folder, capture_output=True, text=True,
                          env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    return done.returncode, done.stdout, done.stderr.strip().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("fault, code, says", [
    ("1 / 0", 1, "ZeroDivisionError"), ("open('/none/x')", 1, "FileNotFoundError"), ("exit()", 1, "calls exit()"),
    ("return {'correct': 2}", 2, "from 0 (wrong) to 1 (right)"), ("return None", 2, "a dict with 'correct'")])
def test_a_fault_of_a_reward_says_how_to_go_on(fault, code, says, tmp_path):
    """An exception is a traceback, a wrong value one line; the folder that it changes to does not move the run."""
    (tmp_path / "t.py").write_text(TASK.replace("@@", fault))
    found, _, err = run(tmp_path, "--task", "t.py", "--out", "o")
    assert found == code and says in "\n".join(err) and "the reward of the prompt" in "\n".join(err)
    if code == 1:
        assert err[-1].endswith("continue with: python grpo.py --resume --out o --task t.py")
    else:
        assert len(err) == 1 and err[0].startswith("error: ")
    (tmp_path / "t.py").write_text(TASK.replace("@@", "pass"))
    assert run(tmp_path, "--resume", "--task", "t.py", "--out", "o")[0] == 0
