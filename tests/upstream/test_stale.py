"""experiments/results.py and stale.py: each result says its commit and date, and what has changed since is listed."""
import json
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

from experiments import results, stale

FOUND = [path for path, _ in stale.results(ROOT)]


def test_each_result_says_its_commit_and_date():
    names = {str(path.relative_to(ROOT / "experiments")): path for path in FOUND}
    assert len(names) >= 16 and {"cost/gpu.json", "models/sums.json", "robustness/bugs.md", "studies/answers/kl.json"} <= {*names}
    for name, path in names.items():
        date, commit = stale.stamp(path)
        assert len(date) == 10 and len(commit) >= 7, f"{name}: see experiments/results.py, about"
    assert all(script.is_file() for _, script in stale.results(ROOT))


def committed(root, **texts):
    """Write files and commit them; the commit."""
    for name, text in texts.items():
        path = root / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git = ["git", "-C", root, "-c", "user.name=a", "-c", "user.email=b", "-c", "commit.gpgsign=false"]
    for words in (["add", "-A"], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *words], check=True)
    return subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()


def listed(root, capsys):
    stale.main(root)
    return [line.split() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.skipif(not shutil.which("git"), reason="no git")
def test_a_result_is_listed_with_what_changed_since(tmp_path, capsys):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    commit = committed(tmp_path, experiments__a__x_py="task = 'sums'", experiments__y_py="", experiments__m_py="", grpo_py="", data__sums_py="",
                       data__z_py="")
    new = json.dumps({"about": {"date": "2026-02-01", "commit": commit + "-dirty"}})
    old = json.dumps({"1": {"date": "2026-01-02", "commit": commit}, "2": [{"date": "2026-01-01", "commit": commit}]})
    page = f"| a |\n\nCommit {commit}, 2026-03-01: cpu.\n"
    committed(tmp_path, experiments__a__x_json=new, experiments__y_json=old, experiments__m_md=page,
              experiments__y_md="| made from y.json |")
    assert listed(tmp_path, capsys)[1:] == [[date, commit, "0", "0", name] for date, name in (
        ("2026-01-01", "y.json"), ("2026-02-01", "a/x.json"), ("2026-03-01", "m.md"))]
    committed(tmp_path, experiments__a__x_py="task = 'sums', 1", grpo_py="1")
    committed(tmp_path, data__sums_py="1")
    committed(tmp_path, data__z_py="1")
    assert [row[2:] for row in listed(tmp_path, capsys)[1:]] == [["0", "1", "y.json"], ["1", "2", "a/x.json"], ["0", "1", "m.md"]]
    committed(tmp_path, experiments__y_json='{"about": {"date": "2026-01-01", "commit": "abcdef1"}}', experiments__a__x_json="{}")
    assert [row for row in listed(tmp_path, capsys) if row[-1] in ("y.json", "a/x.json")] == [
        ["?", "?", "?", "?", "a/x.json"], ["2026-01-01", "abcdef1", "?", "?", "y.json"]]
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{tmp_path}", tmp_path / "shallow"], check=True)
    assert [line[0] for line in listed(tmp_path / "shallow", capsys)] == ["stale.py:"]


def test_without_a_history_there_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert len(listed(tmp_path, capsys)) == 1


def test_what_made_a_result(tmp_path):
    found = results.about("pytest", "no_such_package")
    assert {"commit", "date", "machine", "cores", "python", "torch", "pytest"} <= found.keys() and "no_such_package" not in found
    assert results.stamp().startswith(f"Commit {found['commit']}, {found['date']}: ")
    file = tmp_path / "a" / "x.json"
    results.write(file, {"about": found | {"commit": "abcdef1"}})
    assert stale.stamp(file) == (found["date"], "abcdef1")
    assert results.spread([0.5]) == "50.0%" and results.spread([1, 3, 2], ".0f") == "2 (1 to 3)" and results.spread([]) == ""
    assert results.peak() > 1e7 and sys.version.startswith(found["python"])
