"""How fast does a learner come to know its partner? Frozen learners meet co-players for the first time and play game
after game with them: what they earn in their first, second, ... game together. And the same with the subgoals of other
games: what is gained by knowing the partner must be lost again.

    python evaluation/partners.py runs/RUN
    python evaluation/partners.py runs/RUN --num-games 30 --population first_stag,last_stag    # other partners
    python evaluation/partners.py runs/ppo_gru__*                  # the recurrent baseline, which has no subgoals

RUN is the run folder of any seed, or a checkpoint; of ppo_gru.py, where each seed has its own, all of them. Beside the
first checkpoint: `partners.csv`, or `partners_<population>.csv`.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import stag_hunt_env as game
from benchmarks.baselines import ppo_gru
from evaluation import evaluate


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
    seed: game.Whole = 1
    """seed of the games"""


@dataclasses.dataclass
class Args(PartnersFlags):
    paths: tuple[str, ...] = ()


def by_game(play, num_seeds: int, places: int, num_games: int) -> np.ndarray:
    """play() -> done [T, B], the learner's return [T, B] where done. -> [S, num_games], mean of each game's number"""
    played, sums = None, 0.0
    while played is None or int(played.min()) < num_games:
        done, returns = play()
        played = torch.zeros_like(done[0], dtype=torch.int64) if played is None else played
        number = played + done.cumsum(0)  # 1 for the first game that ends
        counts = (number[..., None] == torch.arange(1, num_games + 1, device=done.device)) & done[..., None]
        sums = sums + (counts * returns[..., None]).sum(0).double()
        played = number[-1]
    return sums.view(num_seeds, places, num_games).mean(1).cpu().numpy()


def of_script(args: Args, path: str, shuffled: bool) -> np.ndarray:
    """Learners of hopplus_ppo.py or hopplus_mcts.py"""
    flags = dataclasses.replace(evaluate.Args(path=path), script=args.script, device=args.device, seed=args.seed)
    run = evaluate.load_run(flags, [], evaluate.CONTRACT)
    num_seeds, config = run.checkpoint["args"]["num_seeds"], run.args.config
    table = game.seats_table(args.seats or run.args.seats, config.num_players)
    game.refuse(table.count("learner") != 1, f"there must be 1 learner in the seats {','.join(table)}")
    seat, seeds = table.index("learner"), list(range(args.seed, args.seed + num_seeds))
    index = [evaluate.learner_index(run.checkpoint, s, seat) for s in range(num_seeds)]
    changes = {"seats": ",".join(table), "population": args.population or run.args.population, "imagination": False}
    state = evaluate.make_state(run, [table] * num_seeds, seeds, index, num_envs=args.places, **changes)
    if shuffled:  # each learner reads what is known about the co-players in the next place
        own = run.script.evaluate_policy
        run.script.evaluate_policy = lambda *given: own(*given[:-1], given[-1].roll(1, 1))

    def play():
        _, _, episodes = evaluate.play(run, state, 8)
        return episodes["done"], episodes["return"][..., seat]

    return by_game(play, num_seeds, args.places, args.num_games)


def of_gru(args: Args, paths: list[Path]) -> np.ndarray:
    """Learners of ppo_gru.py, a checkpoint for each seed"""
    saved = [torch.load(path, map_location="cpu", weights_only=True) for path in paths]
    flags = saved[0]["args"] | {"config": game.StagHuntConfig(**saved[0]["args"]["config"])}
    flags |= {"device": args.device, "seed": args.seed, "num_seeds": len(paths)}
    flags |= {"num_envs": args.places, "num_steps": 8, "state_reset_prob": 0.0}
    flags |= {name: getattr(args, name) for name in ("seats", "population") if getattr(args, name)}
    own = ppo_gru.Args(**flags)
    env, seats, agent, _, rollout_state = ppo_gru.make_training(own)
    agent.load_state_dict({name: torch.cat([x["agent"][name] for x in saved]) for name in saved[0]["agent"]})

    def play():
        batch = ppo_gru.rollout(own, env, seats, agent, rollout_state)
        return (batch[name].transpose(0, 1).flatten(1) for name in ("done", "final_return"))  # [S, T, E] -> [T, B]

    return by_game(play, len(paths), args.places, args.num_games)


def main(args: Args) -> dict[str, float]:
    """-> mean return in all games"""
    game.check_ranges(args)
    game.refuse(not args.paths, "which run? Name a run folder or a checkpoint")
    paths = [Path(path) for path in args.paths]
    paths = [path / "checkpoint.pt" if (path / "args.json").is_file() else path for path in paths]
    first = paths[0]
    if not first.is_file() and (first.parent / "args.json").is_file():  # all seeds are in the first one's folder
        first = first.parent / json.loads((first.parent / "args.json").read_text())["checkpoint"]
    game.refuse(not first.is_file(), f"there is no checkpoint {first}")
    found = torch.load(first, map_location="cpu", mmap=True, weights_only=True)
    if found["format"].startswith("ppo-gru"):
        arms = {"return": of_gru(args, paths)}
    else:
        arms = {"return": of_script(args, str(first), False)}
        if found["args"]["subgoals"] != "none":
            arms["shuffled"] = of_script(args, str(first), True)
    rows = [["seed", "game", *arms]]
    for seed, number in np.ndindex(arms["return"].shape):
        rows.append([seed, number + 1, *(float(x[seed, number]) for x in arms.values())])
    path = first.parent / "_".join(["partners", *(args.population or "").split(",")]).rstrip("_")
    evaluate.write_csv(f"{path}.csv", rows)
    print(f"{first}, frozen; {args.places} meetings a seed, {len(arms['return'])} seed(s)")
    for number in sorted({1, 2, 3, 5, 10, args.num_games}):
        if number <= args.num_games:
            shown = (f"{name} {evaluate.mean_text(*evaluate.interval(x[:, number - 1]))}" for name, x in arms.items())
            print(f"game {number:>3} together: {', '.join(shown)}")
    print(f"wrote {path}.csv")
    return {name: float(x.mean()) for name, x in arms.items()}


def parse_args(words: list[str]) -> Args:
    return game.parse(Args, {"partners": PartnersFlags}, Args(), words)


if __name__ == "__main__":
    game.command_line(parse_args, main)
