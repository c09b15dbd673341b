"""How fast does a learner come to know its partner? Frozen learners meet co-players for the first time and play game
after game with them: what they earn in their first, second, ... game together. And the same with the subgoals of other
games: what is gained by knowing the partner must be lost again. Partners stay here, whatever --redraw the run was
trained with; what a learner carries over from game to game is what it carried over in training.

    python evaluation/partners.py runs/RUN
    python evaluation/partners.py runs/RUN --population first_stag,last_stag     # other partners
    python evaluation/partners.py runs/ppo_gru__*                  # the recurrent baseline, which has no subgoals

RUN is the run folder of any seed, or a checkpoint; of ppo_gru.py, where each seed has its own, all of them. Beside the
first checkpoint: `partners.csv`, or `partners_<population>.csv`, with the columns `return` and `shuffled`.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import stag_hunt_env as game
from benchmarks.baselines import ppo_gru
from evaluation import gru, runs
from evaluation.runs import Run

import numpy as np
import torch
import tyro


@dataclasses.dataclass
class PartnersFlags:
    paths: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="PATHS")]] = ()
    """a checkpoint or a run folder; of ppo_gru.py one for each seed"""
    games_together: game.Count = 20
    """games with the same co-players"""
    places: game.Count = 1024
    """places with co-players of their own, per seed; the table is their mean"""
    seats: str | None = None
    """who sits where (None: as in training)"""
    population: str | None = None
    """the players that mixed seats draw from, or one stranger (None: as in training)"""
    script: str | None = None
    """load this script, such as an edited copy (None: the one that made the checkpoint)"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to play; auto: on the GPU if there is one"""
    seed: runs.Seed = 1
    """seed of the games"""


@dataclasses.dataclass
class Args(PartnersFlags):
    paths: tuple[str, ...] = ()


def by_game(play, num_seeds: int, places: int, num_games: int) -> np.ndarray:
    """play() -> done [T, B], the learner's return [T, B] where done. -> [S, places, num_games]"""
    played = None
    sums = 0.0
    while played is None or int(played.min()) < num_games:
        done, returns = play()
        if played is None:
            played = torch.zeros_like(done[0], dtype=torch.int64)
        number = played + done.cumsum(0)  # 1 for the first game that ends
        counts = (number[..., None] == torch.arange(1, num_games + 1, device=done.device)) & done[..., None]
        sums = sums + (counts * returns[..., None]).sum(0).double()
        played = number[-1]
    return sums.view(num_seeds, places, num_games).cpu().numpy()


def infer_next_place(run: Run, places: int):
    """infer_opponents, whose result is about the co-players in the next place"""

    def next_place(x):  # [M, n, ...] of places, or of what there is of each: trees, co-players
        return x.unflatten(1, (places, -1)).roll(1, 1).flatten(1, 2)

    def infer(*inputs):
        belief = run.script.infer_opponents(*inputs)
        return belief._replace(goals=next_place(belief.goals), params=next_place(belief.params))

    return infer


def seats_table(args: Args, run: Run) -> list[str]:
    """Who sits where; in mixed seats the stranger, if --population is one"""
    table = runs.seats_of(run, args.seats)
    if table.count("learner") != 1:
        trained = game.seats_table(run.args.seats, len(table))
        seat = trained.index("learner")
        example = ["mixed"] * len(table)
        example[seat] = "learner"
        start = f"--seats {','.join(table)}: there must be 1 learner"
        more = f"for example --seats {','.join(example)}"
        raise game.UserError(f"{start}, {more}")
    if args.population in game.STRANGERS:
        return [args.population if name == "mixed" else name for name in table]
    return table


def population_of(args: Args, run: Run) -> str:
    if args.population is None or args.population in game.STRANGERS:
        return run.args.population
    return args.population


def frozen_script(args: Args, run: Run, shuffled: bool) -> np.ndarray:
    """Learners of hopplus_ppo.py or hopplus_mcts.py. shuffled: each reads, also as it searches, what is known about the
    co-players in the next place. What it sees and remembers stays its own."""
    num_seeds = run.num_seeds
    table = seats_table(args, run)
    seat = table.index("learner")
    index = [runs.learner_index(run.checkpoint, seed, seat) for seed in range(num_seeds)]
    changes = {
        "seats": ",".join(table),
        "imagination": False,
        "redraw": "never",  # partners stay
        "memory_discount": run.script.history_decay(run.args),  # a learner that had no memory gets none
        "num_envs": args.places,
        "population": population_of(args, run),
    }
    state = runs.seat_learners(run, [table] * num_seeds, args.seed, index, **changes)
    infer = None
    if shuffled:
        infer = infer_next_place(run, args.places)

    def play():
        _, outputs, episodes = runs.play(run, state, 8, infer)
        runs.check_decisions(run.path, outputs["log_probs"])
        return episodes["done"], episodes["return"][..., seat]

    return by_game(play, num_seeds, args.places, args.games_together)


def frozen_gru(args: Args, run: Run) -> np.ndarray:
    """Learners of ppo_gru.py"""
    flags = dataclasses.replace(
        run.args,
        seed=args.seed,
        num_envs=args.places,
        num_steps=8,
        population=population_of(args, run),
        redraw="never",
        unsteady=0.0,
    )
    env, seats, rollout_state = ppo_gru.make_games(flags, [seats_table(args, run)] * run.num_seeds)
    agent = gru.load_agent(run, list(range(run.num_seeds)))

    def play():
        batch = ppo_gru.rollout(flags, env, seats, agent, rollout_state)
        runs.check_decisions(run.path, batch["log_prob"][..., None])
        return (batch[name].transpose(0, 1).flatten(1) for name in ("done", "final_return"))  # [S, T, E] -> [T, B]

    return by_game(play, run.num_seeds, args.places, args.games_together)


def check_population(population: str | None) -> None:
    if population is None or population in game.STRANGERS:
        return
    try:
        game.population_names(population)
    except ValueError as error:
        flag = "" if "--population" in str(error) else f"--population {population}: "
        raise game.UserError(f"{flag}{error}") from error


def load_run(args: Args, paths: list[Path]) -> Run:
    if gru.is_gru(paths[0]):
        return gru.load_run(paths, args.device)
    others = {path.resolve() for path in paths} - {paths[0].resolve()}
    game.refuse(bool(others), f"PATHS: only runs of ppo_gru.py have several: {args.paths}")
    flags = runs.RunFlags(path=str(paths[0]), script=args.script, device=args.device)
    return runs.load_run(flags, [])


def main(args: Args) -> dict[str, float]:
    """-> mean return in all games"""
    game.check_ranges(args)
    game.refuse(not args.paths, "PATHS: which run? Name a run folder or a checkpoint")
    check_population(args.population)
    paths = [game.find_checkpoint(path) for path in args.paths]
    run = load_run(args, paths)
    seats_table(args, run)
    first = paths[0]
    title = "_".join(["partners", *(args.population or "").split(",")]).rstrip("_")
    runs.check_writable(first.parent / f"{title}.csv")
    arms = {}
    if run.script is ppo_gru:
        arms["return"] = frozen_gru(args, run)
    else:
        arms["return"] = frozen_script(args, run, shuffled=False)
        if run.args.subgoals != "none" or run.planner != "none":
            arms["shuffled"] = frozen_script(args, run, shuffled=True)
    rows = [["seed", "game", *arms]]
    for seed, number in np.ndindex(run.num_seeds, args.games_together):
        means = [float(returns[seed, :, number].mean()) for returns in arms.values()]
        rows.append([seed, number + 1, *means])
    runs.write_csv(first.parent / f"{title}.csv", rows)
    print(f"{first}, frozen; {args.places} meetings a seed, {run.num_seeds} seed(s)")
    if game.redraw_prob(run.args.redraw) > 0 and "mixed" in (run.args.seats or ""):
        print(f"trained with --redraw {run.args.redraw}; here every partner stays")
    for number in sorted({1, 2, 3, 5, 10, args.games_together}):
        if number > args.games_together:
            continue
        shown = []
        for name, returns in arms.items():
            mean, half, over = runs.interval_of_places(returns[:, :, number - 1])
            shown.append(f"{name} {runs.mean_text(mean, half)}")
        print(f"game {number:>3} together: {', '.join(shown)}")
    print(runs.interval_text(over))
    print(f"wrote {first.parent / title}.csv")
    return {name: float(x.mean()) for name, x in arms.items()}


def parse_args(words: list[str]) -> Args:
    return game.parse(Args, {"partners": PartnersFlags}, Args(), words)


if __name__ == "__main__":
    game.command_line(parse_args, main)
