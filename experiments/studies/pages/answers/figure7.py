"""answers/figure7.md. The names in braces are those of page.py, which writes the page."""
import figure7

found = kept("figure7")["rows"]
countdown = json.loads((ROOT / "experiments" / "models" / "countdown.json").read_text())["runs"].values()
before_after = [[f"{100 * run[when]['pass@8']:.0f}%" for when in ("before", "after")] for run in countdown]


def share(task, when, of):
    """The median over the seeds, as text."""
    return f"{100 * statistics.median(run[when][of] for run in found[task].values()):.0f}%"


rise = [100 * (run["after"]["pass@64"] - run["before"]["pass@64"]) for run in found["mines"].values()]

PAGE = rf"""# Figure 7 of the paper

All numbers behind [figure 7](../../../docs/figures.md#figure-7): medians over the seeds ([figure7.py](../figure7.py)).

- **Mines**, where demonstrators stray: at least one of 64 walks is correct for {share("mines", "before", "pass@64")} of the problems before
  RL and for {share("mines", "after", "pass@64")} after it, by seed {f"{min(rise):+.0f} to {max(rise):+.0f}".replace("-", "−")} points. At
  pass@8 all seeds rise, from {share("mines", "before", "pass@8")} to {share("mines", "after", "pass@8")}.{holds(all(run["after"]["pass@8"] > run["before"]["pass@8"] for run in found["mines"].values()))}
- **Countdown**, after supervised training on full solutions: SmolLM2's pass@8 goes, by seed, {", ".join(" to ".join(x) for x in before_after)}
  ([countdown.json](../../models/countdown.json)).

{chr(10).join(figure7.rows(found))}
"""
