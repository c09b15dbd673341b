"""The curves to look at first, of one or more runs, in one picture.

python benchmarks/dashboard.py runs/RUN [runs/OTHER ...] --out dashboard.png
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from stag_hunt_env import UserError, command_line, parse

PANELS = {  # tag: what to look for
    "charts/episodic_return": "3.0 is the most; all hares 1.0",
    "charts/stag_share": "a half: two hunt the stag",
    "losses/value_loss": "must not rise late",
    "losses/approx_kl": "far below 0.1",
    "moa/nll": "lower: better; dotted: the best possible",
    "wm/exact_match/1": "1: every board predicted right",
    "wm/horizon": "steps that may be imagined",
    "losses/explained_variance": "1: returns predicted exactly",
}
DOTTED = {"moa/nll": "moa/ceiling/nll"}


@dataclasses.dataclass
class Args:
    runs: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """folders of runs"""
    out: str = "dashboard.png"
    """the picture"""


def curve_of(lines: list[dict], tag: str) -> tuple[list[float], list[float]]:
    """-> steps, values; a script does not log everything"""
    logged = [line for line in lines if line.get(tag) is not None]
    return [line["steps"] for line in logged], [line[tag] for line in logged]


def main(args: Args) -> None:
    if not args.runs:
        raise UserError("which runs? Name their folders, for example runs/RUN")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.style.use(Path(__file__).resolve().parent / "plots.mplstyle")
    figure, axes = plt.subplots(2, len(PANELS) // 2, figsize=(13, 6))
    for run in args.runs:
        path = Path(run) / "metrics.jsonl"
        if not path.is_file():
            raise UserError(f"{run} is no folder of a run: it has no metrics.jsonl")
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for axis, (tag, hint) in zip(axes.flat, PANELS.items(), strict=True):
            (curve,) = axis.plot(*curve_of(lines, tag))
            if tag in DOTTED:
                axis.plot(*curve_of(lines, DOTTED[tag]), ":", color=curve.get_color())
            axis.set_title(f"{tag}\n{hint}", fontsize=10)
            axis.set_xlabel("env steps")
            axis.ticklabel_format(axis="x", style="sci", scilimits=(0, 0))
    names = [Path(run).name.rpartition("__")[0] or run for run in args.runs]  # without the time of the run
    figure.legend(axes[0, 0].lines, names, loc="lower center", ncols=2)
    figure.tight_layout(rect=(0, 0.04 + 0.03 * ((len(names) + 1) // 2), 1, 1))
    figure.savefig(args.out)
    plt.close(figure)


def parse_args(words: list[str]) -> Args:
    return parse(Args, {"dashboard": Args}, Args(), words)


if __name__ == "__main__":
    command_line(parse_args, main)
