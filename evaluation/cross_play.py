"""Do learners of one seed get along with those of another? One of each seed among those of each seed, frozen.

    python evaluation/cross_play.py runs/RUN                # a run of --num-seeds 2 or more, learners in all seats

RUN, `--script` and what follows `--`: as in evaluate.py. Everybody keeps the seat in which it learned; the guest sits
in each seat in turn. Beside the checkpoint: `cross_play.csv` and `cross_play.png`, the guest's return by its seed (row)
and its partners' seed (column).
"""

import dataclasses
import itertools
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from stag_hunt_env import Count, command_line, refuse, seats_table

import evaluate
import matplotlib.style
import numpy as np
import tyro
from evaluate import Run, RunFlags, interval, learner_index, make_state, mean_text, play_games, write_csv
from matplotlib.figure import Figure


@dataclasses.dataclass
class CrossPlayFlags:
    games: Count = 1000
    """games per pair of seeds"""


@dataclasses.dataclass
class Args(RunFlags, CrossPlayFlags):
    path: str = tyro.MISSING
    run: Run | None = None


def parse_args(words: list[str]) -> Args:
    return evaluate.parse_args(words, Args, {"run": RunFlags, "cross_play": CrossPlayFlags})


def off_diagonal(matrix: np.ndarray) -> tuple[float, float]:
    """Mean of what lies off the diagonal [S, S] and half width of its 95 % interval. All entries of a seed depend on
    each other, hence the jackknife over seeds; it needs three."""
    seeds, off = len(matrix), ~np.eye(len(matrix), dtype=bool)
    if seeds < 3:
        return float(matrix[off].mean()), math.nan
    without = [np.delete(np.delete(matrix, s, 0), s, 1)[off[1:, 1:]].mean() for s in range(seeds)]
    return interval([seeds * matrix[off].mean() - (seeds - 1) * mean for mean in without])


def main(args: Args) -> dict[str, float]:
    """-> mean return among one's own team and among other teams"""
    run, saved, config = args.run, args.run.checkpoint["args"], args.run.args.config
    n, seeds, table = config.num_players, saved["num_seeds"], seats_table(saved["seats"], config.num_players)
    refuse(seeds < 2, f"cross-play needs a run of at least 2 seeds, {run.path} has 1: train with --num-seeds")
    refuse(set(table) != {"learner"}, f"cross-play needs learners in all seats; {run.path}: --seats {','.join(table)}")
    csv_path, picture_path = (run.path.parent / f"cross_play.{kind}" for kind in ("csv", "png"))
    evaluate.check_writable(csv_path, picture_path)
    each = math.ceil(args.games / n / 32)  # in 32 places at once, so that many seeds find room
    places = math.ceil(args.games / n / each)
    meetings = list(itertools.product(range(seeds), range(seeds), range(n)))  # guest's seed, its partners', its seat
    index = [
        learner_index(run.checkpoint, guest if i == seat else team, i)
        for guest, team, seat in meetings
        for i in range(n)
    ]
    changes = {"num_envs": places, "share_parameters": False, "imagination": False}
    state = make_state(run, [table] * len(meetings), [args.seed], index, **changes)
    sums = {name: x.sum(1) for name, x in play_games(run, state, each).items()}  # [meetings, N]
    returns = (sums["return"] / sums["games"]).reshape(seeds, seeds, n, n)
    matrix = returns.diagonal(axis1=2, axis2=3).mean(2)  # of the guest, over its seats
    names = [str(saved["seed"] + s) for s in range(seeds)]
    print(f"{config.setting}, {run.path}, frozen; {places * each * n} games per pair")
    print("return of a learner of one seed (row) among learners of one seed (column)")
    print("".join(name.rjust(8) for name in ("", *names)))
    for name, row in zip(names, matrix, strict=True):
        print(name.rjust(8) + "".join(f"{value:8.3f}" for value in row))
    scores = {"own team": interval(matrix.diagonal()), "other teams": off_diagonal(matrix)}
    for name, score in scores.items():
        print(name, mean_text(*score))
    rows = [[name, *row] for name, row in zip(names, matrix.tolist(), strict=True)]
    write_csv(csv_path, [["learner of seed", *(f"among seed {name}" for name in names)], *rows])
    matplotlib.style.use(evaluate.ROOT / "benchmarks" / "plots.mplstyle")
    figure = Figure((2 + 0.6 * seeds, 2 + 0.6 * seeds), layout="tight")
    axis = figure.subplots()
    axis.imshow(matrix, alpha=0.5)
    axis.grid(visible=False)
    for (row, column), value in np.ndenumerate(matrix):
        axis.text(column, row, f"{value:.2f}", ha="center", va="center")
    axis.set_xticks(range(seeds), names)
    axis.set_yticks(range(seeds), names)
    axis.set(xlabel="among learners of seed", ylabel="learner of seed")
    figure.savefig(picture_path, dpi=100)
    return {name: mean for name, (mean, _) in scores.items()}


if __name__ == "__main__":
    command_line(parse_args, main)
