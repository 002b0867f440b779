"""answers/figure7.md. The names in braces are those of page.py, which writes the page."""
import figure7

before_after = [[f"{100 * run[when]['pass@8']:.0f}%" for when in ("before", "after")]
                for run in of_model("countdown").values()]
rise = changes("mines", "pass@64")

PAGE = rf"""# Figure 7 of the paper

All numbers behind [figure 7](../../../docs/figures.md#figure-7): medians over the seeds ([figure7.py](../figure7.py)).

- **Mines**, where demonstrators stray: at least one of 64 walks is correct for {of_figure7("mines", "before", "pass@64")} of the problems before
  RL and for {of_figure7("mines", "after", "pass@64")} after it, by seed {f"{min(rise):+.0f} to {max(rise):+.0f}".replace("-", "−")} points. At
  pass@8 all seeds rise, from {of_figure7("mines", "before", "pass@8")} to {of_figure7("mines", "after", "pass@8")}.{holds(min(changes("mines", "pass@8")) > 0)}
- **Countdown**, after supervised training on full solutions: SmolLM2's pass@8 goes, by seed, {", ".join(" to ".join(x) for x in before_after)}
  ([countdown.json](../../models/countdown.json)).

{chr(10).join(figure7.rows(kept("figure7")["rows"]))}
"""
