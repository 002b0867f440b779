"""docs/data.md: what it shows is run."""
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from conftest import ROOT, metrics

import grpo

BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "data.md").read_text(), re.M | re.S)


def names_of(part):
    """What the first block and the one with `part` define."""
    found = {}
    for text in (BLOCKS[0], *(text for text in BLOCKS[1:] if part in text)):
        exec(text, found)
    return found


def test_a_file_of_problems(tmp_path):
    rows = [json.dumps(dict(prompt=f"{i}?", answer=i % 3, more=1)) + "\n" for i in range(9)]
    train, test = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    train.write_text("\n".join(rows[3:]))
    test.write_text("".join(rows[:3]))
    (tmp_path / "mine.py").write_text(BLOCKS[0])
    given = dict(task=tmp_path / "mine.py", train=train, test=test, out=tmp_path / "out",
                 steps=1, prompts=2, group=2, max_new=3, n_layer=1, n_embd=32, warm_steps=0,
                 samples=1, init="")
    grpo.main([f"--{name}={x}" for name, x in given.items()])
    assert len(metrics(tmp_path / "out")) == 2
    names = names_of("none")
    found, held_out = names["problems"](train, test)
    assert [p.answer for p in found] == [*"012012"] and held_out[1].prompt == names["prompt"]("1?")
    assert names["problems"](test=test) == ([], held_out)
    for text, correct in ((r"3 or \boxed{ 2 }.", 1), ("2.\n", 1), ("2 is it", 0), ("", 0)):
        assert names["reward"](found[2], text) == {"correct": correct}


def test_a_data_set_of_the_hub(monkeypatch):
    rows = {part: [dict(question=part, answer="2+2\n#### 4")] for part in ("train", "test")}
    hub = SimpleNamespace(load_dataset=lambda name, config: rows)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    train, held_out = names_of("load_dataset")["problems"]()
    assert train[0].prompt.startswith("train\n") and held_out[0].prompt.startswith("test\n")
    assert train[0].answer == "4"


def test_a_judge_over_http():
    asked, waited = [], []

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self):
            row = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(row["completion"])
            fails = row["prompt"] == "f" or asked.count(row["completion"]) == 1
            self.send_response(500 if fails else 200)
            self.end_headers()
            self.wfile.write(json.dumps({"score": len(row["prompt"]) / 4}).encode())

        def log_message(self, *given):
            pass
    names = names_of("urlopen")
    names["time"] = SimpleNamespace(sleep=waited.append)
    problems = [SimpleNamespace(prompt=x) for x in ("a", "bcd", "f")]
    with ThreadingHTTPServer(("localhost", 0), Judge) as server, ThreadPoolExecutor(1) as pool:
        pool.submit(server.serve_forever)
        names["URL"] = f"http://localhost:{server.server_port}"
        found = names["rewards"](problems[:2], ["x", "y"], [1, 1], [True] * 2)
        with pytest.raises(OSError, match="500"):
            names["rewards"](problems, ["x", "y", "z"], [1] * 3, [True] * 3)
        server.shutdown()
    assert found == [{"correct": 0.25}, {"correct": 0.75}] and waited == [1, 1, 1, 10]
    assert asked.count("z") == 3 and asked.count("y") == 3


@pytest.mark.parametrize("program, correct", [
    ("def add(a, b): return a + b", 1), ("def add(a, b): return a", 0), ("", 0), ("def add(", 0),
    ("while True: pass", 0), ("add = lambda a, b: 3\nx = [0] * 10 ** 9", 0),
    ("exit(77)", 0), ("if 0:\\", 0), ("\0", 0), ("1" * 200_000, 0),
    ("while True: print(1)", 0)])
def test_a_reward_that_runs_code(program, correct):
    names = names_of("ulimit")
    names["LIMITED"] = names["LIMITED"].replace("-t 5", "-t 1")
    problem = SimpleNamespace(answer="assert add(1, 2) == 3")
    assert names["reward"](problem, program) == {"correct": correct}
