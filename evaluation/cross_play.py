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
from evaluation import runs
from evaluation.runs import Run, RunFlags, interval
from stag_hunt_env import Count, command_line, refuse, seats_table

import matplotlib.style
import numpy as np
import tyro
from matplotlib.figure import Figure


@dataclasses.dataclass
class CrossPlayFlags:
    games: Count = 1000
    """how many games a number is the mean of: per pair of seeds"""


@dataclasses.dataclass
class Args(RunFlags, CrossPlayFlags):
    path: str = tyro.MISSING
    run: Run | None = None


def parse_args(words: list[str]) -> Args:
    return runs.parse_args(words, Args, {"run": RunFlags, "cross_play": CrossPlayFlags})


def off_diagonal(guest: np.ndarray) -> tuple[float, float]:
    """guest [S, S, places] -> mean of what lies off the diagonal and half width of its 95 %
    interval. All entries of a seed depend on each other, hence the jackknife over seeds; with two
    seeds it is over games."""
    seeds = len(guest)
    off = ~np.eye(seeds, dtype=bool)
    if seeds < runs.SEEDS_FOR_INTERVAL:
        return runs.interval_of_places(guest[off])[:2]
    matrix = guest.mean(2)
    mean = matrix[off].mean()
    pseudo_values = []
    for seed in range(seeds):
        without = np.delete(np.delete(matrix, seed, 0), seed, 1)
        pseudo_values.append(seeds * mean - (seeds - 1) * without[off[1:, 1:]].mean())
    return interval(pseudo_values)


def main(args: Args) -> dict[str, float]:
    """-> mean return among one's own team and among other teams"""
    run = args.run
    saved = run.checkpoint["args"]
    config = run.args.config
    players = config.num_players
    seeds = run.num_seeds
    table = seats_table(saved["seats"], players)
    refuse(seeds < 2, f"cross-play needs a run of at least 2 seeds, {run.path} has 1: train with --num-seeds")
    refuse(set(table) != {"learner"}, f"cross-play needs learners in all seats; {run.path}: --seats {','.join(table)}")
    csv_path = run.path.parent / "cross_play.csv"
    picture_path = run.path.parent / "cross_play.png"
    runs.check_writable(csv_path, picture_path)
    each = math.ceil(args.games / players / 32)  # in 32 places at once, so that many seeds find room
    places = math.ceil(args.games / players / each)
    meetings = list(itertools.product(range(seeds), range(seeds), range(players)))
    index = []
    for guest, team, guest_seat in meetings:
        for seat in range(players):
            seed = guest if seat == guest_seat else team
            index.append(runs.learner_index(run.checkpoint, seed, seat))
    state = runs.seat_learners(
        run,
        [table] * len(meetings),
        args.seed,
        index,
        num_envs=places,
        share_parameters=False,
        imagination=False,
    )
    returns = runs.play_games(run, state, each)["return"] / each  # [meetings, places, N]
    by_seat = returns.reshape(seeds, seeds, players, places, players)
    of_guest = by_seat.diagonal(axis1=2, axis2=4)  # [S, S, places, its seat]
    guest = of_guest.reshape(seeds, seeds, -1)
    matrix = guest.mean(2)
    names = [str(saved["seed"] + s) for s in range(seeds)]
    print(f"{config.setting}, {run.path}, frozen; {places * each * players} games per pair")
    print("return of a learner of one seed (row) among learners of one seed (column)")
    print("".join(name.rjust(8) for name in ("", *names)))
    for name, row in zip(names, matrix, strict=True):
        print(name.rjust(8) + "".join(f"{value:8.3f}" for value in row))
    *own, over = runs.interval_of_places(guest[np.eye(seeds, dtype=bool)])
    scores = {"own team": own, "other teams": off_diagonal(guest)}
    for name, score in scores.items():
        print(name, runs.mean_text(*score))
    print(runs.interval_text(over))
    rows = [[name, *row] for name, row in zip(names, matrix.tolist(), strict=True)]
    runs.write_csv(csv_path, [["learner of seed", *(f"among seed {name}" for name in names)], *rows])
    matplotlib.style.use(runs.ROOT / "benchmarks" / "plots.mplstyle")
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
    print(f"wrote {csv_path}")
    print(f"wrote {picture_path}")
    return {name: mean for name, (mean, _) in scores.items()}


if __name__ == "__main__":
    command_line(parse_args, main)
