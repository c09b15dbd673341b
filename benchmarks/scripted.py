"""What a hunter earns that nobody trained: a mark to read a learner's return by.

    python benchmarks/scripted.py --seats learner,nearest_stag,nearest_hare,random
    python benchmarks/scripted.py --seats learner,mixed,mixed,mixed --height 8 --width 8

The Bayes hunter sits in the learner's seat, beside any players. It knows the rules of random, nearest_stag and
nearest_hare, infers who of these each co-player is from what it did in this game, and remembers nothing from other
games. A stag counts only if both can reach it in time. evaluation/adapt.py has it as a reference.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import stag_hunt_env as game
from evaluation.runs import interval, mean_text

import torch


@dataclasses.dataclass
class ScriptedFlags:
    seats: tuple[str, ...] = ()
    """who sits where, with one learner, such as learner,nearest_stag,random,random; one row for each"""
    places: game.Count = 1000
    """games at a time"""
    games: game.Count = 20
    """games in each place"""
    seed: game.Whole = 1
    """seed of the games"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to play; auto: on the GPU if there is one"""


@dataclasses.dataclass
class Args(ScriptedFlags):
    config: game.StagHuntConfig = dataclasses.field(default_factory=game.StagHuntConfig)


def hunts_stag(env: game.StagHuntEnv, name: str, distances: torch.Tensor) -> torch.Tensor:
    """[B, stags, N]: does a player of this name go for that stag? distances [B, stags, N]"""
    if name == "nearest_stag":
        return distances == distances.amin(1, keepdim=True)
    if name not in ("first_stag", "last_stag"):
        return torch.zeros_like(distances, dtype=torch.bool)
    bound_to = env.distance_to_prey(env.state, game.HUNT_STAG, name.removesuffix("_stag"))
    stags = env.state.prey_position[:, : env.config.num_stags].long()
    return (bound_to.gather(1, stags) == 0)[..., None].expand_as(distances)


def bayes_probs(env: game.StagHuntEnv, seats: game.Seats) -> torch.Tensor:
    """[M, E, 7] of the Bayes hunter in the learner's seat, one in each game. It walks to what pays most: a stag, as
    likely as somebody comes who is in time, or the nearest hare."""
    state, config, device = env.state, env.config, env.device
    games, seat, stags = torch.arange(env.num_envs, device=device), seats.learner_seat.flatten(), config.num_stags
    one_prey, maps = torch.eye(config.num_prey, dtype=torch.bool, device=device), []
    for prey in range(config.num_prey):
        alone = state._replace(prey_alive=state.prey_alive & one_prey[prey])
        maps.append(env.distance_to_prey(alone, game.HUNT_STAG if prey < stags else game.HUNT_HARE))
    cells = state.position.long()[:, None].expand(-1, config.num_prey, -1)
    distances = torch.stack(maps, 1).gather(2, cells)  # [B, prey, N]
    own = distances[games, :, seat]  # [B, prey]
    steps_left = (config.final_time - state.time)[:, None]
    to_hares = own.clone()
    to_hares[:, :stags] = game.FAR
    nearest = to_hares == to_hares.amin(1, keepdim=True)
    pays = config.hare_reward * (nearest & (to_hares < steps_left))  # [B, prey]
    if stags:
        posterior = seats.posterior()[:, None]  # [B, 1, N, P]
        kinds = torch.stack([hunts_stag(env, name, distances[:, :stags]) for name in seats.population], 3)
        both = torch.maximum(own[:, :stags, None], distances[:, :stags])
        in_time = (both < steps_left[..., None]) & state.present[:, None]
        comes = (posterior * kinds).sum(3) * in_time  # [B, stags, N]
        comes[games, :, seat] = 0.0
        pays[:, :stags] = (1 - (1 - comes).prod(2)) * config.stag_reward / 2
    goal = pays.argmax(1)
    alone = state._replace(prey_alive=state.prey_alive & one_prey[goal])
    probs = [game.hunter_probs(env, alone, prey=hunt)[games, seat] for hunt in (game.HUNT_STAG, game.HUNT_HARE)]
    return torch.where((goal < stags)[:, None], *probs).view(*seats.learner_seat.shape, game.NUM_ACTIONS)


def play(args: Args, table: list[str]) -> torch.Tensor:
    """-> mean return of each place [B] beside the players of `table`"""
    torch.manual_seed(args.seed)
    env = game.StagHuntEnv(args.config, args.places, game.resolve_device(args.device), args.seed)
    seats = game.Seats(env, [table])
    seat = int(seats.learner_seat[0, 0])
    played = torch.zeros(args.places, dtype=torch.int64, device=env.device)
    total = torch.zeros(args.places, device=env.device)
    while int(played.min()) < args.games:
        actions = game.sample(seats.action_probs(env.state, bayes_probs(env, seats)))
        _, _, present_before, done = env.step(actions)
        seats.update(actions, present_before, done)
        total += env.final_return[:, seat] * (done & (played < args.games))
        played += done
    return total / args.games


def main(args: Args) -> dict[str, float]:
    """-> mean return beside the players of each --seats"""
    game.check_ranges(args)
    config, games = args.config, args.places * args.games
    tables = {seats: game.seats_table(seats, config.num_players) for seats in args.seats}
    game.refuse(not tables, "--seats names nobody")
    for seats, table in tables.items():
        game.refuse(table.count("learner") != 1, f"--seats needs one learner, not {seats}")
    print(f"{config.setting}, {config.final_time} steps, {games} games")
    found = {}
    for seats, table in tables.items():
        returns = play(args, table).cpu().numpy()
        found[seats] = float(returns.mean())
        print(f"{seats:<7} {mean_text(*interval(returns))}")
    return found


def parse_args(words: list[str]) -> Args:
    return game.parse(Args, {"scripted": ScriptedFlags, "game": game.StagHuntConfig}, Args(), words)


if __name__ == "__main__":
    game.command_line(parse_args, main)
