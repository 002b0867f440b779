"""Which results are old: how many commits since then changed the script, and the core below it."""
import json
import re
import shutil
import subprocess
from pathlib import Path

CORE = ["grpo.py", "model.py", "reward.py", "run"]


def git(root, *words):
    """What git says; "" if it fails."""
    done = subprocess.run(["git", "-C", root, *words], capture_output=True, text=True)
    return done.stdout.strip()


def stamps(x):
    """Every (date, commit) in a JSON value."""
    if isinstance(x, dict) and {"date", "commit"} <= x.keys():
        yield x["date"], re.match(r"\w*", x["commit"])[0]
    for inner in x.values() if isinstance(x, dict) else x if isinstance(x, list) else ():
        yield from stamps(inner)


def stamp(path):
    """The oldest (date, commit) of a result; two empty texts if it has none."""
    if path.suffix == ".json":
        return min(stamps(json.loads(path.read_text())), default=("", ""))
    said = re.search(r"^Commit (\w+)\S*, (\S{10})", path.read_text(), re.M)
    return (said[2], said[1]) if said else ("", "")


def results(root):
    """The result files, and the script of each: of its name, or the one that its command names.
    A page beside a .json of its name is made from it."""
    for path in sorted((root / "experiments").glob("**/*")):
        beside = (folder / f"{path.stem}.py" for folder in path.parents)
        script = next((file for file in beside if file.exists()), None)
        if path.suffix == ".json" and not script:
            script = root / re.search(r"experiments/\S+\.py|$", path.read_text())[0]
        is_page = path.suffix == ".md" and not path.with_suffix(".json").exists()
        if path.suffix == ".json" or is_page and script:
            yield path, script


def main(root):
    if not shutil.which("git") or git(root, "rev-parse", "--is-shallow-repository") != "false":
        return print("stale.py: this checkout lacks its history, with which results are compared")
    print("date        commit    script    core    (commits since)")
    dated = sorted((stamp(path), path, script) for path, script in results(root))
    for (date, commit), path, script in dated:
        said = re.findall(r"\w+", script.read_text() if script.is_file() else "")
        tasks = [file for file in (root / "data").glob("*.py") if file.stem in said]
        since = ["rev-list", "--count", f"{commit}..HEAD", "--"]
        own, core = (commit and git(root, *since, *files)
                     for files in ([script], [*CORE, *tasks]))
        name = path.relative_to(root / "experiments")
        print(f"{date or '?':12}{commit or '?':10}{own or '?':>6}{core or '?':>8}    {name}")


if __name__ == "__main__":
    main(Path(__file__).resolve().parents[1])
