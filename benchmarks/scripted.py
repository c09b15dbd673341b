"""What hunters earn that nobody trained, in the games of the ladder (benchmarks/experiments.py): marks to read a
learner's return by. They sit in seat 0, walk by the rules of the game's players and differ in what they know about the
partner in seat 1.

    python benchmarks/scripted.py                                              # 8x8, 9 steps, the partner stays
    python benchmarks/scripted.py --height 4 --width 4 --final-time 5 --redraw game

hares: hunts hares. follow: the stag that the partner is nearer to. Bayes: what pays most by the exact posterior over
who the partner is. told: the same, told who it is. A stag counts only if both can reach it in time.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Literal

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import stag_hunt_env as game
from evaluation.evaluate import interval, mean_text

GOALS = ("first_stag", "last_stag", "nearest_hare")  # of the partner, and what seat 0 may go for
HUNTERS = ("hares", "follow", "Bayes", "told")


@dataclasses.dataclass
class ScriptedFlags:
    redraw: str = "never"
    """when the partner is a new one: after each game, never, or after a game with this probability"""
    places: game.Count = 1000
    """games at a time, each with its own partner"""
    games: game.Count = 20
    """games in each place"""
    seed: game.Whole = 1
    """seed of the games"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to play; auto: on the GPU if there is one"""


@dataclasses.dataclass
class Args(ScriptedFlags):
    config: game.StagHuntConfig = dataclasses.field(
        default_factory=lambda: game.StagHuntConfig(height=8, width=8, num_stags=2, final_time=9)
    )


def chances(hunter: str, env: game.StagHuntEnv, seats: game.Seats, distances: torch.Tensor) -> torch.Tensor:
    """[B, 2]: how likely the partner goes for the first, the last stag. distances [B, 2 stags, N]"""
    if hunter == "told":
        return (seats.kinds[:, 1:2] == torch.arange(2, device=env.device)).float()
    if hunter == "Bayes":
        return seats.posterior()[:, 1, :2]
    nearer = distances[:, :, 1].argmin(1, keepdim=True)
    return (nearer == torch.arange(2, device=env.device)).float() * (hunter == "follow")


def choose_goal(hunter: str, env: game.StagHuntEnv, seats: game.Seats) -> torch.Tensor:
    """[B] number in GOALS: what pays most"""
    state, config = env.state, env.config
    maps = torch.stack([env.distance_to_prey(state, game.HUNT_STAG, bound) for bound in ("first", "last")], 1)
    cells = state.position.long()[:, None].expand(-1, 2, -1)
    distances = maps.gather(2, cells)  # [B, 2 stags, N]
    in_time = distances[:, :, :2].amax(2) < (config.final_time - state.time)[:, None]
    pays = chances(hunter, env, seats, distances) * in_time * config.stag_reward / 2
    hare = torch.full_like(pays[:, :1], config.hare_reward)
    return torch.cat([pays, hare], 1).argmax(1)


def play(args: Args, hunter: str) -> torch.Tensor:
    """-> mean return of each place [B]"""
    torch.manual_seed(args.seed)
    env = game.StagHuntEnv(args.config, args.places, game.resolve_device(args.device), args.seed)
    others = ["nearest_hare"] * (args.config.num_players - 2)
    seats = game.Seats(env, [["nearest_hare", "mixed", *others]], False, GOALS, args.redraw, remember=True)
    played = torch.zeros(args.places, dtype=torch.int64, device=env.device)
    total = torch.zeros(args.places, device=env.device)
    while int(played.min()) < args.games:
        probs = seats.action_probs(env.state).clone()
        rules = torch.stack([game.PLAYER_PROBS[name](env, env.state, slice(0, 1))[:, 0] for name in GOALS], 1)
        probs[:, 0] = rules[torch.arange(args.places, device=env.device), choose_goal(hunter, env, seats)]
        actions = game.sample(probs)
        _, _, present_before, done = env.step(actions)
        seats.update(actions, present_before, done)
        total += env.final_return[:, 0] * (done & (played < args.games))
        played += done
    return total / args.games


def main(args: Args) -> dict[str, float]:
    """-> mean return of each hunter"""
    game.check_ranges(args)
    config, games = args.config, args.places * args.games
    print(f"{config.setting}, {config.final_time} steps, --redraw {args.redraw}, {games} games")
    found = {}
    for hunter in HUNTERS:
        returns = play(args, hunter).cpu().numpy()
        found[hunter] = float(returns.mean())
        print(f"{hunter:<7} {mean_text(*interval(returns))}")
    return found


def parse_args(words: list[str]) -> Args:
    return game.parse(Args, {"scripted": ScriptedFlags, "game": game.StagHuntConfig}, Args(), words)


if __name__ == "__main__":
    game.command_line(parse_args, main)
