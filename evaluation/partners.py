"""How fast does a learner come to know its partner? Frozen learners meet co-players for the first time and play game
after game with them: what they earn in their first, second, ... game together. And the same with the subgoals of other
games: what is gained by knowing the partner must be lost again. Partners stay here, whatever --redraw the run was
trained with; what a learner carries over from game to game is what it carried over in training.

    python evaluation/partners.py runs/RUN
    python evaluation/partners.py runs/RUN --num-games 30 --population first_stag,last_stag    # other partners
    python evaluation/partners.py runs/ppo_gru__*                  # the recurrent baseline, which has no subgoals

RUN is the run folder of any seed, or a checkpoint; of ppo_gru.py, where each seed has its own, all of them. Beside the
first checkpoint: `partners.csv`, or `partners_<population>.csv`.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import stag_hunt_env as game
from benchmarks.baselines import ppo_gru
from evaluation import runs
from evaluation.runs import Run

import numpy as np
import torch
import tyro

NEEDS = ("infer_opponents", "history_decay")


@dataclasses.dataclass
class PartnersFlags:
    paths: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="PATHS")]] = ()
    """a checkpoint or a run folder; of ppo_gru.py one for each seed"""
    num_games: game.Count = 20
    """games with the same co-players"""
    places: game.Count = 1024
    """how many co-players each learner meets"""
    seats: str | None = None
    """who sits where (None: as in training)"""
    population: str | None = None
    """the players that mixed seats draw from (None: as in training)"""
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
    """play() -> done [T, B], the learner's return [T, B] where done. -> [S, num_games], mean of each game's number"""
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
    return sums.view(num_seeds, places, num_games).mean(1).cpu().numpy()


class SeatsOfNextPlace(game.Seats):
    """The same seats; but who is told who sits there is told it of the next place"""

    def __init__(self, seats: game.Seats):
        vars(self).update(vars(seats))

    def next_place(self, x):  # [S * places, ...]
        return x.unflatten(0, (self.num_blocks, -1)).roll(1, 1).flatten(0, 1)

    def oracle_id(self):
        return self.next_place(super().oracle_id())

    def posterior(self):
        return self.next_place(super().posterior())


def infer_next_place(run: Run, places: int):
    """infer_opponents, whose result is about the co-players in the next place"""

    def next_place(x):  # [M, n, ...] of places, or of what there is of each: trees, co-players
        return x.unflatten(1, (places, -1)).roll(1, 1).flatten(1, 2)

    def infer(*inputs):
        belief = run.script.infer_opponents(*inputs)
        return belief._replace(goals=next_place(belief.goals), params=next_place(belief.params))

    return infer


def of_script(args: Args, run: Run, shuffled: bool) -> np.ndarray:
    """Learners of hopplus_ppo.py or hopplus_mcts.py. shuffled: each reads, also as it searches, what is known about the
    co-players in the next place. What it sees and remembers stays its own."""
    num_seeds = run.num_seeds
    table = runs.seats_of(run, args.seats)
    game.refuse(table.count("learner") != 1, f"--seats {','.join(table)}: there must be 1 learner")
    seat = table.index("learner")
    index = [runs.learner_index(run.checkpoint, seed, seat) for seed in range(num_seeds)]
    changes = {
        "seats": ",".join(table),
        "imagination": False,
        "redraw": "never",  # partners stay
        "memory_discount": run.script.history_decay(run.args),  # a learner that had no memory gets none
        "num_envs": args.places,
    }
    if args.population is not None:
        changes["population"] = args.population
    state = runs.seat_learners(run, [table] * num_seeds, args.seed, index, **changes)
    infer = None
    if shuffled and run.args.subgoals in ("oracle", "posterior"):  # told, not inferred
        state.games.seats = SeatsOfNextPlace(state.games.seats)
    elif shuffled:
        infer = infer_next_place(run, args.places)

    def play():
        _, outputs, episodes = runs.play(run, state, 8, infer)
        runs.check_decisions(run.path, outputs["log_probs"])
        return episodes["done"], episodes["return"][..., seat]

    return by_game(play, num_seeds, args.places, args.num_games)


def load_gru(path: Path) -> dict:
    """A checkpoint of ppo_gru.py"""
    saved = runs.open_checkpoint(path)
    game.refuse(saved["format"] != ppo_gru.FORMAT, f"{path} is no checkpoint of ppo_gru.py: {saved['format']}")
    try:
        config = game.StagHuntConfig(**saved["args"]["config"])
        flags = ppo_gru.Args(**saved["args"] | {"config": config})
        game.check_ranges(flags)
    except (KeyError, TypeError, ValueError) as error:
        raise game.UserError(f"{path}: its flags are not those of ppo_gru.py: {error}") from error
    game.refuse(not isinstance(saved.get("agent"), dict), f"{path}: it holds no agent")
    return saved | {"args": flags}


def of_gru(args: Args, paths: list[Path], saved: list[dict]) -> np.ndarray:
    """Learners of ppo_gru.py, a checkpoint for each seed"""
    changes = {
        "device": args.device,
        "seed": args.seed,
        "num_seeds": len(paths),
        "redraw": "never",
        "unsteady": 0.0,
        "num_envs": args.places,
        "num_steps": 8,
        "state_reset_prob": 0.0,
    }
    for name in ("seats", "population"):
        if getattr(args, name) is not None:
            changes[name] = getattr(args, name)
    flags = dataclasses.replace(saved[0]["args"], **changes)
    table = game.seats_table(flags.seats, flags.config.num_players)
    game.refuse(table.count("learner") != 1, f"--seats {flags.seats}: there must be 1 learner")
    env, seats, agent, _, rollout_state = ppo_gru.make_training(flags)
    first = agent.state_dict()
    for path, checkpoint in zip(paths, saved, strict=True):
        for name, p in first.items():
            weight = checkpoint["agent"].get(name)
            fits = isinstance(weight, torch.Tensor) and weight.shape == (1, *p.shape[1:])
            game.refuse(not fits, f"{path}: {name} is missing or is not that of {paths[0]}'s flags")
    agent.load_state_dict({name: torch.cat([checkpoint["agent"][name] for checkpoint in saved]) for name in first})

    def play():
        batch = ppo_gru.rollout(flags, env, seats, agent, rollout_state)
        runs.check_decisions(paths[0], batch["log_prob"][..., None])
        return (batch[name].transpose(0, 1).flatten(1) for name in ("done", "final_return"))  # [S, T, E] -> [T, B]

    return by_game(play, len(paths), args.places, args.num_games)


def main(args: Args) -> dict[str, float]:
    """-> mean return in all games"""
    game.check_ranges(args)
    game.refuse(not args.paths, "PATHS: which run? Name a run folder or a checkpoint")
    try:
        game.population_names("random" if args.population is None else args.population)
    except ValueError as error:
        flag = "" if "--population" in str(error) else f"--population {args.population}: "
        raise game.UserError(f"{flag}{error}") from error
    paths = [game.find_checkpoint(path) for path in args.paths]
    first = paths[0]
    title = "_".join(["partners", *(args.population or "").split(",")]).rstrip("_")
    is_gru = runs.open_checkpoint(first)["format"].startswith("ppo-gru")
    others = {path.resolve() for path in paths} - {first.resolve()}
    game.refuse(not is_gru and bool(others), f"PATHS: only runs of ppo_gru.py have several: {args.paths}")
    runs.check_writable(first.parent / f"{title}.csv")
    if is_gru:
        saved = [load_gru(path) for path in paths]
        trained = saved[0]["args"]
        arms = {"return": of_gru(args, paths, saved)}
    else:
        flags = runs.RunFlags(path=str(first), script=args.script, device=args.device)
        run = runs.load_run(flags, [], NEEDS)
        trained = run.args
        arms = {"return": of_script(args, run, shuffled=False)}
        if run.args.subgoals != "none" or run.planner != "none":
            arms["shuffled"] = of_script(args, run, shuffled=True)
    rows = [["seed", "game", *arms]]
    for seed, number in np.ndindex(arms["return"].shape):
        rows.append([seed, number + 1, *(float(x[seed, number]) for x in arms.values())])
    runs.write_csv(first.parent / f"{title}.csv", rows)
    print(f"{first}, frozen; {args.places} meetings a seed, {len(arms['return'])} seed(s)")
    if game.redraw_prob(trained.redraw) > 0 and "mixed" in (trained.seats or ""):
        print(f"trained with --redraw {trained.redraw}; here every partner stays")
    for number in sorted({1, 2, 3, 5, 10, args.num_games}):
        if number > args.num_games:
            continue
        shown = []
        for name, returns in arms.items():
            mean, half = runs.interval(returns[:, number - 1])
            shown.append(f"{name} {runs.mean_text(mean, half)}")
        print(f"game {number:>3} together: {', '.join(shown)}")
    print(f"wrote {first.parent / title}.csv")
    return {name: float(x.mean()) for name, x in arms.items()}


def parse_args(words: list[str]) -> Args:
    return game.parse(Args, {"partners": PartnersFlags}, Args(), words)


if __name__ == "__main__":
    game.command_line(parse_args, main)
