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

import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import stag_hunt_env as game
from benchmarks.baselines import ppo_gru
from evaluation import evaluate

import numpy as np
import torch
import tyro


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
    seed: evaluate.Seed = 1
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


@contextlib.contextmanager
def others_beliefs(run: evaluate.Run, state, places: int):
    """Each learner reads, also as it searches, what is known about the co-players in the next place. What it sees and
    remembers stays its own."""

    def next_place(x, dim):  # places, or what there is of each: trees, co-players
        return x.unflatten(dim, (places, -1)).roll(1, dim).flatten(dim, dim + 1)

    if run.args.subgoals in ("oracle", "posterior"):  # told, not inferred
        known = {name: getattr(state.seats, name) for name in ("oracle_id", "posterior")}  # [S * places, N, _]
        for name, own in known.items():
            setattr(state.seats, name, lambda own=own: own().unflatten(0, (-1, places)).roll(1, 1).flatten(0, 1))
        yield
        return
    own = run.script.infer_opponents

    def infer_opponents(*given):
        belief = own(*given)  # goals [M, n, _], params [M, n * K, _]
        return belief._replace(goals=next_place(belief.goals, 1), params=next_place(belief.params, 1))

    with evaluate.replaced(run.script, "infer_opponents", infer_opponents):
        yield


def of_script(args: Args, run: evaluate.Run, shuffled: bool) -> np.ndarray:
    """Learners of hopplus_ppo.py or hopplus_mcts.py"""
    num_seeds, table = run.checkpoint["args"]["num_seeds"], evaluate.seats_of(run, args.seats)
    game.refuse(table.count("learner") != 1, f"--seats {','.join(table)}: there must be 1 learner")
    seat, seeds = table.index("learner"), list(range(args.seed, args.seed + num_seeds))
    index = [evaluate.learner_index(run.checkpoint, s, seat) for s in range(num_seeds)]
    population = run.args.population if args.population is None else args.population
    changes = {"seats": ",".join(table), "population": population, "imagination": False}
    # Partners stay. Memory is as it was in training: a learner that had none gets none.
    changes |= {"redraw": "never", "inter_episode_belief": run.script.history_decay(run.args) > 0}
    state = evaluate.make_state(run, [table] * num_seeds, seeds, index, num_envs=args.places, **changes)

    def play():
        _, outputs, episodes = evaluate.play(run, state, 8)
        evaluate.check_decisions(run.path, outputs["log_probs"])
        return episodes["done"], episodes["return"][..., seat]

    with others_beliefs(run, state, args.places) if shuffled else contextlib.nullcontext():
        return by_game(play, num_seeds, args.places, args.num_games)


def load_gru(path: Path) -> dict:
    """A checkpoint of ppo_gru.py"""
    saved = evaluate.open_checkpoint(path)
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
    changes = {"device": args.device, "seed": args.seed, "num_seeds": len(paths), "redraw": "never"}
    changes |= {"num_envs": args.places, "num_steps": 8, "state_reset_prob": 0.0}
    changes |= {name: getattr(args, name) for name in ("seats", "population") if getattr(args, name) is not None}
    own = dataclasses.replace(saved[0]["args"], **changes)
    table = game.seats_table(own.seats, own.config.num_players)
    game.refuse(table.count("learner") != 1, f"--seats {own.seats}: there must be 1 learner")
    env, seats, agent, _, rollout_state = ppo_gru.make_training(own)
    first = agent.state_dict()
    for path, found in zip(paths, saved, strict=True):
        for name, p in first.items():
            given = found["agent"].get(name)
            fits = isinstance(given, torch.Tensor) and given.shape == (1, *p.shape[1:])
            game.refuse(not fits, f"{path}: {name} is missing or is not that of {paths[0]}'s flags")
    agent.load_state_dict({name: torch.cat([found["agent"][name] for found in saved]) for name in first})

    def play():
        batch = ppo_gru.rollout(own, env, seats, agent, rollout_state)
        evaluate.check_decisions(paths[0], batch["log_prob"][..., None])
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
    first, title = paths[0], "_".join(["partners", *(args.population or "").split(",")]).rstrip("_")
    is_gru = evaluate.open_checkpoint(first)["format"].startswith("ppo-gru")
    others = {path.resolve() for path in paths} - {first.resolve()}
    game.refuse(not is_gru and bool(others), f"PATHS: only runs of ppo_gru.py have several: {args.paths}")
    evaluate.check_writable(first.parent / f"{title}.csv")
    if is_gru:
        saved = [load_gru(path) for path in paths]
        trained, arms = saved[0]["args"], {"return": of_gru(args, paths, saved)}
    else:
        flags = dataclasses.replace(evaluate.Args(path=str(first)), script=args.script, device=args.device)
        run = evaluate.load_run(flags, [], evaluate.CONTRACT + evaluate.FOR_PARTNERS)
        trained, arms = run.args, {"return": of_script(args, run, False)}
        if run.args.subgoals != "none" or getattr(run.args, "planner", "none") != "none":
            arms["shuffled"] = of_script(args, run, True)
    rows = [["seed", "game", *arms]]
    for seed, number in np.ndindex(arms["return"].shape):
        rows.append([seed, number + 1, *(float(x[seed, number]) for x in arms.values())])
    evaluate.write_csv(first.parent / f"{title}.csv", rows)
    print(f"{first}, frozen; {args.places} meetings a seed, {len(arms['return'])} seed(s)")
    if game.redraw_prob(trained.redraw) > 0 and "mixed" in (trained.seats or ""):
        print(f"trained with --redraw {trained.redraw}; here every partner stays")
    for number in sorted({1, 2, 3, 5, 10, args.num_games}):
        if number <= args.num_games:
            shown = (f"{name} {evaluate.mean_text(*evaluate.interval(x[:, number - 1]))}" for name, x in arms.items())
            print(f"game {number:>3} together: {', '.join(shown)}")
    print(f"wrote {first.parent / title}.csv")
    return {name: float(x.mean()) for name, x in arms.items()}


def parse_args(words: list[str]) -> Args:
    return game.parse(Args, {"partners": PartnersFlags}, Args(), words)


if __name__ == "__main__":
    game.command_line(parse_args, main)
