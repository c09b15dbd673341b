"""How fast does a learner come to know its partner? Frozen learners meet co-players for the first time
and play game after game with them: what they earn in their first, second, ... game together.

    python evaluation/partners.py runs/RUN --seats learner,mixed,nearest_hare,nearest_hare
    python evaluation/partners.py runs/RUN --population first_stag,left_stag    # other partners
    python evaluation/partners.py runs/ppo_gru_RUN                              # the recurrent baseline

And the same where each learner reads the subgoals of the games beside it ("shuffled"): what is gained
by knowing the partner must be lost again. Partners stay, whatever --redraw the run was trained with;
what a learner carries over from game to game is what it carried over in training.

Beside the checkpoint: `partners.csv`, or `partners_<population>.csv`.
"""

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from evaluation import runs
from evaluation.runs import Run, RunArgs

import torch
import tyro
from tqdm import tqdm


@dataclasses.dataclass
class Args(RunArgs):
    seats: str | None = None  # who sits where, one learner (None: as in training)
    population: str | None = None  # who may sit in mixed seats (None: as in training)
    games_together: int = 20  # games with the same co-players
    places: int = 1024  # with co-players of their own, per seed


def play(args: Args, run: Run, table: list[str], name: str):
    """Returns of the games together [S, places, games]"""
    seeds = range(run.args.num_seeds)
    seat = table.index("learner")
    changes = {
        "seed": args.seed,
        "num_envs": args.places,
        "num_steps": 1,
        "imagination": False,
        "redraw": "never",  # partners stay
        "population": args.population or run.args.population,
    }
    numbers = [runs.learner_number(run, seed, seat) for seed in seeds]
    state = runs.seat_learners(run, [table] * len(seeds), numbers, **changes)
    env = state.env
    returns = torch.zeros(env.num_envs, args.games_together, device=env.device)
    played = torch.zeros(env.num_envs, dtype=torch.int64, device=env.device)
    with tqdm(total=returns.numel(), desc=name, unit="game", leave=False) as bar:
        while (played < args.games_together).any():
            run.script.rollout(state, state.games)
            ended = (env.state.time == 0) & (played < args.games_together)
            returns[ended, played[ended]] = env.final_return[ended, seat]
            played += ended
            bar.update(int(ended.sum()))
    return returns.view(len(seeds), args.places, -1).cpu()


def shuffle_subgoals(run: Run, places: int) -> None:
    """From now on each learner reads, also as it searches, what is known about the co-players in the
    next place. What it sees and remembers stays its own."""
    perceive = run.script.perceive

    def next_place(x):  # [M, n, ...] of places, or of what there is of each: trees, co-players
        return x.unflatten(1, (places, -1)).roll(1, 1).flatten(1, 2)

    def perceive_shuffled(state, situation, *inferred):
        mind = perceive(state, situation, *inferred)
        if inferred and inferred[0] is not None:  # in a tree, as at its root: shuffled already
            return mind
        shuffled = {name: next_place(mind[name]) for name in ("goals", "posterior")}
        return mind | shuffled

    run.script.perceive = perceive_shuffled


def main(args: Args) -> list[dict]:
    run = runs.load_run(args.run, args.script, args.device)
    table = runs.seats_of(run, args.seats)
    alone = ",".join(["learner"] + ["mixed"] * (len(table) - 1))
    several = table.count("learner") > 1
    runs.refuse(several, f"--seats {','.join(table)}: there must be one learner, such as {alone}")
    returns = {"return": play(args, run, table, "together")}
    reads = getattr(run.args, "subgoals", "none") != "none"
    if reads or getattr(run.args, "searches", False):
        shuffle_subgoals(run, args.places)
        returns["shuffled"] = play(args, run, table, "shuffled")

    print(f"{run.folder}, frozen; {args.places} meetings a seed, {run.args.num_seeds} seed(s)")
    if run.args.redraw != "never":
        print(f"trained with --redraw {run.args.redraw}; here every partner stays")
    rows = []
    for number in range(args.games_together):
        means = {name: x[:, :, number].mean(1).tolist() for name, x in returns.items()}
        for seed in range(run.args.num_seeds):
            row = {"seed": run.args.seed + seed, "game": number + 1}
            rows.append(row | {name: x[seed] for name, x in means.items()})
        if number + 1 in (1, 2, 3, 5, 10, args.games_together):
            texts = [f"{name} {runs.mean_text(*runs.interval(x))}" for name, x in means.items()]
            print(f"game {number + 1:>3} together: {', '.join(texts)}")
    if run.args.num_seeds > 1:
        print("±: 95 % interval over training seeds")
    title = "_".join(["partners", *(args.population or "").split(",")]).rstrip("_")
    runs.write_csv(run.folder / f"{title}.csv", rows)
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(tyro.cli(Args))
