"""Is any seat of the game favoured?

    python benchmarks/audit.py                            # exit code 1 if a seat is

Tests whether all seats have the same mean return. Seats of one game depend on each other, hence
Hotelling's T^2.
"""

import dataclasses
import itertools
import math
import sys
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from stag_hunt_env import Seats, StagHuntConfig, StagHuntEnv, sample

import numpy as np
import scipy.stats
import torch
import tyro


def equal_means_p(returns):
    """p of equal means of all columns of [games, N]"""
    difference = returns[:, 1:] - returns[:, :1]
    games, size = difference.shape
    mean = difference.mean(0)
    covariance = np.atleast_2d(np.cov(difference.T))
    t_squared = games * mean @ np.linalg.solve(covariance, mean)
    return float(scipy.stats.f.sf(t_squared * (games - size) / (size * (games - 1)), size, games - size))


def play_games(env, players):
    """One game in each place -> returns [B, N]"""
    seats = Seats(env, [[players] * env.config.num_players])
    state = env.initial_state()
    returns = 0
    for _ in range(env.config.final_time):  # a game that has ended pays nothing more
        state, reward, _, _ = env.transition(state, sample(seats.action_probs(state)))
        returns = returns + reward
    return returns


def audit(config, games, device, seed):
    """-> whether a seat is favoured"""
    print(f"mean return of each seat with 95 % interval, {games} games a row")
    cases = list(itertools.product((False, True), ("random", "nearest_stag", "mixed")))
    favoured = False
    for number, (permute, players) in enumerate(cases):
        case = dataclasses.replace(config, permute_ids=permute)
        env = StagHuntEnv(case, min(games, 20_000), device, seed + number)
        batches = [play_games(env, players) for _ in range(math.ceil(games / env.num_envs))]
        returns = torch.cat(batches)[:games].double().cpu().numpy()
        half = 1.96 * returns.std(0, ddof=1) / math.sqrt(games)
        p = equal_means_p(returns)
        favoured |= p < 0.01 / len(cases)
        seats = [f"{m:.4f} ± {h:.4f}" for m, h in zip(returns.mean(0), half, strict=True)]
        print(f"{players}, permute_ids {permute}: {', '.join(seats)}, p {p:.3f}", flush=True)
    print("A SEAT IS FAVOURED" if favoured else "no seat is favoured", f"(0.01 over {len(cases)} rows)")
    return favoured


@dataclasses.dataclass
class Args:
    config: StagHuntConfig
    games: int = 200_000  # for each row of the table
    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    seed: int = 1


def main(args):
    """-> the exit code"""
    torch.manual_seed(args.seed)
    return int(audit(args.config, args.games, args.device, args.seed))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, config=(tyro.conf.OmitArgPrefixes,))))
