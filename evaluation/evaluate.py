"""Frozen learners of a checkpoint, in any seats: what they earn and hunt, how well their MOA and their world model
predict, and a GIF of three games.

    python evaluation/evaluate.py runs/RUN                                   # in the seats of the training
    python evaluation/evaluate.py runs/RUN --seats learner,nearest_stag,nearest_hare,random
    python evaluation/evaluate.py runs/RUN --inspect                         # and a page that shows what they think
    python evaluation/evaluate.py runs/RUN --script my_copy.py -- --planner mcts   # an edited copy, flags of its own

RUN is the run folder of any seed, or a checkpoint. What follows `--` are flags of the script, on top of the
checkpoint's. Beside the checkpoint: `evaluation_<seats>.csv` and `.gif`; `_moa.csv`, `_moa_actions.csv` and `_moa.png`
if the run has a MOA (see moa.py), `_world_model.csv` if it has a world model (see world_model.py). Who searches has the
planner in the name.

All tools of this folder load the script that made the checkpoint, or an edited copy of it, which must keep what they
call.
"""

import dataclasses
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import stag_hunt_env as game
from evaluation import inspector, moa, runs, world_model
from evaluation.runs import Run, RunFlags

import tyro


@dataclasses.dataclass
class EvaluateFlags:
    seats: str | None = None
    """who sits where, one name a seat: learner, mixed, a player or a stranger (None: as in training)"""
    games: game.Count = 1000
    """how many games a number is the mean of: per seed of the run"""
    inspect: bool = False
    """also write inspect_<seats>.html, what the learners of the first seed think in 8 games (see inspector.py)"""


@dataclasses.dataclass
class Args(RunFlags, EvaluateFlags):
    path: str = tyro.MISSING
    run: Run | None = None


def parse_args(words: list[str]) -> Args:
    return runs.parse_args(words, Args, {"run": RunFlags, "evaluation": EvaluateFlags})


def film(run: Run, state, path: Path, games: int = 3) -> None:
    """A GIF of the next games in the first place"""
    env = state.games.env
    seats = state.games.seats
    frames = []
    while games:
        before = game.copy_state(env.state)
        returns = env.episode_return.clone()
        names = ["learner" if kind < 0 else seats.names[kind] for kind in seats.kinds[0].tolist()]
        transitions, _, episodes = runs.play(run, state, 1)
        actions = transitions.joint[0, 0, 0].roll(int(seats.learner_seat[0, 0]))  # from the learner's ego order
        frames.append(game.render_rgb(env.config, before, returns, names=names, hunting=actions))
        if episodes["done"][0, 0]:
            last = game.render_rgb(env.config, env.final_state, env.final_return, names=names)
            frames += [last] * 3
            games -= 1
    game.write_gif(str(path), frames)


def main(args: Args) -> dict[str, float]:
    """-> mean return of each seat, and of all learners"""
    run = args.run
    config = run.args.config
    num_seeds = run.num_seeds
    table = runs.seats_of(run, args.seats)
    name = "-".join(table)
    title = str(run.path.parent / f"evaluation_{name}")
    if run.planner != "none":
        title += f"_{run.planner}"
    page = run.path.parent / f"inspect_{name}.html"
    outputs = [f"{title}.csv", f"{title}.gif"]
    if "moa" in run.networks:
        outputs += moa.output_paths(title)
    if "world" in run.networks:
        outputs += world_model.output_paths(title)
    if args.inspect:
        outputs.append(page)
    runs.check_writable(*outputs)

    each = math.ceil(args.games / 256)
    places = math.ceil(args.games / each)
    index = runs.learner_indices(run, table, num_seeds)
    tables = [table] * num_seeds
    changes = {"seats": ",".join(table), "imagination": False}
    state = runs.seat_learners(run, tables, args.seed, index, num_envs=places, **changes)
    sums = runs.play_games(run, state, each)  # [S, places, N]
    returns = sums["return"] / each
    stag = sums["stag"] / each
    hare = sums["hare"] / each
    played = f"{places * each} games a seed, {num_seeds} seed(s)"
    print(f"{config.setting}, {run.path}, frozen, planner {run.planner}; {played}")
    columns = ["seat", "player", "return", "half_width_95", "interval_over"]
    rows = [[*columns, "stag_share", "hare_share"]]
    means = {}
    groups = {f"seat {i}": (player, [i]) for i, player in enumerate(table)}
    groups["team"] = ("learners", runs.learner_seats(table))
    for seat, (player, members) in groups.items():
        mean, half, over = runs.interval_of_places(returns[:, :, members].mean(2))
        stag_share = stag[:, :, members].mean()
        hare_share = hare[:, :, members].mean()
        row = [
            seat.removeprefix("seat "),
            player,
            mean,
            half,
            over,
            stag_share,
            hare_share,
        ]
        rows.append(row)
        shares = f"stag {stag_share:.2f} hare {hare_share:.2f}"
        print(f"{seat:<6} {player:<14} return {runs.mean_text(mean, half)}   {shares}")
        means[seat] = mean
    print(runs.interval_text(over))
    runs.write_csv(f"{title}.csv", rows)

    first = index[: len(index) // num_seeds]
    state = runs.seat_learners(run, [table], args.seed, first, num_envs=1, **changes)
    film(run, state, Path(f"{title}.gif"))
    changes["imagination"] = run.args.imagination and "world" in run.networks  # it has a MOA for this, too
    state = runs.seat_learners(run, tables, args.seed, index, num_envs=moa.PLACES, **changes)
    written = [f"{title}.csv", f"{title}.gif"]
    if state.networks.moa is not None:
        moa.report(run, state, title)
        written += moa.output_paths(title)
    if state.networks.world is not None:
        world_model.report(run, state, table, args.seed, title)
        written += world_model.output_paths(title)
    if args.inspect:
        written.append(page)
        inspector.write_page(page, inspector.inspect_run(run, args.seats, seed=args.seed))
    for path in written:
        print(f"wrote {path}")
    of_seats = {f"return/player_{i}": means[f"seat {i}"] for i in range(len(table))}
    return {**of_seats, "return/learners": means["team"]}


if __name__ == "__main__":
    game.command_line(parse_args, main)
